"""The cases of tests/vectors/wp30.json with their inputs made whole."""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

Case = dict[str, Any]

_FILE = json.loads((Path(__file__).parents[1] / "vectors" / "wp30.json").read_text())
FRAMES: list[Case] = _FILE["frames"]
SERVER: list[Case] = _FILE["server_observed"]

_NON_FINITE = {"nan": math.nan, "inf": math.inf}
_PAYLOADS = {"payload/bytearray": bytearray(b"xy"), "payload/memoryview": memoryview(b"xy")}


def header_of(case: Case) -> object:
    """The header as the Python value that was encoded."""
    if fill := case.get("header_fill"):
        key, _, count = fill.partition(" = 'x'*")
        return {key: "x" * int(count)}
    text = case["header_python_repr"]
    if text.endswith("..."):
        return case["header_json"]
    tree = ast.parse(text, mode="eval").body
    return _value(tree)


def payload_of(case: Case) -> bytes | bytearray | memoryview:
    if case["name"] in _PAYLOADS:
        return _PAYLOADS[case["name"]]
    if case["name"].startswith("odd_header/"):
        return b"p"
    if case.get("payload_fill"):
        return bytes.fromhex(case["payload_fill"]) * case["payload_len"]
    return bytes.fromhex(case["payload_hex"])


def stream_of(case: Case) -> bytes:
    """The bytes that the reader was given."""
    if case["stream_hex"] is not None:
        return bytes.fromhex(case["stream_hex"])
    made = {"decode/deep_nesting": deep_nesting(), "decode/huge_int": b'{"a":' + b"9" * 5000 + b"}"}[case["name"]]
    stream = b"WP30" + len(made).to_bytes(4, "big") + bytes(4) + made
    assert case["stream_note"].startswith(f"{len(stream)} bytes")
    return stream


def deep_nesting() -> bytes:
    return b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def _value(tree: ast.expr) -> object:
    if isinstance(tree, ast.Dict):
        return {_value(key): _value(value) for key, value in zip(tree.keys, tree.values, strict=True) if key}
    if isinstance(tree, ast.Name):
        return _NON_FINITE[tree.id]
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.operand, ast.Name):
        return -_NON_FINITE[tree.operand.id]
    return ast.literal_eval(tree)
