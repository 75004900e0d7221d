"""How docstrings and comments are written: a function's begins with a verb, and figures of speech are left out."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.rows import rows

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "pdplane").rglob("*.py"))

NO_VERB = re.compile(
    r"(a|all|an|any|as|both|each|every|everything|for|how|its|no|nothing|of|one|only|our|some|the|these|this|under|until|"
    r"what|whatever|where|whether|which|who|whoever|why)",
    re.IGNORECASE,
)
FIGURES = re.compile(r"\b(knock\w*|doors?|ears?|bells?|let(s|ting)? go|(is|be) had|that which)\b")

every = rows("path", FILES)


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each function's docstring; a property's names a value, as an attribute's would."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if not is_property and (text := ast.get_docstring(node)):
            yield node.lineno, text


@every
def test_a_functions_docstring_begins_with_a_verb(path: Path) -> None:
    first = {line: re.split(r"[^\w']", text, maxsplit=1)[0] for line, text in docstrings(path)}
    assert {line: word for line, word in first.items() if not word or NO_VERB.fullmatch(word)} == {}


@every
def test_no_figures_of_speech(path: Path) -> None:
    assert [line for line in path.read_text().splitlines() if FIGURES.search(line)] == []
