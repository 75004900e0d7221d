"""Numbers, texts and JSON values of a frame, read strictly and written in one spelling.

Three grammars of integers meet on this wire: *canonical* decimals (digits only, no leading zero but "0"), i64 with an
optional sign and any number of leading zeros, and the session's port (u64 with an optional plus). Lengths are checked
before `int()`, which accepts more and refuses more than 4,300 digits. Rules: docs/legacy_wire.md section 12.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NoReturn, TypeAlias

import attrs

from pdplane.errors import LocalProtocolError, WireError

MAX_U16 = 2**16 - 1
MAX_I64 = 2**63 - 1
MIN_I64 = -(2**63)
MAX_U64 = 2**64 - 1

_SIGNED = re.compile(rb"([+-]?)([0-9]+)\Z")
_CANONICAL = re.compile(rb"(?:0|[1-9][0-9]*)\Z")


def canonical(frame: bytes, maximum: int) -> int | None:
    """Return a canonical decimal of 0..maximum, else None."""
    if len(frame) > len(str(maximum)) or not _CANONICAL.match(frame):
        return None
    value = int(frame)
    return value if value <= maximum else None


def i64(frame: bytes) -> int | None:
    """Return a signed 64-bit decimal, else None."""
    return _bounded(frame, MIN_I64, MAX_I64, rb"+-")


def u64(frame: bytes) -> int | None:
    """Return an unsigned 64-bit decimal that may carry a plus sign, else None."""
    return _bounded(frame, 0, MAX_U64, rb"+")


def _bounded(frame: bytes, low: int, high: int, signs: bytes) -> int | None:
    found = _SIGNED.match(frame)
    if found is None or found[1] not in signs:
        return None
    digits = found[2].lstrip(b"0")
    if len(digits) > len(str(high)):
        return None
    value = int(digits or b"0")
    value = -value if found[1] == b"-" else value
    return value if low <= value <= high else None


def ascii_text(frame: bytes) -> str | None:
    """Return the frame as text if it is ASCII (control characters included), else None."""
    return frame.decode("ascii") if frame.isascii() else None


def text_frame(text: str, name: str) -> bytes:
    """Return our own text as a frame; raise LocalProtocolError unless it is ASCII."""
    if not text.isascii():
        raise LocalProtocolError(f"{name} must be ASCII, not {text!a}")
    return text.encode("ascii")


def decimal_frame(value: int, low: int, high: int, name: str) -> bytes:
    """Return our own number as a canonical decimal; raise LocalProtocolError outside low..high."""
    return b"%d" % ranged(value, low, high, name)


def ranged(value: int, low: int, high: int, name: str) -> int:
    if type(value) is not int or not low <= value <= high:
        raise LocalProtocolError(f"{name} must be a whole number of {low}..{high}, not {value!r}")
    return value


# ---- Strict reading of JSON from a peer: every refusal names the path of the value at fault
#
# Any UTF-8, -16 or -32 encoding, key order and whitespace is read, as Python's own loader does. Refused: duplicate
# keys, NaN and Infinity, numbers of more digits than Python converts (4,300), and nesting deeper than its stack.


Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

MAX_WHOLE = 2**63 - 1
MAX_TEXT = 256


@attrs.frozen
class Value:
    """A JSON value and its path; its readers raise WireError(path, ...) for a value of another kind."""

    json: Json
    path: str

    def refuse(self, reason: str) -> NoReturn:
        raise WireError(self.path, f"{self.path} {reason}")

    def member(self, key: str) -> Value:
        """Return a required member of an object."""
        found = self._object()
        if key not in found:
            raise WireError(f"{self.path}.{key}", f"{self.path}.{key} is missing")
        return Value(found[key], f"{self.path}.{key}")

    def optional(self, key: str) -> Value | None:
        """Return a member of an object, None when it is absent or null."""
        found = self._object().get(key)
        return None if found is None else Value(found, f"{self.path}.{key}")

    def only(self, keys: Collection[str]) -> Value:
        """Return this object; refuse it if it has other keys."""
        for key in self._object():
            if key not in keys:
                self.refuse(f"has the unknown key {key[:MAX_TEXT]!a}")
        return self

    def items(self) -> list[Value]:
        return [Value(item, f"{self.path}[{index}]") for index, item in enumerate(self.array())]

    def array(self) -> list[Json]:
        if not isinstance(self.json, list):
            self.refuse("must be an array")
        return self.json

    def whole(self, low: int = 0, high: int = MAX_WHOLE) -> int:
        """Return an integer of low..high; a bool or a float is none."""
        if type(self.json) is not int or not low <= self.json <= high:
            self.refuse(f"must be a whole number of {low}..{high}")
        return self.json

    def wholes(self, low: int = 0) -> tuple[int, ...]:
        """Return an array of integers of low..2**63-1, checked without a Python loop."""
        array = self.array()
        numbers = tuple(number for number in array if type(number) is int)
        if len(numbers) != len(array) or (numbers and not (low <= min(numbers) and max(numbers) <= MAX_WHOLE)):
            self.refuse(f"must hold whole numbers of {low}..{MAX_WHOLE} only")
        return numbers

    def text(self, limit: int = MAX_TEXT, *, low: int = 1) -> str:
        """Return a string of low..limit characters without lone surrogates, which no log could print."""
        if not isinstance(self.json, str) or not low <= len(self.json) <= limit:
            self.refuse(f"must be a text of {low}..{limit} characters")
        if any("\ud800" <= character <= "\udfff" for character in self.json):
            self.refuse("must be valid Unicode")
        return self.json

    def _object(self) -> dict[str, Json]:
        if not isinstance(self.json, dict):
            self.refuse("must be an object")
        return self.json


def parse(data: bytes, name: str, limit: int) -> Value:
    """Return the JSON object in `data`, which may have 1..limit bytes. Raises WireError(name, ...)."""
    if not 1 <= len(data) <= limit:
        raise WireError(name, f"{name} must be 1..{limit} bytes")
    try:
        found = json.loads(
            data,
            object_pairs_hook=lambda pairs: _unique(pairs, name),
            parse_constant=lambda word: _refuse_constant(word, name),
        )
    except (ValueError, RecursionError) as error:  # bad Unicode, bad JSON and endless digits are ValueErrors
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
        raise WireError(name, f"{name} {reason}") from None
    if not isinstance(found, dict):
        raise WireError(name, f"{name} must be a JSON object")
    return Value(found, name)


def write(value: object) -> bytes:
    """Return canonical bytes: ASCII, no blanks, keys in the order given."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _unique(pairs: list[tuple[str, Json]], name: str) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError(name, f"{name} has an object with a key twice")
    return found


def _refuse_constant(word: str, name: str) -> NoReturn:
    raise WireError(name, f"{name} has the number {word}")
