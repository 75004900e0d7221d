"""Named things that can happen to a machine, for the tests that throw all of them in every order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from pdplane.errors import Cause, Why
from pdplane.ids import Generation, Life, Rank, Room, SessionId
from pdplane.machine import events
from pdplane.messages import (
    Cancel,
    Drain,
    Failed,
    Hello,
    Ping,
    Queued,
    Refused,
    Registered,
    Status,
    StatusCode,
    UnknownSession,
    Window,
)
from tests.machine.witness import (
    BOOTSTRAP,
    CHANNEL,
    DECODE_LIFE,
    FOUND,
    GONE,
    HELLO,
    LAYOUT,
    LEGACY,
    ME,
    OTHER,
    PREFILL_LIFE,
    RAW,
    REGISTRATION,
    SESSION,
    DecodeWitness,
    PrefillWitness,
    manifest,
    some_copies,
    whole,
)

ROOM = Room(7)
NEW_LIFE = Life("e" * 32)


# ---- prefill


def hello(identity: bytes = ME, life: Life = DECODE_LIFE) -> events.NoticeReceived:
    return events.NoticeReceived(identity, HELLO if life == DECODE_LIFE else Hello("0", life))


def registration(identity: bytes = ME) -> events.RegistrationReceived:
    return events.RegistrationReceived(identity, REGISTRATION, LAYOUT)


def connected(life: Life = DECODE_LIFE) -> events.DataConnected:
    return events.DataConnected(SESSION, life, life)


def offer(
    generation: int = 1, *, identity: bytes = ME, prompt_len: int = 6, room: Room = ROOM
) -> list[events.PrefillEvent]:
    """A pre-allocation; with a generation, the window notice before it."""
    sent = events.PreallocationReceived(identity, room, SESSION, manifest(prompt_len))
    if not generation:
        return [sent]
    return [events.NoticeReceived(identity, Window(room, Generation(generation), "hash")), sent]


def queued(generation: int = 1, *, identity: bytes = ME, prompt_hash: str = "hash") -> events.NoticeReceived:
    """A decode rank's word that it stands in line for the room's blocks."""
    return events.NoticeReceived(identity, Queued(ROOM, SESSION, Generation(generation), prompt_hash))


def request(ticket: int = 1, room: Room = ROOM) -> events.PrefillRequested:
    return events.PrefillRequested(room, ticket, 6, "hash")


def push(ticket: int = 1) -> events.PushRequested:
    return events.PushRequested(ROOM, ticket, {SESSION: some_copies()})


def finish(ticket: int = 1) -> events.RoomFinished:
    return events.RoomFinished(ROOM, ticket, 42, None, None, 0)


def _next_request(witness: PrefillWitness) -> None:
    witness.handle(request(max(witness.asked, default=0) + 1))


def _newest(witness: PrefillWitness | DecodeWitness) -> int:
    return max(witness.asked, default=1)


def _deadline(witness: PrefillWitness | DecodeWitness) -> None:
    """Let the next deadline pass."""
    if witness.wake is not None:
        witness.now = witness.wake
    witness.handle(events.Tick())


def _much_later(witness: PrefillWitness | DecodeWitness) -> None:
    witness.now += 400.0
    witness.handle(events.Tick())


PREFILL: Mapping[str, Callable[[PrefillWitness], object]] = {
    "hello": lambda w: w.handle(hello()),
    "registration": lambda w: w.handle(registration()),
    "data connected": lambda w: w.handle(connected()),
    "offer": lambda w: w.handle(*offer(1)),
    "next offer": lambda w: w.handle(*offer(2)),
    "request": _next_request,
    "push": lambda w: w.handle(push(_newest(w))),
    "push ended": lambda w: w.end_push(None),
    "push failed": lambda w: w.end_push("reset"),
    "finish": lambda w: w.handle(finish(_newest(w))),
    "cancel": lambda w: w.handle(events.RoomCancelled(ROOM, _newest(w), GONE)),
    "decode cancels": lambda w: w.handle(events.NoticeReceived(ME, Cancel(ROOM, Generation(1), GONE))),
    "deadline": _deadline,
}
PREFILL_RARE: Mapping[str, Callable[[PrefillWitness], object]] = {
    "much later": _much_later,
    "bad offer": lambda w: w.handle(events.PreallocationRejected(ME, ROOM, SESSION, "no JSON")),
    "bad offer of a stranger": lambda w: w.handle(events.PreallocationRejected(OTHER, ROOM, SESSION, "no JSON")),
    "bad manifest": lambda w: w.handle(*offer(1, prompt_len=60)),
    "other prompt": lambda w: w.handle(*offer(2, prompt_len=7)),
    "offer without manifest": lambda w: w.handle(events.PreallocationReceived(ME, ROOM, SESSION, None)),
    "unannounced offer": lambda w: w.handle(*offer(0)),
    "queued": lambda w: w.handle(queued()),
    "next queued": lambda w: w.handle(queued(2)),
    "queued for another prompt": lambda w: w.handle(queued(prompt_hash="another")),
    "queued by a stranger": lambda w: w.handle(queued(identity=OTHER)),
    "draining": lambda w: w.handle(events.Draining("bye")),
    "offer of a stranger": lambda w: w.handle(*offer(1, identity=OTHER)),
    "offer of a raw peer": lambda w: w.handle(*offer(0, identity=RAW)),
    "raw registration": lambda w: w.handle(registration(RAW)),
    "legacy registration": lambda w: w.handle(registration(LEGACY)),
    "legacy contradiction": lambda w: w.handle(
        events.RegistrationReceived(LEGACY, attrs.evolve(REGISTRATION, arena_base=8192), LAYOUT)
    ),
    "legacy bad registration": lambda w: w.handle(
        events.RegistrationRejected(LEGACY, REGISTRATION.route, "layout", "no JSON")
    ),
    "offer of a legacy peer": lambda w: w.handle(*offer(0, identity=LEGACY)),
    "bad registration": lambda w: w.handle(events.RegistrationRejected(ME, REGISTRATION.route, "layout", "no JSON")),
    "hopeless registration": lambda w: w.handle(events.RegistrationRejected(ME, None, "frames", "too few")),
    "other hello": lambda w: w.handle(hello(life=NEW_LIFE)),
    "restart": lambda w: w.handle(hello(OTHER, NEW_LIFE), registration(OTHER), connected(NEW_LIFE)),
    "impostor": lambda w: w.handle(hello(OTHER), registration(OTHER)),
    "reconnected elsewhere": lambda w: w.handle(events.DataConnected(SESSION, DECODE_LIFE, NEW_LIFE)),
    "data lost": lambda w: w.handle(events.DataLost(SESSION, DECODE_LIFE, "reset")),
    "undeliverable": lambda w: w.handle(events.Undeliverable(ME)),
    "undeliverable stranger": lambda w: w.handle(events.Undeliverable(b"nobody")),
    "ping": lambda w: w.handle(events.NoticeReceived(ME, Ping(DECODE_LIFE))),
    "senseless notice": lambda w: w.handle(events.NoticeReceived(ME, Registered(SESSION, DECODE_LIFE))),
    "window alone": lambda w: w.handle(events.NoticeReceived(ME, Window(ROOM, Generation(3), ""))),
    "stale cancel": lambda w: w.handle(events.NoticeReceived(ME, Cancel(ROOM, Generation(0), GONE))),
    "taken back": lambda w: w.handle(
        events.NoticeReceived(ME, Window(ROOM, Generation(1), "hash")),
        events.NoticeReceived(ME, Cancel(ROOM, Generation(1), GONE)),
    ),
    "foreign cancel": lambda w: w.handle(events.NoticeReceived(OTHER, Cancel(ROOM, Generation(1), GONE))),
    "stale ticket": lambda w: w.handle(events.RoomCancelled(ROOM, 99, GONE), push(99), finish(99)),
    "push to nobody": lambda w: w.handle(events.PushRequested(ROOM, _newest(w), {SessionId("x:1"): some_copies()})),
    "closing": lambda w: w.handle(events.Closing("bye")),
}

# ---- decode


def success(generation: int = 1, token: int = 42, rank: int = 0) -> list[events.DecodeEvent]:
    """A status; with a generation, the window notice before it."""
    status = events.StatusFromPrefill(CHANNEL, Status(ROOM, StatusCode.SUCCESS, Rank(rank), token))
    if not generation:
        return [status]
    return [events.NoticeFromPrefill(CHANNEL, Window(ROOM, Generation(generation), "")), status]


def status(code: StatusCode) -> events.StatusFromPrefill:
    return events.StatusFromPrefill(CHANNEL, Status(ROOM, code, Rank(0)))


def registered(life: Life = PREFILL_LIFE) -> events.NoticeFromPrefill:
    return events.NoticeFromPrefill(CHANNEL, Registered(SESSION, life))


def failed(generation: int = 1) -> events.NoticeFromPrefill:
    return events.NoticeFromPrefill(CHANNEL, Failed(ROOM, Generation(generation), Why(Cause.PEER_FAILED, "engine")))


def landed(nbytes: int | None = None, generation: int = 1, rank: int = 0) -> events.Landed:
    found = whole(manifest()) if nbytes is None else nbytes
    return events.Landed(ROOM, Generation(generation), Rank(rank), found)


def want(ticket: int = 1, room: Room = ROOM) -> events.DecodeRequested:
    return events.DecodeRequested(room, ticket, BOOTSTRAP, manifest(), "hash")


def stand(ticket: int = 1, room: Room = ROOM) -> events.DecodeRequested:
    """A request that stands in line for blocks."""
    return attrs.evolve(want(ticket, room), manifest=None)


def given(ticket: int = 1) -> events.BlocksGiven:
    return events.BlocksGiven(ROOM, ticket, manifest())


def found_life(life: Life) -> events.PeerFound:
    rank = FOUND.ranks[0]
    return events.PeerFound(ROOM, BOOTSTRAP, 0, 1, LAYOUT, (events.PeerRank(rank.prefill_rank, rank.endpoint, life),))


def _next_want(witness: DecodeWitness) -> None:
    witness.handle(want(max(witness.asked, default=0) + 1))


def _next_stand(witness: DecodeWitness) -> None:
    witness.handle(stand(max(witness.asked, default=0) + 1))


DECODE: Mapping[str, Callable[[DecodeWitness], object]] = {
    "request": _next_want,
    "found": lambda w: w.handle(FOUND),
    "missing": lambda w: w.handle(events.PeerMissing(ROOM, BOOTSTRAP, Why(Cause.UNREACHABLE, "nobody"))),
    "registered": lambda w: w.handle(registered()),
    "success": lambda w: w.handle(*success()),
    "stale success": lambda w: w.handle(*success(0)),
    "next success": lambda w: w.handle(*success(2, 43)),
    "failed": lambda w: w.handle(failed()),
    "failed status": lambda w: w.handle(status(StatusCode.FAILED)),
    "landed": lambda w: w.handle(landed()),
    "landed in part": lambda w: w.handle(landed(4)),
    "cancel": lambda w: w.handle(events.RoomCancelled(ROOM, _newest(w), GONE)),
    "deadline": _deadline,
}
DECODE_RARE: Mapping[str, Callable[[DecodeWitness], object]] = {
    "much later": _much_later,
    "landed for the next": lambda w: w.handle(landed(generation=2)),
    "landed too much": lambda w: w.handle(landed(10**6)),
    "landed by a stranger": lambda w: w.handle(landed(rank=3)),
    "success of a stranger": lambda w: w.handle(*success(rank=3)),
    "success without token": lambda w: w.handle(*success(token=-1)),
    "strange status": lambda w: w.handle(status(StatusCode.TRANSFERRING)),
    "stale failed": lambda w: w.handle(failed(0)),
    "other life registered": lambda w: w.handle(registered(NEW_LIFE)),
    "other session registered": lambda w: w.handle(
        events.NoticeFromPrefill(CHANNEL, Registered(SessionId("x:1"), PREFILL_LIFE))
    ),
    "refused": lambda w: w.handle(events.NoticeFromPrefill(CHANNEL, Refused(SESSION, "layout", "a", "b"))),
    "unknown session": lambda w: w.handle(events.NoticeFromPrefill(CHANNEL, UnknownSession(ROOM, SESSION))),
    "ping": lambda w: w.handle(events.NoticeFromPrefill(CHANNEL, Ping(PREFILL_LIFE))),
    "drain": lambda w: w.handle(events.NoticeFromPrefill(CHANNEL, Drain("bye"))),
    "senseless notice": lambda w: w.handle(events.NoticeFromPrefill(CHANNEL, HELLO)),
    "channel broken": lambda w: w.handle(events.ChannelBroken(CHANNEL, Why(Cause.UNREACHABLE, "no such host"))),
    "writer cut": lambda w: w.handle(events.WriterCut(Rank(0), PREFILL_LIFE, "reset")),
    "stranger cut": lambda w: w.handle(events.WriterCut(Rank(0), NEW_LIFE, "reset")),
    "restarted": lambda w: w.handle(found_life(NEW_LIFE)),
    "incomplete instance": lambda w: w.handle(events.PeerFound(ROOM, BOOTSTRAP, 0, 1, LAYOUT, ())),
    "line": _next_stand,
    "blocks": lambda w: w.handle(given(_newest(w))),
    "declined": lambda w: w.handle(events.DecodeDeclined(ROOM, 99, BOOTSTRAP, "hash", Why(Cause.FULL, "busy"))),
    "other room found": lambda w: w.handle(events.PeerFound(Room(8), BOOTSTRAP, 0, 1, LAYOUT, FOUND.ranks)),
    "stale ticket": lambda w: w.handle(events.RoomCancelled(ROOM, 99, GONE)),
    "closing": lambda w: w.handle(events.Closing("bye")),
}
