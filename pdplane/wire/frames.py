"""The three messages of both generations: registration, pre-allocation and status.

Registration, decode to prefill: eight frames.

    0  marker              `None`, exactly
    1  decode host         ASCII text, 1..255 bytes
    2  decode status port  canonical decimal, 1..65535
    3  session             ASCII text, 1..512 bytes, `host:port` of the data plane
    4  arena base          8 bytes, u64 in native order, not 0
    5  layout              layout JSON, 1..262144 bytes (pdplane.wire.cache_json)
    6  decode tp size      canonical decimal, 1..1024
    7  decode tp rank      canonical decimal, below the size

The *route* (frames 1 to 3) is readable by itself, so that a refusal can be sent when the rest is bad.

Pre-allocation, decode to prefill: three frames.

    0  room                canonical decimal, 0..2**63-1
    1  session             ASCII text, 1..512 bytes
    2  manifest            manifest JSON (pdplane.wire.cache_json), empty for a decode rank that gets no bytes

Status, prefill to decode: seven frames written, three to seven read, later ones ignored.

    0  room                i64 text, not negative
    1  status              i64 text, a StatusCode
    2  prefill rank        i64 text
    3  first token         i64 text, -1 for none                absent: -1
    4  candidates          int32 little-endian, or empty        absent: none
    5  cached tokens       i64 text                             absent: 0
    6  first token logprob f64 little-endian, or empty          absent: none

Empty is not absent: an empty token or cached frame is an error. An empty list of candidates reads back as none.
Rules: docs/legacy_wire.md sections 3, 5, 6 and 12.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import MAX_ROOM, Rank, Room, SessionId
from pdplane.messages import Preallocation, Registration, Route, Status, StatusCode
from pdplane.wire.fields import (
    MAX_I64,
    MAX_U16,
    MAX_U64,
    MIN_I64,
    ascii_text,
    canonical,
    decimal_frame,
    i64,
    ranged,
    text_frame,
)

MARKER = b"None"
MAX_HOST = 255
MAX_SESSION = 512
MAX_LAYOUT = 262_144
MAX_TP = 1024
_REGISTRATION_FRAMES = 8


def encode_registration(registration: Registration) -> list[bytes]:
    """Return the eight frames.

    Raises LocalProtocolError for text that is not ASCII or numbers that no frame carries.
    """
    return [
        MARKER,
        text_frame(registration.host, "host"),
        decimal_frame(registration.port, 0, MAX_U16, "port"),
        text_frame(registration.session, "session"),
        ranged(registration.arena_base, 0, MAX_U64, "arena_base").to_bytes(8, sys.byteorder),
        registration.layout,
        decimal_frame(registration.tp_size, MIN_I64, MAX_I64, "tp_size"),
        decimal_frame(registration.tp_rank, MIN_I64, MAX_I64, "tp_rank"),
    ]


def is_registration(frames: Sequence[bytes]) -> bool:
    """Return whether a message claims to be a registration: its first frame is the marker."""
    return bool(frames) and frames[0] == MARKER


def decode_route(frames: Sequence[bytes]) -> Route:
    """Return where statuses for this registration go, without a look at frames 4 to 7. Raises WireError."""
    if len(frames) != _REGISTRATION_FRAMES or not is_registration(frames):
        raise WireError("frame_count", f"CachePD slab registration requires exactly {_REGISTRATION_FRAMES} frames")
    host = ascii_text(frames[1])
    if host is None:
        raise WireError("endpoint", "CachePD registration endpoint must be ASCII")
    session = ascii_text(frames[3])
    if session is None:
        raise WireError("session", "CachePD registration session must be ASCII")
    if not 1 <= len(host) <= MAX_HOST:
        raise WireError("endpoint", "CachePD registration endpoint is invalid")
    if not 1 <= len(session) <= MAX_SESSION:
        raise WireError("session", "CachePD registration session is invalid")
    port = canonical(frames[2], MAX_U16)
    if not port:
        raise WireError("port", "CachePD registration port is invalid")
    return Route(host, port, SessionId(session))


def decode_registration(frames: Sequence[bytes]) -> Registration:
    """Return the whole registration, with the layout still as bytes. Raises WireError."""
    route = decode_route(frames)
    if len(frames[4]) != 8:
        raise WireError("pointer", "CachePD slab pointer frame must be exactly 8 bytes")
    arena_base = int.from_bytes(frames[4], sys.byteorder)
    if not arena_base:
        raise WireError("pointer", "CachePD slab pointer must be nonzero")
    if not 1 <= len(frames[5]) <= MAX_LAYOUT:
        raise WireError("layout", f"CachePD registration layout must be 1..{MAX_LAYOUT} bytes")
    tp_size = canonical(frames[6], MAX_TP)
    if not tp_size:
        raise WireError("tp_size", f"CachePD decode_tp_size must be canonical ASCII of 1..{MAX_TP}")
    tp_rank = canonical(frames[7], tp_size - 1)
    if tp_rank is None:
        raise WireError("tp_rank", "CachePD decode_tp_rank must be canonical ASCII below decode_tp_size")
    return Registration(route.host, route.port, route.session, arena_base, bytes(frames[5]), tp_size, tp_rank)


# ---- Pre-allocation


MAX_MANIFEST = 2 * 1024 * 1024
_PREALLOCATION_FRAMES = 3


def encode_preallocation(preallocation: Preallocation) -> list[bytes]:
    """Return the three frames; raise LocalProtocolError for a room or a session that no frame can carry."""
    return [
        decimal_frame(preallocation.room, 0, MAX_U64, "room"),
        text_frame(preallocation.session, "session"),
        preallocation.manifest,
    ]


def preallocation_route(frames: Sequence[bytes]) -> tuple[Room, SessionId]:
    """Return room and session, which are readable when the manifest is bad. Raises WireError."""
    if len(frames) != _PREALLOCATION_FRAMES:
        raise WireError("frame_count", f"CachePD pre-allocation requires exactly {_PREALLOCATION_FRAMES} frames")
    room = canonical(frames[0], MAX_ROOM)
    if room is None:
        raise WireError("room", "CachePD room must be canonical unsigned ASCII")
    session = ascii_text(frames[1])
    if session is None:
        raise WireError("session", "CachePD session must be ASCII")
    if not 1 <= len(session) <= MAX_SESSION:
        raise WireError("session", "CachePD request requires a Decode session")
    return Room(room), SessionId(session)


def decode_preallocation(frames: Sequence[bytes]) -> Preallocation:
    """Return the whole pre-allocation, with the manifest still as bytes. Raises WireError."""
    room, session = preallocation_route(frames)
    if len(frames[2]) > MAX_MANIFEST:
        raise WireError("manifest", f"CachePD manifest must be at most {MAX_MANIFEST} bytes")
    return Preallocation(room, session, bytes(frames[2]))


# ---- Status


_LOGPROB_BYTES = 8
_CODES = {code.value: code for code in StatusCode}


def encode_status(status: Status) -> list[bytes]:
    """Return the seven frames; raise LocalProtocolError for a value that no frame can carry."""
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
