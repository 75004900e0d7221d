"""Registration, decode to prefill: eight frames.

    0  marker              `None`, exactly
    1  decode host         ASCII text, 1..255 bytes
    2  decode status port  canonical decimal, 1..65535
    3  session             ASCII text, 1..512 bytes, `host:port` of the data plane
    4  arena base          8 bytes, u64 in native order, not 0
    5  layout              layout JSON, 1..262144 bytes (pdplane.wire.layout_json)
    6  decode tp size      canonical decimal, 1..1024
    7  decode tp rank      canonical decimal, below the size

The *route* (frames 1 to 3) is readable by itself, so that a refusal can be sent when the rest is bad.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pdplane.errors import WireError
from pdplane.ids import SessionId
from pdplane.messages import Registration, Route
from pdplane.wire.scalars import (
    MAX_I64,
    MAX_U16,
    MAX_U64,
    MIN_I64,
    ascii_text,
    canonical,
    decimal_frame,
    ranged,
    text_frame,
    u64,
)

MARKER = b"None"
MAX_HOST = 255
MAX_SESSION = 512
MAX_LAYOUT = 262_144
MAX_TP = 1024
_FRAMES = 8


def encode_registration(registration: Registration) -> list[bytes]:
    """The eight frames; LocalProtocolError for text that is not ASCII or numbers that no frame can carry."""
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
    """Whether a message claims to be a registration: its first frame is the marker."""
    return bool(frames) and frames[0] == MARKER


def decode_route(frames: Sequence[bytes]) -> Route:
    """Where to send statuses for this registration; frames 4 to 7 are not looked at. Raises WireError."""
    if len(frames) != _FRAMES or not is_registration(frames):
        raise WireError("frame_count", f"CachePD slab registration requires exactly {_FRAMES} frames")
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
    """The whole registration, with the layout still as bytes. Raises WireError."""
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


def session_port(session: str) -> int | None:
    """The number after the session's last colon, or the whole text without one: u64, no cap at 65535, else None."""
    return u64(session.rpartition(":")[2].encode("utf-8", "replace"))
