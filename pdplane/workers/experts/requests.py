"""The fields of TX1's requests, and activations as bits of another dtype for peers that know float16 only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import WireError
from pdplane.net import JsonValue
from pdplane.workers.experts.store import ExpertLayer, ExpertStore
from pdplane.workers.experts.switch import ExpertCall
from pdplane.workers.experts.tx1 import Message

Bits = npt.NDArray[Any]


def to_half(bits: Bits, dtype: str) -> Bits:
    """Return bits of float32, float16 or bfloat16 as bits of float16."""
    return bits if dtype == "float16" else _wide(bits, dtype).astype(np.float16).view(np.uint16)


def from_half(bits: Bits, dtype: str) -> Bits:
    """Return bits of float16 as bits of `dtype`; float16 has more digits than bfloat16, which rounds to even."""
    if dtype == "float16":
        return bits
    numbers = bits.view(np.float16).astype(np.float32)
    return numbers.view(np.uint32) if dtype == "float32" else bfloat16_bits(numbers)


def bfloat16_bits(numbers: npt.NDArray[np.float32]) -> Bits:
    """Return float32 as bits of bfloat16, rounded to nearest, ties to even."""
    wide = numbers.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def _wide(bits: Bits, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32)


# ---- The fields of TX1's requests, checked against the model before anything is computed
#
# Refusals are WireErrors; the worker answers them with an `error` and keeps the connection.


DTYPES: Mapping[str, tuple[str, str]] = {
    "<f2": ("float16", "<u2"),
    "<f4": ("float32", "<u4"),
    "bfloat16": ("bfloat16", "<u2"),
}
"""The names of activations' dtypes on the wire: MLX's name, and numpy's for the bits."""
OLD_DTYPE = "<f2"
"""The dtype of a peer that names none."""

_MAX_ROWS = 1 << 24


@attrs.frozen(eq=False)
class ExecRequest:
    """What to run; `convert` for peers that name no dtype."""

    call: ExpertCall
    convert: bool


def read_dtype(header: JsonValue) -> str | None:
    """Return the dtype that a message names, None when it names none. Raises WireError."""
    found = header.optional("dtype")
    if found is not None and (not isinstance(found.json, str) or found.json not in DTYPES):
        found.refuse(f"must be one of {', '.join(DTYPES)}")
    return None if found is None else found.text()


def read_exec(message: Message, store: ExpertStore, agreed: str | None, max_reply_bytes: int) -> ExecRequest:
    """Return an `exec` message's request; `agreed` is the hello's dtype. Raises WireError, which names the field."""
    named = read_dtype(message.header) or agreed
    dtype = named or OLD_DTYPE
    layer = _layer(message.header.member("layer"), store)
    rows = message.header.member("rows").whole(0, _MAX_ROWS)
    width = message.header.member("dim")
    if width.whole() != layer.width:
        width.refuse(f"must be {layer.width}, the model's width")
    bits = np.dtype(DTYPES[dtype][1])
    if len(message.payload) != rows * layer.width * bits.itemsize:
        raise WireError(
            "payload", f"a payload of {len(message.payload)} bytes for {rows} rows of {layer.width} {dtype}"
        )
    pairs = _pairs(message.header.member("pairs"), rows, layer.num_experts)
    if len(pairs) * layer.width * bits.itemsize > max_reply_bytes:
        raise WireError("pairs", f"the results of {len(pairs)} pairs do not fit in {max_reply_bytes} bytes")
    data = np.frombuffer(message.payload, bits) if rows else np.empty(0, bits)
    found = ExpertCall(
        layer.layer, data.reshape(rows, layer.width), DTYPES[dtype][0], pairs[:, 0], pairs[:, 1],
        grouped=_is_grouped(message.header.optional("grouped"), pairs[:, 1]),
    )  # fmt: skip
    return ExecRequest(found, named is None)


def read_assignments(message: Message, store: ExpertStore, capacity: int) -> tuple[dict[int, list[int]], int]:
    """Return the experts to load by layer, and how many items were listed, doubles among them. Raises WireError."""
    assignments = message.header.member("assignments")
    if not isinstance(assignments.json, dict):
        assignments.refuse("must be an object")
    found: dict[int, list[int]] = {}
    listed = 0
    for text in assignments.json:
        layer = _layer(_number(text, assignments), store)
        experts = [_expert(item, layer) for item in assignments.member(text).items()]
        listed += len(experts)
        found[layer.layer] = list(dict.fromkeys(experts))
        if len(found[layer.layer]) > capacity:
            assignments.member(text).refuse(f"names more experts than the {capacity} slots of a layer")
    return found, listed


def _is_grouped(value: JsonValue | None, expert_of: npt.NDArray[np.int64]) -> bool:
    if value is None:
        return False
    if type(value.json) is not bool:
        value.refuse("must be true or false")
    if value.json and np.any(np.diff(expert_of) < 0):
        value.refuse("is true, but the pairs do not stand in the order of their experts")
    return bool(value.json)


def _layer(value: JsonValue, store: ExpertStore) -> ExpertLayer:
    number = value.whole()
    if number not in store.layers:
        value.refuse(f"{number} has no experts")
    return store.layers[number]


def _number(text: str, where: JsonValue) -> JsonValue:
    """Return a key of a JSON object as a number; only the plain spelling, so that two keys never mean one layer."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or str(int(text)) != text:
        where.refuse(f"has the key {text[:40]!a}, which is no layer")
    return JsonValue(int(text), f"{where.path}.{text}")


def _expert(item: JsonValue, layer: ExpertLayer) -> int:
    # Older coordinators may list experts as texts, since they read them from JSON keys.
    json = item.json
    found = int(json) if isinstance(json, str) and json.isascii() and json.isdecimal() and len(json) < 10 else json
    return JsonValue(found, item.path).whole(0, layer.num_experts - 1)


def _pairs(value: JsonValue, rows: int, num_experts: int) -> npt.NDArray[np.int64]:
    pairs: Sequence[object] = value.array()
    if any(type(pair) is not list or len(pair) != 2 for pair in pairs):
        value.refuse("must hold pairs of a row and an expert")
    numbers = [number for pair in pairs if isinstance(pair, list) for number in pair]
    if any(type(number) is not int for number in numbers):
        value.refuse("must hold whole numbers only")
    flat = JsonValue(numbers, value.path).wholes()
    found = np.array(flat, np.int64).reshape(-1, 2)
    for column, limit, name in ((0, rows, "rows"), (1, num_experts, "experts")):
        if len(found) and int(found[:, column].max()) >= limit:
            value.refuse(f"has a number outside the {limit} {name}")
    return found
