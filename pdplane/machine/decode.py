"""The decode rank's decisions: events in, actions out, time as an argument.

request -> look-up, registration -> window open, blocks offered -> every Success and every byte -> Deliver
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import singledispatchmethod

import attrs

from pdplane.errors import Cause, LocalProtocolError, ProtocolError, RoomFailed, Why
from pdplane.ids import Generation, Life
from pdplane.kv.layout import Layout
from pdplane.machine import events
from pdplane.machine.actions import (
    DecodeAction,
    DecodeSettings,
    DecodeTimers,
    DecodeTurn,
    Fail,
    LookUp,
    PeerKey,
    Timers,
    Turn,
    WakeAt,
)
from pdplane.machine.decode_rooms import DecodeRooms, DecodeUse
from pdplane.machine.peers import Link, Peers, PrefillPeer
from pdplane.machine.uses import (
    DecodeMove,
    DecodeState,
)
from pdplane.messages import (
    Failed,
    Fingerprint,
    Landed,
    Refused,
    Registered,
    Registration,
    Status,
    StatusCode,
    UnknownSession,
    Window,
    WriterCut,
)

_TOO_MANY = Why(Cause.FULL, "too many live rooms")


@attrs.frozen
class DecodeCounts:
    """Every count of a decode rank at one moment; totals only grow."""

    rooms: dict[str, int]
    sessions: dict[str, int]
    partings: int
    tombstones: int
    quarantine: dict[str, int]
    rejected: dict[str, int]
    totals: dict[str, int]


class DecodeMachine:
    """Rooms and peers of one decode rank. Not thread-safe: one owner."""

    def __init__(
        self,
        settings: DecodeSettings,
        layout: Layout,
        life: Life,
        registration: Registration,
        fingerprint: Fingerprint,
    ) -> None:
        self._settings, self._layout = settings, layout
        self._timers: DecodeTimers = Timers()
        self._peers = Peers(settings, layout, life, registration, fingerprint, self._timers)
        self._session = registration.session
        self._rejected: Counter[str] = Counter()
        self._rooms = DecodeRooms(settings, layout, self._session, self._peers, self._rejected, self._timers)
        self._closing: Why | None = None

    def handle(self, event: events.DecodeEvent, now: float) -> list[DecodeAction]:
        """Return the actions that one event causes, the next wake-up last."""
        turn: DecodeTurn = Turn(now)
        _HANDLERS.get(type(event), _UNHEARD)(self, event, turn)
        for key in self._timers.due(now):
            if isinstance(key, tuple):
                self._tend(turn, key)
            else:
                self._rooms.time_over(turn, key)
        if (wake := self._timers.earliest()) is not None:
            turn.add(WakeAt(wake))
        return turn.actions

    def counts(self) -> DecodeCounts:
        return DecodeCounts(
            rooms=dict(self._rooms.states()),
            sessions=self._peers.counts(),
            partings=len(self._rooms.partings),
            tombstones=self._rooms.tombstones,
            quarantine=self._rooms.quarantine.counts(),
            rejected=dict(self._rejected),
            totals=dict(self._rooms.totals),
        )

    # ---- events

    @singledispatchmethod
    def _on(self, event: events.DecodeEvent, turn: DecodeTurn) -> None:
        raise LocalProtocolError(f"a decode rank cannot hear {type(event).__name__}")

    @_on.register
    def _(self, event: events.Tick, turn: DecodeTurn) -> None:
        """Do nothing: what time causes happens in `handle`, after every event."""

    @_on.register
    def _(self, event: events.Closing, turn: DecodeTurn) -> None:
        self._closing = Why(Cause.CLOSING, event.text)
        for room in self._rooms:
            self._rooms.break_(turn, room, self._closing)

    @_on.register
    def _(self, event: events.RoomCancelled, turn: DecodeTurn) -> None:
        room = self._rooms.get(event.room)
        if room is not None and room.request.ticket == event.ticket:
            self._rooms.break_(turn, room, event.why)

    @_on.register
    def _(self, event: events.DecodeRequested, turn: DecodeTurn) -> None:
        if taken := self._rooms.taken(turn, event.room):
            error = LocalProtocolError(f"room {event.room} {taken}", Cause.LIVE)
            turn.add(Fail(event.room, event.ticket, error))
            return
        if why := self._closing or (_TOO_MANY if self._rooms.is_full else None):
            turn.add(Fail(event.room, event.ticket, RoomFailed(event.room, why.cause, why.text)))
            self._decline(turn, event, why)
            return
        room = self._rooms.open(turn, event)
        if peer := self._peers.fresh(event.bootstrap, event.room, turn.now):
            self._rooms.attach(turn, room, peer)
        else:
            turn.add(LookUp(event.bootstrap, event.room))

    @_on.register
    def _(self, event: events.BlocksGiven, turn: DecodeTurn) -> None:
        room = self._rooms.get(event.room)
        if room is not None and room.request.ticket == event.ticket and room.state is DecodeState.QUEUED:
            self._rooms.give(turn, room, event.manifest)

    @_on.register
    def _(self, event: events.DecodeDeclined, turn: DecodeTurn) -> None:
        if self._rooms.get(event.room) is None:  # else another use has the number
            self._decline(turn, event, event.why)

    @_on.register
    def _(self, event: events.PeerFound, turn: DecodeTurn) -> None:
        peer = self._peers.get((event.bootstrap, event.dp_group))
        if peer is not None and not self._peers.same_lives(peer, event):
            self._lose(turn, peer, Why(Cause.PEER_LOST, "prefill restarted"))
            peer = None
        peer = peer or self._peers.known_as(event)
        if peer is not None:
            peer.suspect = False
        room = self._rooms.resolving(event.room, event.bootstrap)
        if room is None and not self._rooms.partings.awaits(event.room, event.bootstrap):
            return
        if room is not None and peer is not None and peer.draining:
            room.peer = peer.key
            self._rooms.break_(turn, room, Why(Cause.CLOSING, "prefill is draining"))
            return
        try:
            peer = peer or self._peers.join(turn, event)
        except ProtocolError as wrong:
            self._does_not_fit(turn, event, room, str(wrong))
            return
        if room is not None:
            self._rooms.attach(turn, room, peer)
        else:
            self._rooms.partings.attach(event.room, peer.key)
            if peer.is_joined:
                self._rooms.part(turn, peer)

    def _does_not_fit(self, turn: DecodeTurn, event: events.PeerFound, room: DecodeUse | None, wrong: str) -> None:
        why = Why(Cause.REFUSED, f"prefill at {event.bootstrap} does not fit: {wrong}")
        if room is not None:
            self._rooms.break_(turn, room, why)
        if (parting := self._rooms.partings.forget(event.room)) is not None:
            self._peers.part(turn, event, parting.window, parting.why)

    @_on.register
    def _(self, event: events.PeerMissing, turn: DecodeTurn) -> None:
        for peer in self._peers:
            if peer.suspect and peer.key[0] == event.bootstrap:
                self._lose(turn, peer, Why(Cause.PEER_LOST, f"prefill is gone: {event.why.text}"))
        room = self._rooms.resolving(event.room, event.bootstrap)
        if room is not None and room.peer is None:
            self._rooms.break_(turn, room, event.why)
        if self._rooms.partings.awaits(event.room, event.bootstrap):
            self._rooms.partings.forget(event.room)

    @_on.register
    def _(self, event: events.NoticeFromPrefill, turn: DecodeTurn) -> None:
        known = self._peers.link(event.channel)
        if known is None:
            self._rejected["unknown_channel"] += 1
            return
        peer, link = known
        link.heard = turn.now
        match event.notice:
            case Registered(session, life) if session == self._session:
                self._registered(turn, peer, link, life)
            case Refused() as refused:
                text = f"{refused.field} differs: prefill has {refused.ours}, this decode has {refused.theirs}"
                why = Why(refused.cause.of_peer, f"prefill refuses this decode: {text}")
                link.refused = True
                self._lose(turn, peer, why, again=False)
            case UnknownSession():
                if link.registered:  # else our registration is already under way
                    self._peers.introduce(turn, link)
            case Failed() as failed:
                self._failed_by_prefill(turn, peer, failed)
            case other:
                if not peer.note(link, other):
                    self._rejected["notice"] += 1

    @_on.register
    def _(self, event: events.ChannelBroken, turn: DecodeTurn) -> None:
        if known := self._peers.link(event.channel):
            self._lose(turn, known[0], event.why, again=False)

    @_on.register
    def _(self, event: events.StatusFromPrefill, turn: DecodeTurn) -> None:
        known, status = self._peers.link(event.channel), event.status
        if known is None:
            late = self._rooms.quarantine.heard(turn, status)  # the peer was lost meanwhile
            self._rejected["late" if late else "unknown_channel"] += 1
            return
        peer, link = known
        link.heard = turn.now
        generation = event.generation
        if (window := link.announced(status.room)) is not None:
            generation = window.generation if generation is None else generation
            status = attrs.evolve(status, top=window.top)
        if status.prefill_rank != event.channel.prefill_rank:
            self._rejected["foreign_rank"] += 1
            return
        if generation is None and status.code is StatusCode.FAILED:
            # It may mean any use: to fail a healthy one costs one request, to ignore it costs a long wait.
            live = self._rooms.get(status.room)
            generation = live.generation if live else None
        if self._rooms.quarantine.heard(turn, status):
            self._rejected["late"] += 1
        elif room := self._rooms.waiting(turn, status.room, generation or Generation(0), peer):
            self._reported(turn, room, status)

    @_on.register
    def _(self, event: Landed, turn: DecodeTurn) -> None:
        room = self._rooms.waiting(turn, event.room, event.generation, None)
        if room is None or event.prefill_rank not in room.expected:
            return
        if event.nbytes > room.expected[event.prefill_rank]:
            text = f"prefill rank {event.prefill_rank} sent more bytes than the manifest holds"
            self._rooms.break_(turn, room, Why(Cause.PEER_FAILED, text))
            return
        room.landed[event.prefill_rank] = max(event.nbytes, room.landed.get(event.prefill_rank, 0))
        self._rooms.move(turn, room, DecodeMove.LANDED)
        self._rooms.complete(turn, room)

    @_on.register
    def _(self, event: WriterCut, turn: DecodeTurn) -> None:
        self._peers.suspect(turn, event.life)

    # ---- peers

    def _registered(self, turn: DecodeTurn, peer: PrefillPeer, link: Link, life: Life) -> None:
        if life != link.channel.life:
            self._lose(turn, peer, Why(Cause.PEER_LOST, "another life of prefill answered"), again=False)
            return
        if link.registered:
            return
        link.registered = True
        for room in self._rooms:
            if room.peer != peer.key:
                continue
            if room.state is DecodeState.WAITING and link.channel.prefill_rank not in room.successes:
                self._rooms.offer(turn, room, link)  # it had lost our session, and our offer with it
            elif room.is_resolving and peer.is_joined:
                self._rooms.joined(turn, room, peer)
        if peer.is_joined:
            self._rooms.part(turn, peer)

    def _lose(self, turn: DecodeTurn, peer: PrefillPeer, why: Why, *, again: bool = True) -> None:
        """Forget a peer and break its rooms; those that offered nothing yet look it up again if `again`."""
        self._rooms.totals["peers_lost"] += 1
        mine = [room for room in self._rooms if room.peer == peer.key]
        for room in mine:
            if room.is_resolving and not room.told and again:
                room.peer = None
                turn.add(LookUp(room.request.bootstrap, room.request.room))
            else:
                self._rooms.break_(turn, room, why)
        self._rooms.part(turn, peer)  # of use only to a peer that refuses us
        self._peers.forget(turn, peer)

    # ---- rooms

    def _decline(self, turn: DecodeTurn, event: events.DecodeRequested | events.DecodeDeclined, why: Why) -> None:
        window = Window(event.room, Generation(event.ticket), event.prompt_hash)
        if peer := self._peers.joined(event.bootstrap, event.room):
            self._rooms.decline(turn, window, peer, why)
        elif self._closing is None and self._rooms.partings.keep(event.bootstrap, window, why):
            turn.add(LookUp(event.bootstrap, event.room))

    def _failed_by_prefill(self, turn: DecodeTurn, peer: PrefillPeer, failed: Failed) -> None:
        if room := self._rooms.known(turn, failed.room, failed.generation, peer):
            self._rooms.break_(turn, room, Why(failed.why.cause.of_peer, f"prefill: {failed.why.text}"))

    def _reported(self, turn: DecodeTurn, room: DecodeUse, status: Status) -> None:
        if status.code is StatusCode.FAILED:  # from an idle rank too: its instance agreed that the room is over
            self._rooms.break_(turn, room, Why(Cause.PEER_FAILED, f"prefill rank {status.prefill_rank} failed it"))
        elif status.code is not StatusCode.SUCCESS:
            self._rejected["status"] += 1
        elif status.prefill_rank in room.expected:
            self._rooms.succeeded(turn, room, status)

    # ---- time

    def _tend(self, turn: DecodeTurn, key: PeerKey) -> None:
        if peer := self._peers.tend(turn, key):
            limit = self._settings.ping_interval_s * self._settings.ping_misses
            self._lose(turn, peer, Why(Cause.PEER_LOST, f"prefill at {key[0]} fell silent for {limit:g} s"))


# As `self._on` finds them, without the wrappers and weak references that `singledispatchmethod` makes for each call.
_HANDLERS: Mapping[type, Callable[..., None]] = vars(DecodeMachine)["_on"].dispatcher.registry
_UNHEARD = _HANDLERS[object]
