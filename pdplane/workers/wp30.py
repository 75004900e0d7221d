"""WP30 frames: one JSON header and one payload.

    "WP30" | u32 header length | u32 payload length | header | payload          (network order)

The header is what `json.dumps` writes with its defaults: ASCII, `", "` and `": "`, keys in the order given. Reading
takes any UTF-8 JSON object. NaN and Infinity are refused both ways: they are no JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import NoReturn

import attrs

from pdplane.errors import LocalProtocolError, WireError
from pdplane.wire.json_value import Json
from pdplane.workers.line import Line, bytes_of

MAGIC = b"WP30"
PREFIX_BYTES = 12
MAX_LENGTH = 2**32 - 1

_PREFIX = struct.Struct("!4sII")


@attrs.frozen
class FrameLimits:
    """The largest lengths that a reader accepts; checked before any memory is taken."""

    header_bytes: int = 4 << 20
    payload_bytes: int = 1 << 30


@attrs.frozen(eq=False)
class Frame:
    """A frame that was read; `nbytes` counts all of it."""

    header: dict[str, Json]
    payload: memoryview
    nbytes: int


def encode_frame(header: object, payload: bytes | bytearray | memoryview = b"") -> list[bytes | memoryview]:
    """A frame as parts that are sent one after the other; the payload is not copied.

    Raises TypeError or ValueError for a header that is no JSON, LocalProtocolError for one that is too long.
    """
    text = json.dumps(header, allow_nan=False).encode("ascii")
    view = bytes_of(payload)
    if max(len(text), len(view)) > MAX_LENGTH:
        raise LocalProtocolError(f"a frame of {len(text)} and {len(view)} bytes does not fit in u32 lengths")
    return [_PREFIX.pack(MAGIC, len(text), len(view)) + text, view]


def decode_prefix(data: bytes | memoryview, limits: FrameLimits) -> tuple[int, int]:
    """The header's and the payload's length. Raises WireError."""
    magic, header_bytes, payload_bytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise WireError("magic", f"the magic is {bytes(magic)!r}, not {MAGIC!r}")
    if not 1 <= header_bytes <= limits.header_bytes:
        raise WireError("header", f"a header of {header_bytes} bytes, allowed are 1..{limits.header_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise WireError("payload", f"a payload of {payload_bytes} bytes, allowed are {limits.payload_bytes}")
    return header_bytes, payload_bytes


def decode_header(data: bytes | memoryview) -> dict[str, Json]:
    """The header object. Raises WireError for anything else."""
    try:
        found = json.loads(str(data, "utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad Unicode, bad JSON and endless digits are ValueErrors
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
        raise WireError("header", f"the header {reason}") from None
    if not isinstance(found, dict):
        raise WireError("header", "the header is not a JSON object")
    return found


def send_frame(line: Line, header: Mapping[str, object], payload: bytes | bytearray | memoryview = b"") -> int:
    """Send one frame; gives its bytes, 12 and both lengths."""
    parts = encode_frame(header, payload)
    line.write(*parts)
    return sum(len(part) for part in parts)


def read_frame(line: Line, limits: FrameLimits, *, prefix: memoryview | None = None) -> Frame:
    """Read one frame, whose prefix may have been read before. Raises WireError or OSError."""
    header_bytes, payload_bytes = decode_prefix(line.read(PREFIX_BYTES) if prefix is None else prefix, limits)
    header = decode_header(line.read(header_bytes))
    return Frame(header, line.read(payload_bytes), PREFIX_BYTES + header_bytes + payload_bytes)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(word)
