"""The prefill rank's decisions: events in, actions out, time as an argument.

    decode's offer + the request -> Windowed -> pushes -> every push acknowledged -> Success -> Release

A room that breaks tells its decode ranks and its caller at once, and releases its source blocks only when
no push reads them any more.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import singledispatchmethod

import attrs

from pdplane.errors import LocalProtocolError, RoomFailed, WireError
from pdplane.ids import Generation, Life, Rank, Room
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, validate_manifest
from pdplane.machine import events
from pdplane.machine.actions import CancelPush, Fail, PrefillAction, Push, Release, Send, Succeed, WakeAt, Windowed
from pdplane.machine.prefill_room import Offered, PrefillRoom
from pdplane.machine.room import Graveyard, PrefillMove, PrefillState
from pdplane.machine.session import PrefillTurn, Session, Sessions
from pdplane.machine.settings import PrefillSettings
from pdplane.machine.timers import Timers
from pdplane.machine.turn import Turn
from pdplane.messages import (
    Cancel,
    Drain,
    Failed,
    Fingerprint,
    Hello,
    Notice,
    Ping,
    Status,
    StatusCode,
    UnknownSession,
    Window,
)


@attrs.frozen
class PrefillCounts:
    """Every count of a prefill rank at one moment; totals only grow."""

    rooms: dict[str, int]
    sessions: dict[str, int]
    pushes: int
    tombstones: int
    rejected: dict[str, int]
    totals: dict[str, int]


class PrefillMachine:
    """Rooms and sessions of one prefill rank. Not thread-safe: one owner."""

    def __init__(self, settings: PrefillSettings, layout: Layout, life: Life, fingerprint: Fingerprint) -> None:
        self._settings = settings
        self._rejected: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._sessions = Sessions(settings, layout, life, fingerprint, self._rejected)
        self._rooms: dict[Room, PrefillRoom] = {}
        self._graveyard = Graveyard(settings.tombstone_s)
        self._timers: Timers[Room] = Timers()
        self._pushes = itertools.count(1)

    def handle(self, event: events.PrefillEvent, now: float) -> list[PrefillAction]:
        """Take one event in and give the actions that it causes, the next wake-up last."""
        turn: PrefillTurn = Turn(now)
        self._on(event, turn)
        self._expire(turn)
        wake = [time for time in (self._timers.earliest(), self._sessions.earliest()) if time is not None]
        if wake:
            turn.add(WakeAt(min(wake)))
        return turn.actions

    def counts(self) -> PrefillCounts:
        rooms = Counter(room.state.value for room in self._rooms.values())
        return PrefillCounts(
            rooms=dict(rooms),
            sessions=self._sessions.counts(),
            pushes=sum(len(room.pushes) for room in self._rooms.values()),
            tombstones=len(self._graveyard),
            rejected=dict(self._rejected),
            totals=dict(self._totals),
        )

    # ---- events

    @singledispatchmethod
    def _on(self, event: events.PrefillEvent, turn: PrefillTurn) -> None:
        raise LocalProtocolError(f"a prefill rank cannot hear {type(event).__name__}")

    @_on.register
    def _(self, event: events.Tick, turn: PrefillTurn) -> None:
        """Everything that time causes happens in `_expire`."""

    @_on.register
    def _(self, event: events.Closing, turn: PrefillTurn) -> None:
        self._sessions.tell_all(turn, Drain(event.cause))
        for room in list(self._rooms.values()):
            self._break(turn, room, event.cause)

    @_on.register
    def _(self, event: events.RoomCancelled, turn: PrefillTurn) -> None:
        if room := self._current(event.room, event.ticket):
            self._break(turn, room, event.cause)

    @_on.register
    def _(self, event: events.NoticeReceived, turn: PrefillTurn) -> None:
        peer = self._sessions.hear(turn, event.identity, native=True)
        if peer is None:
            return
        match event.notice:
            case Hello() as hello:
                self._sessions.hello(peer, hello)
            case Window() as window:
                self._sessions.announce(peer, window)
            case Cancel() as cancel:
                self._cancelled_by_decode(turn, event.identity, cancel)
            case Ping():
                self._sessions.ping(turn, peer)
            case _:
                self._rejected["notice"] += 1

    @_on.register
    def _(self, event: events.RegistrationReceived, turn: PrefillTurn) -> None:
        self._lost(turn, self._sessions.register(turn, event), "the decode rank registered again")

    @_on.register
    def _(self, event: events.RegistrationRejected, turn: PrefillTurn) -> None:
        self._sessions.reject(turn, event)

    @_on.register
    def _(self, event: events.DataConnected, turn: PrefillTurn) -> None:
        self._lost(turn, self._sessions.connected(turn, event), "the decode rank restarted")

    @_on.register
    def _(self, event: events.DataLost, turn: PrefillTurn) -> None:
        self._sessions.data_lost(turn, event)

    @_on.register
    def _(self, event: events.Undeliverable, turn: PrefillTurn) -> None:
        self._rejected["undeliverable"] += 1
        self._lost(turn, self._sessions.lose(turn, event.identity), "the decode rank's connection is gone")

    @_on.register
    def _(self, event: events.PreallocationReceived, turn: PrefillTurn) -> None:
        peer = self._sessions.hear(turn, event.identity)
        window = peer.windows.pop(event.room, None) if peer else None
        session = self._sessions.owner(event.identity, event.session)
        generation = window.generation if window else Generation(0)
        if session is None:
            self._unknown_session(turn, event)
            return
        offer = Offered(session, generation, event.manifest, window.prompt_hash if window else "")
        self._offered(turn, event.room, offer)

    @_on.register
    def _(self, event: events.PreallocationRejected, turn: PrefillTurn) -> None:
        peer = self._sessions.hear(turn, event.identity)
        window = peer.windows.pop(event.room, None) if peer else None
        self._rejected["preallocation"] += 1
        generation = window.generation if window else Generation(0)
        self._tell_failed(turn, event.identity, event.room, generation, event.reason)

    @_on.register
    def _(self, event: events.PrefillRequested, turn: PrefillTurn) -> None:
        room = self._rooms.get(event.room)
        if room is not None and room.request is not None:
            turn.add(Fail(event.room, event.ticket, LocalProtocolError(f"room {event.room} is live")))
            return
        if room is None and len(self._rooms) >= self._settings.max_rooms:
            turn.add(Fail(event.room, event.ticket, RoomFailed(event.room, "too many live rooms")))
            return
        self._graveyard.clear(event.room)
        room = room or self._new_room(turn, event.room)
        room.request = event
        self._move(turn, room, PrefillMove.REQUESTED)
        if conflict := room.prompt_conflict():
            self._break(turn, room, conflict)
        elif room.is_complete:
            self._move(turn, room, PrefillMove.COMPLETED)

    @_on.register
    def _(self, event: events.PushRequested, turn: PrefillTurn) -> None:
        room = self._current(event.room, event.ticket)
        if room is None or room.state is not PrefillState.WINDOWED:
            return  # it failed meanwhile; its caller has been told
        for session_id, copies in event.copies.items():
            offer, number = room.offers[session_id], next(self._pushes)
            room.pushes.add(number)
            turn.add(Push(session_id, offer.session.life, room.room, offer.generation, number, copies))

    @_on.register
    def _(self, event: events.PushEnded, turn: PrefillTurn) -> None:
        room = self._rooms.get(event.room)
        if room is None or event.push not in room.pushes:
            return
        room.pushes.discard(event.push)
        if event.cause is None:
            self._move(turn, room, PrefillMove.PUSHED)
        else:
            self._break(turn, room, f"push to {event.session} failed: {event.cause}")
        self._drain(turn, room)

    @_on.register
    def _(self, event: events.RoomFinished, turn: PrefillTurn) -> None:
        room = self._current(event.room, event.ticket)
        if room is None or room.state is not PrefillState.WINDOWED:
            return
        room.finish = event
        self._move(turn, room, PrefillMove.FINISHED)
        self._drain(turn, room)

    # ---- offers

    def _offered(self, turn: PrefillTurn, number: Room, offer: Offered) -> None:
        if refusal := self._refusal(turn, number, offer):
            self._rejected["preallocation"] += 1
            self._tell_failed(turn, offer.session.identity, number, offer.generation, refusal)
            return
        room = self._rooms.get(number)
        known = room.offers.get(offer.session.id) if room else None
        if known is not None or self._is_late(turn, number, offer):
            self._rejected["late"] += 1
            return
        room = room or self._new_room(turn, number)
        room.offers[offer.session.id] = offer
        self._move(turn, room, PrefillMove.OFFERED)
        if conflict := room.offers_conflict() or room.prompt_conflict():
            self._break(turn, room, conflict)
        elif room.state is PrefillState.OPENED and room.is_complete:
            self._move(turn, room, PrefillMove.COMPLETED)

    def _is_late(self, turn: PrefillTurn, number: Room, offer: Offered) -> bool:
        stone = None if number in self._rooms else self._graveyard.find(number, turn.now)
        return stone is not None and offer.use in stone.told

    def _refusal(self, turn: PrefillTurn, number: Room, offer: Offered) -> str | None:
        """Why this offer cannot be taken, without a word to the room that it names."""
        try:
            _validate(offer.manifest, offer.session)
        except WireError as wrong:
            return str(wrong)
        room = self._rooms.get(number)
        if room is None:
            stone = self._graveyard.find(number, turn.now)
            if stone is not None and (offer.generation == 0 or stone.cause) and offer.use not in stone.told:
                self._graveyard.bury(number, stone.cause, stone.told | {offer.use}, turn.now)
                return stone.cause or "the room has ended"
            return "too many live rooms" if len(self._rooms) >= self._settings.max_rooms else None
        known = room.offers.get(offer.session.id)
        if known is not None:
            return None if known == offer else "the room is live with another offer"
        return None if room.state in (PrefillState.EARLY, PrefillState.OPENED) else "the room is live"

    def _unknown_session(self, turn: PrefillTurn, event: events.PreallocationReceived) -> None:
        self._rejected["unknown_session"] += 1
        if self._sessions.is_native(event.identity):
            turn.add(Send(event.identity, UnknownSession(event.room, event.session)))
        else:
            self._tell_failed(turn, event.identity, event.room, Generation(0), "unknown session")

    def _cancelled_by_decode(self, turn: PrefillTurn, identity: bytes, cancel: Cancel) -> None:
        room = self._rooms.get(cancel.room)
        offers = room.offers.values() if room else ()
        if room and any(o.session.identity == identity and o.generation == cancel.generation for o in offers):
            self._break(turn, room, f"cancelled by decode: {cancel.cause}")

    # ---- moves

    def _new_room(self, turn: PrefillTurn, number: Room) -> PrefillRoom:
        room = self._rooms[number] = PrefillRoom(number, turn.now)
        self._timers.set(number, turn.now + self._settings.bootstrap_timeout_s)
        return room

    def _current(self, number: Room, ticket: int) -> PrefillRoom | None:
        room = self._rooms.get(number)
        return room if room and room.request and room.request.ticket == ticket else None

    def _break(self, turn: PrefillTurn, room: PrefillRoom, cause: str) -> None:
        room.cause = room.cause or cause
        self._move(turn, room, PrefillMove.BROKEN)

    def _drain(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        if not room.pushes and room.state in (PrefillState.FINISHING, PrefillState.FAILING):
            self._move(turn, room, PrefillMove.DRAINED)

    def _move(self, turn: PrefillTurn, room: PrefillRoom, move: PrefillMove) -> None:
        if room.move(move, turn.now):
            self._entered(turn, room)

    def _entered(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        match room.state:
            case PrefillState.WINDOWED:
                self._timers.set(room.room, turn.now + self._settings.waiting_timeout_s)
                self._enter_windowed(turn, room)
            case PrefillState.FAILING:
                self._timers.drop(room.room)
                self._enter_failing(turn, room)
                self._drain(turn, room)
            case PrefillState.SUCCEEDED | PrefillState.FAILED:
                self._enter_ended(turn, room)
            case _:
                return

    def _enter_windowed(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        assert room.request is not None
        manifest = next((o.manifest for o in room.offers.values() if o.manifest is not None), None)
        prefix_len, prompt_len = (manifest.prefix_len, manifest.prompt_len) if manifest else (0, 0)
        turn.add(Windowed(room.room, room.request.ticket, prefix_len, prompt_len, room.destinations))

    def _enter_failing(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        cause = room.cause or "unknown"
        for offer in room.offers.values():
            self._tell_failed(turn, offer.session.identity, room.room, offer.generation, cause)
            if room.pushes:
                turn.add(CancelPush(offer.session.id, offer.session.life, room.room, offer.generation))
        if room.request:
            turn.add(Fail(room.room, room.request.ticket, RoomFailed(room.room, cause, tuple(room.story))))

    def _enter_ended(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        self._timers.drop(room.room)
        if room.state is PrefillState.SUCCEEDED:
            self._send_success(turn, room)
        del self._rooms[room.room]
        self._totals[room.state.value] += 1
        self._graveyard.bury(room.room, room.cause, room.uses, turn.now)
        if room.request:
            turn.add(Release(room.room, room.request.ticket))

    def _send_success(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        finish = room.finish
        assert finish is not None
        for offer in sorted(room.offers.values(), key=lambda offer: offer.session.registration.tp_rank):
            if offer.manifest is None:
                continue  # a rank that only joins the vote expects no word
            status = Status(
                room.room,
                StatusCode.SUCCESS,
                Rank(self._settings.prefill_rank),
                finish.first_token,
                finish.candidates,
                finish.cached_tokens,
                finish.logprob,
            )
            if offer.session.native:  # a status carries no generation: this names the one that it is for
                turn.add(Send(offer.session.identity, Window(room.room, offer.generation, "")))
            turn.add(Send(offer.session.identity, status))
        turn.add(Succeed(room.room, finish.ticket))

    def _tell_failed(self, turn: PrefillTurn, identity: bytes, room: Room, generation: Generation, cause: str) -> None:
        message: Status | Notice = Failed(room, generation, cause)
        if not self._sessions.is_native(identity):
            message = Status(room, StatusCode.FAILED, Rank(self._settings.prefill_rank))
        turn.add(Send(identity, message))

    # ---- losses and time

    def _lost(self, turn: PrefillTurn, gone: list[Session], why: str) -> None:
        for session in gone:
            for room in list(self._rooms.values()):
                offer = room.offers.get(session.id)
                if offer is not None and offer.session is session:
                    self._break(turn, room, f"session {session.id} lost: {why}")

    def _expire(self, turn: PrefillTurn) -> None:
        self._graveyard.expire(turn.now)
        for number in list(self._timers.due(turn.now)):
            room = self._rooms[number]
            self._break(turn, room, _timeout_cause(room, self._settings))
        self._lost(turn, self._sessions.silent(turn), "the decode rank fell silent")


def _timeout_cause(room: PrefillRoom, settings: PrefillSettings) -> str:
    if room.state is PrefillState.EARLY:
        return f"no request came for this room in {settings.bootstrap_timeout_s:g} s"
    if room.state is PrefillState.OPENED:
        return f"no decode rank offered blocks in {settings.bootstrap_timeout_s:g} s"
    return f"not finished in {settings.waiting_timeout_s:g} s"


def _validate(manifest: Manifest | None, session: Session) -> None:
    if (manifest is None) != session.route.dummy:
        raise WireError("manifest", "CachePD manifest presence does not match the registration")
    if manifest is not None:
        validate_manifest(manifest, session.layout)
