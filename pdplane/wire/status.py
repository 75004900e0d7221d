"""Status, prefill to decode: seven frames written, three to seven read, later ones ignored.

    0  room                 i64 text, not negative
    1  status               i64 text, a StatusCode
    2  prefill rank         i64 text
    3  first token          i64 text, -1 for none                absent: -1
    4  candidates           int32 little-endian, or empty        absent: none
    5  cached prompt tokens i64 text                             absent: 0
    6  first token logprob  f64 little-endian, or empty          absent: none

Empty is not absent: an empty token or cached frame is an error. An empty list of candidates reads back as none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Rank, Room
from pdplane.messages import Status, StatusCode
from pdplane.wire.scalars import MAX_I64, MAX_U64, MIN_I64, decimal_frame, i64

_LOGPROB_BYTES = 8
_CODES = {code.value: code for code in StatusCode}


def encode_status(status: Status) -> list[bytes]:
    """The seven frames; LocalProtocolError for a value that no frame can carry."""
    if not isinstance(status.code, StatusCode):
        raise LocalProtocolError(f"{status.code!r} is no status")
    if status.logprob is not None and len(status.logprob) != _LOGPROB_BYTES:
        raise LocalProtocolError("the logprob must be the 8 bytes of a double")
    return [
        decimal_frame(status.room, 0, MAX_U64, "room"),
        b"%d" % status.code.value,
        decimal_frame(status.prefill_rank, MIN_I64, MAX_I64, "prefill_rank"),
        decimal_frame(status.first_token, MIN_I64, MAX_I64, "first_token"),
        _candidates_frame(status.candidates or ()),
        decimal_frame(status.cached_tokens, MIN_I64, MAX_I64, "cached_tokens"),
        status.logprob or b"",
    ]


def decode_status(frames: Sequence[bytes]) -> Status:
    """Read three to seven frames in the order of the wire's checks. Raises WireError."""
    if len(frames) < 3:
        raise WireError("frame_count", "a status message has at least 3 frames")
    room = _integer(frames[0], "room", "room")
    if room < 0:
        raise WireError("room", "room is negative")
    code = _CODES.get(_integer(frames[1], "status", "status"))
    if code is None:
        raise WireError("status", "unknown status")
    rank = _integer(frames[2], "prefill_rank", "prefill rank")
    token = _integer(frames[3], "bootstrap_token", "bootstrap token") if len(frames) > 3 else -1
    candidates = _candidates(frames[4]) if len(frames) > 4 else None
    cached = _integer(frames[5], "cached_tokens", "cached tokens") if len(frames) > 5 else 0
    logprob = _logprob(frames[6]) if len(frames) > 6 else None
    return Status(Room(room), code, Rank(rank), token, candidates, cached, logprob)


def _candidates_frame(candidates: tuple[int, ...]) -> bytes:
    try:
        return struct.pack(f"<{len(candidates)}i", *candidates)
    except struct.error as error:
        raise LocalProtocolError("candidates must be 32-bit integers") from error


def _integer(frame: bytes, field: str, words: str) -> int:
    value = i64(frame)
    if value is None:
        raise WireError(field, f"{words} is not an integer")
    return value


def _candidates(frame: bytes) -> tuple[int, ...] | None:
    if len(frame) % 4:
        raise WireError("candidates", "candidate ids are not int32")
    return struct.unpack(f"<{len(frame) // 4}i", frame) if frame else None


def _logprob(frame: bytes) -> bytes | None:
    if len(frame) not in (0, _LOGPROB_BYTES):
        raise WireError("logprob", "the logprob is not a double")
    return bytes(frame) if frame else None
