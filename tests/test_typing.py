"""The public types as a type checker sees them from outside: the examples, and a program that uses every name."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pdplane
from tests import public_program
from tests.plane.test_library_page import program
from tests.rows import rows

ROOT = Path(__file__).parents[1]
OF_TORCH = {"transformers_pair.py"}  # which is not installed here
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.py") if path.name not in OF_TORCH)
PROGRAM = ROOT / "tests" / "public_program.py"
FAKES = ROOT / "tests" / "fake_vllm"  # the types of what an example imports and nobody installs here

# Types in public signatures that an embedder neither makes nor names: they come from a plane, or are only structure.
OPAQUE = {"BufferHost", "Copies", "DlpackHost", "RankRoute"}


def run(*command: str) -> None:
    environment = os.environ | {"MYPYPATH": str(FAKES)}
    told = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_mypy_strict(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    page = tmp_path / "library_page.py"
    page.write_text(program())
    run("mypy", "--strict", "--config-file=", *map(str, EXAMPLES), str(PROGRAM), str(page))


def test_pyright(tmp_path: Path) -> None:
    """With basedpyright, which is pyright in a wheel that brings its own Node: no download, no npm."""
    pytest.importorskip("basedpyright", reason="pyright is part of the extra `dev` only")
    settings = {
        "typeCheckingMode": "standard",
        "include": [*map(str, EXAMPLES), str(PROGRAM)],
        "extraPaths": [str(ROOT), str(FAKES), str(ROOT / "examples" / "vllm_connector")],
        "pythonVersion": "3.11",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    run("basedpyright", "-p", str(tmp_path), "--pythonpath", sys.executable)


def test_the_program_uses_every_public_name() -> None:
    text = PROGRAM.read_text()
    assert [name for name in pdplane.__all__ if text.count(name) < 2] == []


def test_the_program_runs(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of some length")
    secret.chmod(0o600)
    assert public_program.main(secret) == [
        "the room wants 0 to 40",
        "the room goes on",
        "the room goes on",
        "the room is offered",
        "the room begins with 7",
    ]


def _callables(name: str) -> Iterator[tuple[str, Callable[..., object]]]:
    found = getattr(pdplane, name)
    if inspect.isfunction(found):
        yield name, found
    if inspect.isclass(found):
        for part, member in inspect.getmembers(found):
            member = member.fget if isinstance(member, property) else member
            if (inspect.isfunction(member) or inspect.ismethod(member)) and (part[0] != "_" or part == "__init__"):
                yield f"{name}.{part}", member


def _names(hint: object) -> Iterator[str]:
    """The product's classes in an annotation."""
    if getattr(hint, "__module__", "").startswith("pdplane.") and not isinstance(hint, typing.TypeVar):
        yield str(getattr(hint, "__name__", hint))
    for part in typing.get_args(hint):
        for inner in part if isinstance(part, list) else (part,):
            yield from _names(inner)


@rows("name", pdplane.__all__)
def test_what_a_public_signature_needs_is_public(name: str) -> None:
    missing = {
        f"{place}: {needed}"
        for place, found in _callables(name)
        for hint in typing.get_type_hints(found).values()
        for needed in _names(hint)
        if needed not in {*pdplane.__all__, *OPAQUE}
    }
    assert missing == set()
