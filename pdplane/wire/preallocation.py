"""Pre-allocation, decode to prefill: three frames.

0  room      canonical decimal, 0..2**63-1
1  session   ASCII text, 1..512 bytes
2  manifest  manifest JSON (pdplane.wire.manifest_json), empty for a rank that only joins the agreement
"""

from __future__ import annotations

from collections.abc import Sequence

from pdplane.errors import WireError
from pdplane.ids import MAX_ROOM, Room, SessionId
from pdplane.messages import Preallocation
from pdplane.wire.registration import MAX_SESSION
from pdplane.wire.scalars import MAX_U64, ascii_text, canonical, decimal_frame, text_frame

MAX_MANIFEST = 2 * 1024 * 1024
_FRAMES = 3


def encode_preallocation(preallocation: Preallocation) -> list[bytes]:
    """The three frames; LocalProtocolError for a room or a session that no frame can carry."""
    return [
        decimal_frame(preallocation.room, 0, MAX_U64, "room"),
        text_frame(preallocation.session, "session"),
        preallocation.manifest,
    ]


def preallocation_route(frames: Sequence[bytes]) -> tuple[Room, SessionId]:
    """Room and session, readable when the manifest is bad. Raises WireError."""
    if len(frames) != _FRAMES:
        raise WireError("frame_count", f"CachePD pre-allocation requires exactly {_FRAMES} frames")
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
    """The whole pre-allocation, with the manifest still as bytes. Raises WireError."""
    room, session = preallocation_route(frames)
    if len(frames[2]) > MAX_MANIFEST:
        raise WireError("manifest", f"CachePD manifest must be at most {MAX_MANIFEST} bytes")
    return Preallocation(room, session, bytes(frames[2]))
