"""Notices, between native peers only: three frames beside the legacy messages.

    0  marker  `pdplane/1`; another number is another, incompatible grammar
    1  kind    ASCII word, one of the table below
    2  body    JSON object of at most 64 KiB with the attributes of the kind's class; extra keys are ignored

No legacy message begins with the marker: their first frame is `None` or a decimal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import MAX_ROOM
from pdplane.messages import (
    Cancel,
    Drain,
    Failed,
    Fingerprint,
    Hello,
    Notice,
    Ping,
    Refused,
    Registered,
    UnknownSession,
    Window,
)
from pdplane.net import JsonValue, parse_json, write_json
from pdplane.wire.fields import MAX_U64
from pdplane.wire.frames import MAX_SESSION

NOTICE_MARKER = b"pdplane/1"
MAX_BODY = 65_536
MAX_CAUSE = 2048
MAX_FACTS = 64
_FRAMES = 3

Reader = Callable[[JsonValue], object]


def _id(value: JsonValue) -> str:
    return value.text(128)


def _hash(value: JsonValue) -> str:
    return value.text(128, low=0)


def _session(value: JsonValue) -> str:
    return value.text(MAX_SESSION)


def _cause(value: JsonValue) -> str:
    return value.text(MAX_CAUSE, low=0)


def _room(value: JsonValue) -> int:
    return value.whole(0, MAX_ROOM)


def _generation(value: JsonValue) -> int:
    return value.whole(0, MAX_U64)


def _facts(value: JsonValue) -> tuple[tuple[str, str], ...]:
    pairs = [tuple(part.text(512, low=0) for part in pair.items()) for pair in value.items()]
    if len(pairs) > MAX_FACTS or any(len(pair) != 2 for pair in pairs):
        value.refuse(f"must be at most {MAX_FACTS} pairs of texts")
    return tuple((pair[0], pair[1]) for pair in pairs)


def _fingerprint(value: JsonValue) -> Fingerprint:
    return Fingerprint(_facts(value.member("required")), _facts(value.member("advisory")))


_ROOM_ENDS: Mapping[str, Reader] = {"room": _room, "generation": _generation, "cause": _cause}
_KINDS: Mapping[str, tuple[Callable[..., Notice], Mapping[str, Reader]]] = {
    "hello": (Hello, {"version": _id, "life": _id, "fingerprint": _fingerprint}),
    "registered": (Registered, {"session": _session, "life": _id}),
    "refused": (Refused, {"session": _session, "field": _cause, "ours": _cause, "theirs": _cause}),
    "window": (Window, {"room": _room, "generation": _generation, "prompt_hash": _hash}),
    "unknown_session": (UnknownSession, {"room": _room, "session": _session}),
    "failed": (Failed, _ROOM_ENDS),
    "cancel": (Cancel, _ROOM_ENDS),
    "ping": (Ping, {"life": _id}),
    "drain": (Drain, {"cause": _cause}),
}
_NAMES = {kind: name for name, (kind, _) in _KINDS.items()}
_FREE_TEXT = ("cause", "field", "ours", "theirs")


def encode_notice(notice: Notice) -> list[bytes]:
    """Return the three frames; free texts are cut to what a peer accepts.

    Raises LocalProtocolError for any other value.
    """
    name = _NAMES.get(type(notice))
    if name is None:
        raise LocalProtocolError(f"{notice!r} is no notice")
    body = attrs.asdict(notice)
    for key in _FREE_TEXT:
        if key in body:
            body[key] = str(body[key]).encode("utf-8", "replace").decode("utf-8")[:MAX_CAUSE]
    frames = [NOTICE_MARKER, name.encode("ascii"), write_json(body)]
    try:
        decode_notice(frames)  # what we cannot read ourselves, no peer can
    except WireError as error:
        raise LocalProtocolError(str(error)) from error
    return frames


def is_notice(frames: Sequence[bytes]) -> bool:
    """Return whether a message claims to be a notice of this grammar: its first frame is the marker."""
    return bool(frames) and frames[0] == NOTICE_MARKER


def decode_notice(frames: Sequence[bytes]) -> Notice:
    """Return the notice. Raises WireError, which names the value at fault."""
    if len(frames) != _FRAMES or not is_notice(frames):
        raise WireError("frame_count", f"a notice has exactly {_FRAMES} frames, the first {NOTICE_MARKER.decode()}")
    name = bytes(frames[1]).decode("ascii", "replace")
    if name not in _KINDS:
        raise WireError("kind", f"unknown notice {name[:64]!a}")
    kind, readers = _KINDS[name]
    body = parse_json(frames[2], name, MAX_BODY)
    return kind(**{key: read(body.member(key)) for key, read in readers.items()})
