"""Numbers and texts of a frame, read strictly and written in one spelling.

Two grammars of integers meet on this wire: *canonical* decimals (digits only, no leading zero but "0"), and i64 with
an optional sign and any number of leading zeros. Lengths are checked before `int()`, which accepts more and refuses
more than 4,300 digits. Rules: docs/legacy_wire.md section 12.
"""

from __future__ import annotations

import re

from pdplane.errors import LocalProtocolError

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
    found = _SIGNED.match(frame)
    if found is None:
        return None
    digits = found[2].lstrip(b"0")
    if len(digits) > len(str(MAX_I64)):
        return None
    value = int(digits or b"0")
    value = -value if found[1] == b"-" else value
    return value if MIN_I64 <= value <= MAX_I64 else None


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
