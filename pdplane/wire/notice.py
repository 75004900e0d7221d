"""Notices, between native peers only: three frames beside the legacy messages.

    0  marker  `pdplane/1`; another number is another, incompatible grammar
    1  kind    ASCII word, one of the table below
    2  body    JSON object of at most 64 KiB with the keys of the kind; extra keys are ignored

`failed`, `cancel` and `refused` may have one key more: `what`, the name of a `Cause`. Without it, or with a value
that we do not know, a peer has failed or refused for a reason that only people can read; its text decides nothing.

No legacy message begins with the marker: their first frame is `None` or a decimal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdplane.errors import Cause, LocalProtocolError, Why, WireError
from pdplane.ids import MAX_ROOM
from pdplane.messages import (
    MAX_TOP_LOGPROBS,
    Cancel,
    Drain,
    Failed,
    Fingerprint,
    Hello,
    Notice,
    Ping,
    Queued,
    Refused,
    Registered,
    TopLogprobs,
    UnknownSession,
    Window,
)
from pdplane.net import JsonValue, parse_json, write_json
from pdplane.wire.fields import MAX_U64
from pdplane.wire.frames import MAX_SESSION

NOTICE_MARKER = b"pdplane/1"
MAX_BODY = 65_536
MAX_REASON = 2048
MAX_FACTS = 64
_FRAMES = 3

Reader = Callable[[JsonValue], object]


def _id(value: JsonValue) -> str:
    return value.text(128)


def _hash(value: JsonValue) -> str:
    return value.text(128, low=0)


def _session(value: JsonValue) -> str:
    return value.text(MAX_SESSION)


def _text(value: JsonValue) -> str:
    return value.text(MAX_REASON, low=0)


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


def _top(value: JsonValue) -> TopLogprobs:
    pairs = [pair.items() for pair in value.items()]
    if len(pairs) > MAX_TOP_LOGPROBS or any(len(pair) != 2 for pair in pairs):
        value.refuse(f"must be at most {MAX_TOP_LOGPROBS} pairs of a token and a logprob")
    return tuple((token.whole(), logprob.number()) for token, logprob in pairs)


_ROOM_ENDS: Mapping[str, Reader] = {"room": _room, "generation": _generation, "cause": _text}
_KINDS: Mapping[str, tuple[type[Notice], Mapping[str, Reader]]] = {
    "hello": (Hello, {"version": _id, "life": _id, "fingerprint": _fingerprint}),
    "registered": (Registered, {"session": _session, "life": _id}),
    "refused": (Refused, {"session": _session, "field": _text, "ours": _text, "theirs": _text}),
    "window": (Window, {"room": _room, "generation": _generation, "prompt_hash": _hash}),
    "queued": (Queued, {"room": _room, "session": _session, "generation": _generation, "prompt_hash": _hash}),
    "unknown_session": (UnknownSession, {"room": _room, "session": _session}),
    "failed": (Failed, _ROOM_ENDS),
    "cancel": (Cancel, _ROOM_ENDS),
    "ping": (Ping, {"life": _id}),
    "drain": (Drain, {"cause": _text}),
}
_OPTIONAL: Mapping[str, Mapping[str, Reader]] = {"window": {"top": _top}}
_NAMES = {kind: name for name, (kind, _) in _KINDS.items()}


def encode_notice(notice: Notice) -> list[bytes]:
    """Return the three frames, texts cut to what a peer accepts.

    Raises LocalProtocolError for what no peer could read.
    """
    name = _NAMES.get(type(notice))
    if name is None:
        raise LocalProtocolError(f"{notice!r} is no notice")
    keys = _keys(notice)
    try:
        for key, read in {**_KINDS[name][1], **_OPTIONAL.get(name, {})}.items():
            if key in keys:
                read(JsonValue(keys[key], f"{name}.{key}"))
    except WireError as wrong:
        raise LocalProtocolError(str(wrong)) from wrong
    body = write_json(keys)
    if len(body) > MAX_BODY:
        raise LocalProtocolError(f"a {name} notice of {len(body)} bytes is longer than {MAX_BODY}")
    return [NOTICE_MARKER, name.encode("ascii"), body]


def _keys(notice: Notice) -> dict[str, Any]:
    match notice:
        case Failed(room, generation, why) | Cancel(room, generation, why):
            return {"room": room, "generation": generation, "cause": _cut(why.text), "what": why.cause.value}
        case Refused(session, field, ours, theirs, cause):
            texts = {"field": _cut(field), "ours": _cut(ours), "theirs": _cut(theirs)}
            return {"session": session, **texts, "what": cause.value}
        case Drain(text):
            return {"cause": _cut(text)}
        case Window(room, generation, prompt_hash, top):
            likeliest = {"top": list(map(list, top))} if top else {}
            return {"room": room, "generation": generation, "prompt_hash": prompt_hash, **likeliest}
        case Hello(version, life, facts):
            lists = {"required": list(map(list, facts.required)), "advisory": list(map(list, facts.advisory))}
            return {"version": version, "life": life, "fingerprint": lists}
        case _:
            return {key: getattr(notice, key) for key in _KINDS[_NAMES[type(notice)]][1]}


def _cut(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")[:MAX_REASON]


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
    found = {key: read(body.member(key)) for key, read in readers.items()}
    for key, read in _OPTIONAL.get(name, {}).items():
        if (value := body.optional(key)) is not None:
            found[key] = read(value)
    return _notice(kind, found, body.optional("what"))


def _notice(kind: type[Notice], found: dict[str, Any], what: JsonValue | None) -> Notice:
    word = what.json if what else None
    if kind is Failed or kind is Cancel:
        return kind(found["room"], found["generation"], Why(Cause.read(word, Cause.PEER_FAILED), found["cause"]))
    if kind is Refused:
        return Refused(**found, cause=Cause.read(word, Cause.REFUSED))
    return Drain(found["cause"]) if kind is Drain else kind(**found)
