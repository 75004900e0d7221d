"""The decode rank's decisions: events in, actions out, time as an argument.

    request -> look-up, registration -> window open, blocks offered -> every Success and every byte -> Deliver

A room that breaks closes its window first; only then does its caller hear of it, so that the blocks are free.
"""

from __future__ import annotations

from collections import Counter
from functools import singledispatchmethod

import attrs

from pdplane.errors import LocalProtocolError, ProtocolError, RoomFailed
from pdplane.ids import Endpoint, Generation, Life, Room
from pdplane.kv.copies import expected_bytes
from pdplane.kv.layout import Layout
from pdplane.machine import events
from pdplane.machine.actions import CloseWindow, DecodeAction, Deliver, Fail, LookUp, Offer, OpenWindow, Tell, WakeAt
from pdplane.machine.decode_room import DecodeRoom
from pdplane.machine.graveyard import Graveyard, Tombstone
from pdplane.machine.peers import DecodeTurn, Link, Peer, Peers
from pdplane.machine.quarantine import Quarantine
from pdplane.machine.room import DecodeMove, DecodeState
from pdplane.machine.settings import DecodeSettings
from pdplane.machine.timers import Timers
from pdplane.machine.turn import Turn
from pdplane.messages import (
    Cancel,
    Failed,
    Fingerprint,
    Refused,
    Registered,
    Registration,
    Status,
    StatusCode,
    UnknownSession,
    Window,
)


