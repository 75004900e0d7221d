"""Who may import whom: the arrows of the design, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.rows import rows

ROOT = Path(__file__).parents[1] / "pdplane"

_LOW = {"ids", "errors"}
_BASE = _LOW | {"security", "net", "kv", "messages"}
_NODE = _BASE | {"api", "wire", "machine", "control", "transport", "plane", "engine", "node"}

# What a package may import besides itself. The sans-IO halves never meet but in `control`; `control`, `transport` and
# `engine` do not know each other.
ALLOWED: dict[str, set[str]] = {
    "ids": set(),
    "errors": {"ids"},
    "options": {"ids"},
    "security": _LOW,
    "net": _LOW,
    "kv": _LOW | {"security", "net"},
    "messages": _LOW | {"security", "net", "kv"},
    "api": _BASE,
    "wire": _BASE,
    "machine": _BASE,
    "control": _BASE | {"wire", "machine"},
    "transport": _BASE,
    "engine": _LOW | {"kv", "messages", "api"},
    "plane": _BASE | {"wire", "machine", "control", "transport"},
    "node": _NODE - {"node"},
    "serving": _NODE,
    "toy": _BASE | {"api"},
    "workers": _NODE,
    "testing": _NODE,
    "bench": _NODE | {"serving", "toy", "testing", "workers", "options"},
    "cli": _NODE | {"serving", "toy", "testing", "workers", "bench", "options"},
    "__init__": _BASE | {"machine", "control", "transport", "plane"},  # the library's names, loaded when asked for
    "__main__": {"cli"},
}

# Where a heavy dependency may be imported: a package, or one module as an exception.
ONLY_IN: dict[str, set[str]] = {
    "zmq": {"control", "testing", "bench", "cli/inspect"},
    "aiohttp": {"control", "serving", "cli", "bench/serve_client"},  # which is a client of any OpenAI server
    "mlx": {"engine", "workers"},
    "mlx_lm": {"engine", "workers"},
}


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            module = node.module or ""
            yield from (f"{module}.{name.name}" for name in node.names)


def _violations(path: Path) -> Iterator[str]:
    here = path.relative_to(ROOT).with_suffix("").as_posix()
    package = here.partition("/")[0]
    for name in _imports(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top == "pdplane" and (target := rest.partition(".")[0] or "__init__") not in ALLOWED[package] | {package}:
            yield f"{here} imports {target}"
        if top in ONLY_IN and not {package, here} & ONLY_IN[top]:
            yield f"{here} imports {top}"


@rows("path", sorted(ROOT.rglob("*.py")))
def test_imports_point_left(path: Path) -> None:
    assert list(_violations(path)) == []


def test_the_table_has_no_cycle() -> None:
    seen: set[str] = set()
    while ready := {name for name, targets in ALLOWED.items() if name not in seen and targets <= seen}:
        seen |= ready
    assert seen == set(ALLOWED)
