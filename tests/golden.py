"""Golden cases from tests/vectors: what other implementations of this wire were seen to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from pdplane.kv.layout import Layout
from pdplane.wire.cache_json import parse_layout
from tests.rows import rows

_VECTORS = Path(__file__).parent / "vectors"

Case = dict[str, Any]


@lru_cache(maxsize=32)
def cases(name: str) -> tuple[Case, ...]:
    """Every case of one file, in order."""
    found = json.loads((_VECTORS / f"{name}.json").read_text())
    return tuple(found["cases"] if isinstance(found, dict) else found)


def each(name: str, wanted: Callable[[Case], bool] = lambda case: True) -> Any:  # noqa: ANN401  (a decorator)
    """Run a test for each of the file's cases, by their names."""
    return rows("case", filter(wanted, cases(name)), ids=lambda case: str(case["name"]))


def frames(hexes: list[str]) -> list[bytes]:
    return [bytes.fromhex(text) for text in hexes]


def wire_bytes(json_object: object) -> bytes:
    """Canonical bytes of a layout or manifest that stands in a case as an object."""
    return json.dumps(json_object, separators=(",", ":")).encode("ascii")


def layout_of(json_object: object) -> Layout:
    """The layout of a case, form only: some cases are compared or routed though nobody could use them."""
    return parse_layout(wire_bytes(json_object))


def refused(case: Case) -> bool:
    return isinstance(case["expected"], dict) and "error" in case["expected"]