@attrs.frozen
class DecodeCounts:
    """Every count of a decode rank at one moment; totals only grow."""

    rooms: dict[str, int]
    sessions: dict[str, int]
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
        self._peers = Peers(settings, layout, life, registration, fingerprint)
        self._session = registration.session
        self._rooms: dict[Room, DecodeRoom] = {}
        self._graveyard = Graveyard()
        self._quarantine = Quarantine(settings.quarantine_timeout_s)
        self._timers: Timers[Room] = Timers()
        self._rejected: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._closing: str | None = None

    def handle(self, event: events.DecodeEvent, now: float) -> list[DecodeAction]:
        """Take one event in and give the actions that it causes, the next wake-up last."""
        turn: DecodeTurn = Turn(now)
        self._on(event, turn)
        self._expire(turn)
        timed = self._timers, self._peers, self._graveyard, self._quarantine
        if wake := [time for part in timed if (time := part.earliest()) is not None]:
            turn.add(WakeAt(min(wake)))
        return turn.actions

    def counts(self) -> DecodeCounts:
        return DecodeCounts(
            rooms=dict(Counter(room.state.value for room in self._rooms.values())),
            sessions=self._peers.counts(),
            tombstones=len(self._graveyard),
            quarantine=self._quarantine.counts(),
            rejected=dict(self._rejected),
            totals=dict(self._totals),
        )

    # ---- events

    @singledispatchmethod
    def _on(self, event: events.DecodeEvent, turn: DecodeTurn) -> None:
        raise LocalProtocolError(f"a decode rank cannot hear {type(event).__name__}")

    @_on.register
    def _(self, event: events.Tick, turn: DecodeTurn) -> None:
        """Everything that time causes happens in `_expire`."""

    @_on.register
    def _(self, event: events.Closing, turn: DecodeTurn) -> None:
        self._closing = event.cause
        for room in list(self._rooms.values()):
            self._break(turn, room, event.cause)

    @_on.register
    def _(self, event: events.RoomCancelled, turn: DecodeTurn) -> None:
        room = self._rooms.get(event.room)
        if room is not None and room.request.ticket == event.ticket:
            self._break(turn, room, event.cause)

    @_on.register
    def _(self, event: events.DecodeRequested, turn: DecodeTurn) -> None:
        if taken := self._taken(turn, event.room):
            turn.add(Fail(event.room, event.ticket, LocalProtocolError(f"room {event.room} {taken}")))
            return
        count = len(self._rooms) + len(self._quarantine)
        full = "too many live rooms" if count >= self._settings.max_rooms else None
        if cause := self._closing or full:
            turn.add(Fail(event.room, event.ticket, RoomFailed(event.room, cause)))
            return
        room = self._rooms[event.room] = DecodeRoom(event, turn.now)
        self._timers.set(event.room, turn.now + self._settings.bootstrap_timeout_s)
        if peer := self._peers.fresh(event.bootstrap, event.room, turn.now):
            self._attach(turn, room, peer)
        else:
            turn.add(LookUp(event.bootstrap, event.room))

    @_on.register
    def _(self, event: events.PeerFound, turn: DecodeTurn) -> None:
        peer = self._peers.get((event.bootstrap, event.dp_group))
        if peer is not None and not self._peers.same_lives(peer, event):
            self._lose(turn, peer, "prefill restarted")
            peer = None
        peer = peer or self._peers.known_as(event)
        if peer is not None:
            peer.suspect = False
        room = self._resolving(event.room, event.bootstrap)
        if room is None:
            return
        if peer is not None and peer.draining:
            self._break(turn, room, "prefill is draining")
            return
        try:
            peer = peer or self._peers.join(turn, event)
        except ProtocolError as wrong:
            self._break(turn, room, f"prefill at {event.bootstrap} does not fit: {wrong}")
            return
        self._attach(turn, room, peer)

    @_on.register
    def _(self, event: events.PeerMissing, turn: DecodeTurn) -> None:
        for peer in self._peers:
            if peer.suspect and peer.key[0] == event.bootstrap:
                self._lose(turn, peer, f"prefill is gone: {event.cause}")
        room = self._resolving(event.room, event.bootstrap)
        if room is not None and room.peer is None:
            self._break(turn, room, event.cause)

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
                cause = f"{refused.field} differs: prefill has {refused.ours}, this decode has {refused.theirs}"
                self._lose(turn, peer, f"prefill refuses this decode: {cause}", again=False)
            case UnknownSession():
                if link.registered:  # else our registration is on its way already
                    self._peers.introduce(turn, link)
            case Failed() as failed:
                self._failed_by_prefill(turn, peer, failed)
            case other if not peer.note(link, other):
                self._rejected["notice"] += 1

    @_on.register
    def _(self, event: events.ChannelBroken, turn: DecodeTurn) -> None:
        if known := self._peers.link(event.channel):
            self._lose(turn, known[0], event.cause, again=False)

    @_on.register
    def _(self, event: events.StatusFromPrefill, turn: DecodeTurn) -> None:
        known, status = self._peers.link(event.channel), event.status
        if known is None:
            late = self._quarantine.heard(turn, status)  # of a peer that we lost meanwhile
            self._rejected["late" if late else "unknown_channel"] += 1
            return
        peer, link = known
        link.heard = turn.now
        announced = link.announced(status.room)
        generation = announced if event.generation is None else event.generation
        if status.prefill_rank != event.channel.prefill_rank:
            self._rejected["foreign_rank"] += 1
            return
        if generation is None and status.code is StatusCode.FAILED:
            # Not said of which use: to fail a healthy one costs a request, to wait for nothing costs its time.
            generation = self._generation_of(status.room)
        if self._quarantine.heard(turn, status):
            self._rejected["late"] += 1
        elif room := self._live(turn, status.room, generation or Generation(0), peer):
            self._reported(turn, room, status)

    @_on.register
    def _(self, event: events.Landed, turn: DecodeTurn) -> None:
        room = self._live(turn, event.room, event.generation, None)
        if room is None or event.prefill_rank not in room.expected:
            return
        if event.nbytes > room.expected[event.prefill_rank]:
            self._break(turn, room, f"prefill rank {event.prefill_rank} sent more bytes than the manifest holds")
            return
        room.landed[event.prefill_rank] = max(event.nbytes, room.landed.get(event.prefill_rank, 0))
        self._move(turn, room, DecodeMove.LANDED)
        self._complete(turn, room)

    @_on.register
    def _(self, event: events.WriterCut, turn: DecodeTurn) -> None:
        self._peers.suspect(turn, event.life)

    # ---- peers

    def _registered(self, turn: DecodeTurn, peer: Peer, link: Link, life: Life) -> None:
        if life != link.channel.life:
            self._lose(turn, peer, "another life of prefill answered", again=False)
            return
        if link.registered:
            return
        link.registered = True
        for room in list(self._rooms.values()):
            if room.peer != peer.key:
                continue
            if room.state is DecodeState.WAITING and link.channel.prefill_rank not in room.successes:
                self._offer(turn, room, link)  # it had lost our session, and with it what we offered
            elif room.state is DecodeState.RESOLVING and peer.is_joined:
                self._move(turn, room, DecodeMove.JOINED)

    def _attach(self, turn: DecodeTurn, room: DecodeRoom, peer: Peer) -> None:
        room.peer = peer.key
        if peer.is_joined:
            self._move(turn, room, DecodeMove.JOINED)

    def _lose(self, turn: DecodeTurn, peer: Peer, cause: str, *, again: bool = True) -> None:
        """Forget a peer. Its rooms break, but those that offered nothing yet may look for it again."""
        self._totals["peers_lost"] += 1
        mine = [room for room in self._rooms.values() if room.peer == peer.key]
        for room in mine:
            if room.state is DecodeState.RESOLVING and again:
                room.peer = None
                turn.add(LookUp(room.request.bootstrap, room.request.room))
            else:
                self._break(turn, room, cause)
        self._peers.forget(turn, peer)

    # ---- rooms

    def _resolving(self, number: Room, bootstrap: Endpoint) -> DecodeRoom | None:
        """The room that waits for this look-up."""
        room = self._rooms.get(number)
        if room is None or room.state is not DecodeState.RESOLVING or room.request.bootstrap != bootstrap:
            return None
        return room

    def _taken(self, turn: DecodeTurn, number: Room) -> str | None:
        """Why the number takes no new use now."""
        if number in self._rooms:
            return "is live"
        if number in self._quarantine:
            return "has failed, and its blocks may still be written to"
        stone = self._graveyard.find(number, turn.now)
        return "has just ended and its peer cannot tell uses apart" if stone and stone.is_raw else None

    def _generation_of(self, number: Room) -> Generation | None:
        room = self._rooms.get(number)
        return room.generation if room else None

    def _live(self, turn: DecodeTurn, number: Room, generation: Generation, peer: Peer | None) -> DecodeRoom | None:
        """The waiting room of exactly this generation (and this peer); anything else is counted by what it is."""
        room = self._rooms.get(number)
        if room is not None and room.generation == generation and room.state is DecodeState.WAITING:
            if peer is None or room.peer == peer.key:
                return room
            self._rejected["foreign_peer"] += 1
            return None
        buried = room is not None or self._graveyard.find(number, turn.now) is not None
        self._rejected["late" if buried else "unknown_room"] += 1
        return None

    def _failed_by_prefill(self, turn: DecodeTurn, peer: Peer, failed: Failed) -> None:
        if room := self._live(turn, failed.room, failed.generation, peer):
            self._break(turn, room, f"prefill: {failed.cause}")

    def _reported(self, turn: DecodeTurn, room: DecodeRoom, status: Status) -> None:
        if status.code is StatusCode.FAILED:  # from an idle rank too: its instance agreed that the room is over
            self._break(turn, room, f"prefill rank {status.prefill_rank} failed it")
        elif status.code is not StatusCode.SUCCESS:
            self._rejected["status"] += 1
        elif status.prefill_rank in room.expected:
            self._succeeded(turn, room, status)

    def _succeeded(self, turn: DecodeTurn, room: DecodeRoom, status: Status) -> None:
        first = room.successes.setdefault(status.prefill_rank, status) is status
        self._move(turn, room, DecodeMove.REPORTED)
        if first and room.has_every_status and not room.has_every_byte:
            # Success follows the last acknowledgement: what has not landed by now will hardly come
            self._timers.set(room.request.room, turn.now + self._settings.late_bytes_s)
        self._complete(turn, room)

    def _complete(self, turn: DecodeTurn, room: DecodeRoom) -> None:
        if not (room.has_every_status and room.has_every_byte):
            return
        if room.delivered() is None:
            self._break(turn, room, "no prefill rank sent a first token")
        else:
            self._move(turn, room, DecodeMove.COMPLETED)

    def _break(self, turn: DecodeTurn, room: DecodeRoom, cause: str) -> None:
        room.cause = room.cause or cause
        self._move(turn, room, DecodeMove.BROKEN)

    def _move(self, turn: DecodeTurn, room: DecodeRoom, move: DecodeMove) -> None:
        before = room.state
        if room.move(move, turn.now):
            self._entered(turn, room, before)

    def _entered(self, turn: DecodeTurn, room: DecodeRoom, before: DecodeState) -> None:
        number, ticket = room.request.room, room.request.ticket
        if room.state is DecodeState.WAITING:
            self._enter_waiting(turn, room)
            return
        self._timers.drop(number)
        if before is DecodeState.WAITING:
            turn.add(CloseWindow(number, room.generation))
        del self._rooms[number]
        peer = self._peers.get(room.peer)
        raw = {}
        if before is DecodeState.WAITING and peer is not None and peer.is_legacy:
            raw = {(self._session, Life("")): Generation(0)}
        self._graveyard.bury(number, Tombstone(room.cause, turn.now + self._settings.tombstone_s, ended=raw))
        self._totals[room.state.value] += 1
        delivered = room.delivered() if room.state is DecodeState.READY else None
        if delivered is not None:
            turn.add(Deliver(number, ticket, delivered))
            return
        if before is DecodeState.WAITING and peer is not None:
            cancel = Cancel(number, room.generation, room.cause or "unknown")
            turn.add(*(Tell(link.channel, cancel) for link in peer.links.values()))
        if room.writers_left:
            self._quarantine.hold(room.request, room.writers_left, turn.now)
        error = RoomFailed(number, room.cause or "unknown", tuple(room.story))
        turn.add(Fail(number, ticket, error, held=bool(room.writers_left)))

    def _enter_waiting(self, turn: DecodeTurn, room: DecodeRoom) -> None:
        peer = self._peers.get(room.peer)
        assert peer is not None, "a room joins through its peer"
        number, manifest = room.request.room, room.request.manifest
        room.expected = {rank: expected_bytes(self._layout, manifest, route) for rank, route in peer.routes.items()}
        room.counted = not (self._settings.one_sided or peer.is_legacy)
        self._timers.set(number, turn.now + self._settings.waiting_timeout_s)
        turn.add(OpenWindow(number, room.generation, manifest, peer.writers))
        for link in peer.links.values():
            self._offer(turn, room, link)

    def _offer(self, turn: DecodeTurn, room: DecodeRoom, link: Link) -> None:
        number = room.request.room
        turn.add(
            Tell(link.channel, Window(number, room.generation, room.request.prompt_hash)),
            Offer(link.channel, number, None if link.idle else room.request.manifest),
        )

    # ---- time

    def _expire(self, turn: DecodeTurn) -> None:
        self._graveyard.expire(turn.now)
        self._quarantine.expire(turn)
        for number in list(self._timers.due(turn.now)):
            room = self._rooms[number]
            waited = f"after {turn.now - room.since:.1f} s"
            if room.state is DecodeState.RESOLVING:
                self._break(turn, room, f"prefill at {room.request.bootstrap} did not register us {waited}")
            else:
                self._break(turn, room, f"timed out {waited}: {room.missing()}")
        for peer in self._peers.tend(turn):
            limit = self._settings.ping_interval_s * self._settings.ping_misses
            self._lose(turn, peer, f"prefill at {peer.key[0]} fell silent for {limit:g} s")
