"""The prefill rank's decisions: events in, actions out, time as an argument.

    decode's offer + the request -> Offered -> pushes -> every push acknowledged -> Success -> Release

A room that breaks tells its decode ranks and its caller at once, and releases its source blocks only when
no push reads them any more. Each ticket gets one Succeed or Fail, and one Release.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import singledispatchmethod

import attrs

from pdplane.errors import Cause, LocalProtocolError, PdplaneError, RoomFailed, Why, WireError
from pdplane.ids import Generation, Life, Room, SessionId
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import validate_manifest
from pdplane.machine import events
from pdplane.machine.actions import (
    Fail,
    PrefillAction,
    PrefillSettings,
    PrefillTimers,
    PrefillTurn,
    Release,
    Send,
    Timers,
    Turn,
    WakeAt,
)
from pdplane.machine.prefill_rooms import TOO_MANY, PrefillRooms, PrefillUse, RankOffer
from pdplane.machine.sessions import DecodePeer, Sessions
from pdplane.machine.uses import Known, PrefillMove, PrefillState, RankUse, Standing, standing
from pdplane.messages import Cancel, Drain, Fingerprint, Hello, Ping, Queued, UnknownSession, Window


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
        self._rejected: Counter[str] = Counter()
        self._timers: PrefillTimers = Timers()
        self._sessions = Sessions(settings, layout, life, fingerprint, self._rejected, self._timers)
        self._rooms = PrefillRooms(settings, self._sessions, self._timers)
        self._closing: Why | None = None
        self._draining: Why | None = None

    def handle(self, event: events.PrefillEvent, now: float) -> list[PrefillAction]:
        """Return the actions that one event causes, the next wake-up last."""
        turn: PrefillTurn = Turn(now)
        _HANDLERS.get(type(event), _UNHEARD)(self, event, turn)
        for key in self._timers.due(now):
            if isinstance(key, bytes):
                self._rooms.lost(turn, self._sessions.silent(turn, key), "the decode rank fell silent")
            else:
                self._rooms.time_over(turn, key)
        if self._sessions.evicted:
            self._rooms.lost(turn, self._sessions.take_evicted(), "the decode rank fell silent")
        if (wake := self._timers.earliest()) is not None:
            turn.add(WakeAt(wake))
        return turn.actions

    def counts(self) -> PrefillCounts:
        return PrefillCounts(
            rooms=dict(self._rooms.states()),
            sessions=self._sessions.counts(),
            pushes=self._rooms.pushes,
            tombstones=self._rooms.tombstones,
            rejected=dict(self._rejected),
            totals=dict(self._rooms.totals),
        )

    def may_offer(self, identity: bytes, session: SessionId) -> bool:
        """Return whether the connection owns the session: only then its manifest is worth reading."""
        return self._sessions.owner(identity, session) is not None

    # ---- what peers say

    @singledispatchmethod
    def _on(self, event: events.PrefillEvent, turn: PrefillTurn) -> None:
        raise LocalProtocolError(f"a prefill rank cannot hear {type(event).__name__}")

    @_on.register
    def _(self, event: events.Tick, turn: PrefillTurn) -> None:
        """Do nothing: what time causes happens after every event."""

    @_on.register
    def _(self, event: events.NoticeReceived, turn: PrefillTurn) -> None:
        peer = self._sessions.hear(turn, event.identity, native=True, address=event.address)
        if peer is None:
            return
        match event.notice:
            case Hello() as hello:
                self._sessions.hello(turn, peer, hello)
            case Window() as window:
                peer.window = window
            case Queued() as queued:
                self._queued(turn, peer, queued)
            case Cancel() as cancel:
                self._cancelled_by_decode(turn, peer, cancel)
            case Ping():
                self._sessions.ping(turn, peer)
            case _:
                self._rejected["notice"] += 1

    @_on.register
    def _(self, event: events.RegistrationReceived, turn: PrefillTurn) -> None:
        self._rooms.lost(turn, self._sessions.register(turn, event), "the decode rank registered again")

    @_on.register
    def _(self, event: events.RegistrationRejected, turn: PrefillTurn) -> None:
        self._rooms.lost(turn, self._sessions.reject(turn, event), "the decode rank registered again, and wrongly")

    @_on.register
    def _(self, event: events.DataConnected, turn: PrefillTurn) -> None:
        self._rooms.lost(turn, self._sessions.connected(turn, event), "the decode rank restarted")

    @_on.register
    def _(self, event: events.DataLost, turn: PrefillTurn) -> None:
        self._sessions.data_lost(turn, event)

    @_on.register
    def _(self, event: events.Undeliverable, turn: PrefillTurn) -> None:
        self._rejected["undeliverable"] += 1
        self._rooms.lost(turn, self._sessions.lose(turn, event.identity), "the decode rank's connection is gone")

    @_on.register
    def _(self, event: events.PreallocationReceived, turn: PrefillTurn) -> None:
        self._sessions.hear(turn, event.identity)
        window = self._sessions.announced(event.identity, event.room)
        session = self._sessions.owner(event.identity, event.session)
        if session is None:
            self._unknown_session(turn, event.identity, event.room, event.session)
            return
        generation, prompt_hash = (window.generation, window.prompt_hash) if window else (Generation(0), "")
        self._offered(turn, event.room, RankOffer(session, generation, event.manifest, prompt_hash))

    @_on.register
    def _(self, event: events.PreallocationRejected, turn: PrefillTurn) -> None:
        self._sessions.hear(turn, event.identity)
        window = self._sessions.announced(event.identity, event.room)
        generation, prompt_hash = (window.generation, window.prompt_hash) if window else (Generation(0), "")
        session = self._sessions.owner(event.identity, event.session)
        if session is None:
            self._rejected["preallocation"] += 1
            self._rooms.tell_failed(turn, event.identity, event.room, generation, Why(Cause.REFUSED, event.reason))
            return
        self._unusable(turn, event.room, RankOffer(session, generation, None, prompt_hash), event.reason)

    # ---- what callers and transports say

    @_on.register
    def _(self, event: events.Draining, turn: PrefillTurn) -> None:
        self._draining = Why(Cause.CLOSING, event.text)
        self._sessions.tell_all(turn, Drain(event.text))
        for room in self._rooms:
            if room.state is PrefillState.EARLY:  # its request will be refused
                self._rooms.break_(turn, room, self._draining)

    @_on.register
    def _(self, event: events.Closing, turn: PrefillTurn) -> None:
        self._closing = Why(Cause.CLOSING, event.text)
        self._sessions.tell_all(turn, Drain(event.text))
        for room in self._rooms:
            self._rooms.break_(turn, room, self._closing)

    @_on.register
    def _(self, event: events.RoomCancelled, turn: PrefillTurn) -> None:
        if room := self._rooms.current(event.room, event.ticket):
            self._rooms.break_(turn, room, event.why)

    @_on.register
    def _(self, event: events.PrefillRequested, turn: PrefillTurn) -> None:
        if refusal := self._request_refusal(turn, event):
            turn.add(Fail(event.room, event.ticket, refusal), Release(event.room, event.ticket))
            return
        room = self._rooms.get(event.room) or self._rooms.open(turn, event.room)
        room.request = event
        self._rooms.move(turn, room, PrefillMove.REQUESTED)
        self._settle(turn, room)

    @_on.register
    def _(self, event: events.PushRequested, turn: PrefillTurn) -> None:
        room = self._rooms.current(event.room, event.ticket)
        if room is None:
            return  # it ended meanwhile, and its caller has the error
        if room.state is not PrefillState.OFFERED:
            self._rooms.break_(turn, room, Why(Cause.INTERNAL, f"pushed while the room is {room.state.value}"))
            return
        wanted = {destination.session for destination in room.destinations}
        if not event.copies.keys() <= wanted:
            self._rooms.break_(turn, room, Why(Cause.INTERNAL, "pushed to a session that the room does not have"))
            return
        for session_id, copies in event.copies.items():
            self._rooms.push(turn, room, session_id, copies)

    @_on.register
    def _(self, event: events.PushEnded, turn: PrefillTurn) -> None:
        failure = None
        if event.text is None:
            self._sessions.proved(event.session)
        else:
            failure = Why(Cause.TRANSFER, f"push to {event.session} failed: {event.text}")
        self._rooms.push_ended(turn, event.push, failure)

    @_on.register
    def _(self, event: events.RoomFinished, turn: PrefillTurn) -> None:
        room = self._rooms.current(event.room, event.ticket)
        if room is None or room.state is PrefillState.FINISHING:
            return  # it ended meanwhile, or this was said before
        if room.state is not PrefillState.OFFERED:
            self._rooms.break_(turn, room, Why(Cause.INTERNAL, f"finished while the room is {room.state.value}"))
            return
        room.finish = event
        self._rooms.move(turn, room, PrefillMove.FINISHED)
        self._rooms.drain(turn, room)

    def _request_refusal(self, turn: PrefillTurn, event: events.PrefillRequested) -> PdplaneError | None:
        room, found = self._rooms.get(event.room), standing(self._rooms.known(event.room, turn.now), None)
        if found is Standing.LIVE:
            return LocalProtocolError(f"room {event.room} is live", Cause.LIVE)
        if self._closing is not None:
            return RoomFailed(event.room, self._closing.cause, self._closing.text)
        if found is Standing.UNCLEAR:
            text = f"room {event.room} has just ended and its peer cannot tell uses apart"
            return LocalProtocolError(text, Cause.LIVE)
        if room is None and self._rooms.is_full:
            self._rooms.evict(turn)
            return RoomFailed(event.room, TOO_MANY.cause, TOO_MANY.text) if self._rooms.is_full else None
        return None

    # ---- offers

    def _offered(self, turn: PrefillTurn, number: Room, offer: RankOffer) -> None:
        room, known = self._rooms.get(number), self._rooms.known(number, turn.now)
        fits = room is None or room.prompt_conflict(offer) is None
        found = standing(known, offer.part, fits=fits)
        if found is Standing.OVER or (room is not None and room.has(offer)):
            self._rejected["late"] += 1
            if room is None and known.stone is not None and known.stone.why:  # it may have missed the end
                self._tell(turn, number, offer, known.stone.why)
            return
        try:
            _validate(offer)
        except WireError as wrong:
            self._unusable(turn, number, offer, str(wrong))
            return
        self._judged(turn, number, offer, known, found)

    def _queued(self, turn: PrefillTurn, peer: DecodePeer, queued: Queued) -> None:
        """Take a decode rank's word that it stands in line for a room's blocks: an offer without them."""
        session = self._sessions.owner(peer.identity, queued.session)
        if session is None:
            self._unknown_session(turn, peer.identity, queued.room, queued.session)
            return
        self._offered(turn, queued.room, RankOffer(session, queued.generation, None, queued.prompt_hash, queued=True))

    def _judged(self, turn: PrefillTurn, number: Room, offer: RankOffer, known: Known, found: Standing) -> None:
        """Take a sound offer, or tell why not."""
        room = self._rooms.get(number)
        held = room.offers.get(offer.session.id) if room else None
        if room is not None and held is not None:
            # A decode rank has one use of a number at a time, so a second offer means that the first is over.
            self._rooms.break_(turn, room, Why(Cause.CANCELLED, "decode offered the room again"))
            if found is Standing.LIVE:
                return
            room = None
        if refusal := self._offer_refusal(room, known, offer, found):
            self._rejected["preallocation"] += 1
            self._tell(turn, number, offer, refusal)
            if room is None and found is Standing.LATE:
                self._rooms.remember(turn, number, offer.part)
        elif room is not None and found is Standing.LATE:
            self._rejected["late"] += 1
            self._tell(turn, number, offer, room.remember_missed(offer.part))
        else:
            self._take(turn, room or self._rooms.open(turn, number), offer)

    def _take(self, turn: PrefillTurn, room: PrefillUse, offer: RankOffer) -> None:
        self._rooms.offered(turn, room, offer)
        self._settle(turn, room)

    def _tell(self, turn: PrefillTurn, number: Room, offer: RankOffer, why: Why) -> None:
        self._rooms.tell_failed(turn, offer.session.identity, number, offer.generation, why)

    def _offer_refusal(self, room: PrefillUse | None, known: Known, offer: RankOffer, found: Standing) -> Why | None:
        """Return why this offer cannot be taken, or None; a refusal leaves the room that it names alone."""
        if offer.session.life and not offer.generation:
            return Why(Cause.REFUSED, "no window notice came before the offer")
        if room is not None:
            return room.place_conflict(offer) if room.takes_offers else Why(Cause.LIVE, "the room is live")
        if found in (Standing.UNCLEAR, Standing.LATE):
            return (known.stone and known.stone.why) or Why(Cause.LIVE, "the room has just ended")
        return self._closing or self._draining or (TOO_MANY if self._rooms.is_full else None)

    def _unusable(self, turn: PrefillTurn, number: Room, offer: RankOffer, reason: str) -> None:
        """End a registered decode rank's part in a room, since its offer can never be written to."""
        self._rejected["preallocation"] += 1
        why = Why(Cause.REFUSED, f"decode's offer is unusable: {reason}")
        self._tell(turn, number, offer, Why(Cause.REFUSED, reason))
        room = self._rooms.get(number)
        if room is None:
            if offer.generation:
                self._rooms.withdraw(turn, number, offer.part, offer.prompt_hash, why)
        elif room.takes_offers or room.takes_part(offer.session.identity, offer.generation):
            self._rooms.decline(turn, room, offer.part, why)

    def _settle(self, turn: PrefillTurn, room: PrefillUse) -> None:
        if conflict := room.prompt_conflict():
            self._rooms.break_(turn, room, conflict)
        elif room.state is PrefillState.OPENED and room.is_complete:
            for offer in room.offers.values():
                self._sessions.use(turn, offer.session)
            self._rooms.move(turn, room, PrefillMove.COMPLETED)

    def _unknown_session(self, turn: PrefillTurn, identity: bytes, room: Room, session: SessionId) -> None:
        self._rejected["unknown_session"] += 1
        if self._sessions.is_native(identity):
            turn.add(Send(identity, UnknownSession(room, session)))
        else:
            self._rooms.tell_failed(turn, identity, room, Generation(0), Why(Cause.PEER_LOST, "unknown session"))

    def _cancelled_by_decode(self, turn: PrefillTurn, peer: DecodePeer, cancel: Cancel) -> None:
        """End the use that the decode rank offered or only announced.

        In that case the notice before names its prompt.
        """
        number, why = cancel.room, Why(cancel.why.cause.of_peer, f"cancelled by decode: {cancel.why.text}")
        room = self._rooms.get(number)
        if room is not None and room.takes_part(peer.identity, cancel.generation):
            self._rooms.break_(turn, room, why)
            return
        part = self._sessions.part_of(peer)
        prompt_hash = peer.window.prompt_hash if peer.window and peer.window.names(number, cancel.generation) else ""
        if part is not None and prompt_hash and (room is None or room.asks_for(prompt_hash)):
            use = RankUse(part, cancel.generation)
            if room is None:
                self._rooms.withdraw(turn, number, use, prompt_hash, why)
            else:
                self._rooms.decline(turn, room, use, why)
        else:
            self._rejected["late"] += 1


def _validate(offer: RankOffer) -> None:
    if offer.queued:
        return  # its blocks come later
    if (offer.manifest is None) != offer.session.route.dummy:
        raise WireError("manifest", "CachePD manifest presence does not match the registration")
    if offer.manifest is not None:
        validate_manifest(offer.manifest, offer.session.layout)


# As `self._on` finds them, without the wrappers and weak references that `singledispatchmethod` makes for each call.
_HANDLERS: Mapping[type, Callable[..., None]] = vars(PrefillMachine)["_on"].dispatcher.registry
_UNHEARD = _HANDLERS[object]
