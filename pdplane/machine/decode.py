"""The decode rank's decisions: events in, actions out, time as an argument.

request -> look-up, registration -> window open, blocks offered -> every Success and every byte -> Deliver
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import singledispatchmethod

import attrs

from pdplane.errors import Cause, LocalProtocolError, ProtocolError, RoomFailed, Why
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import expected_bytes
from pdplane.kv.layout import Layout
from pdplane.machine import events
from pdplane.machine.actions import (
    CloseFence,
    DecodeAction,
    DecodeSettings,
    DecodeTimers,
    DecodeTurn,
    Deliver,
    Delivered,
    Fail,
    LookUp,
    Offer,
    OpenFence,
    PeerKey,
    Tell,
    Timers,
    Turn,
    WakeAt,
)
from pdplane.machine.events import DecodeRequested
from pdplane.machine.peers import Link, Peers, PrefillPeer
from pdplane.machine.uses import (
    DECODE_TABLE,
    TOMBSTONES,
    DecodeLife,
    DecodeMove,
    DecodeState,
    Graveyard,
    Known,
    Quarantine,
    RankUse,
    Standing,
    Tombstone,
    advance,
    standing,
)
from pdplane.messages import (
    Cancel,
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


@attrs.define
class DecodeUse:
    """One use of a room number; its ticket is the generation in notices to prefill."""

    request: DecodeRequested
    since: float
    state: DecodeState = DecodeState.RESOLVING
    peer: PeerKey | None = None
    expected: Mapping[Rank, int] = attrs.field(factory=dict)
    successes: dict[Rank, Status] = attrs.field(factory=dict)
    landed: dict[Rank, int] = attrs.field(factory=dict)
    counted: bool = True  # landed bytes are counted, and the fence can stop them
    why: Why | None = None
    story: list[str] = attrs.field(factory=list)

    @property
    def generation(self) -> Generation:
        return Generation(self.request.ticket)

    @property
    def window(self) -> Window:
        """The notice that names this use to prefill."""
        return Window(self.request.room, self.generation, self.request.prompt_hash)

    def move(self, move: DecodeMove, now: float) -> bool:
        """Advance by the table; return True when a new state was entered."""
        before, self.state = self.state, advance(DECODE_TABLE, self.state, move)
        if entered := before is not self.state:
            self.story.append(f"{self.state.value} +{now - self.since:.3f}s")
        return entered

    @property
    def has_every_status(self) -> bool:
        return bool(self.expected) and self.expected.keys() <= self.successes.keys()

    @property
    def has_every_byte(self) -> bool:
        return not self.counted or all(self.landed.get(rank, 0) == nbytes for rank, nbytes in self.expected.items())

    @property
    def writers_left(self) -> frozenset[Rank]:
        """Prefill ranks that may still write and that no fence can stop."""
        return frozenset() if self.counted else frozenset(self.expected.keys() - self.successes.keys())

    def missing(self) -> str:
        """Return which statuses and bytes have not come, for the error of a room that waited too long."""
        silent = sorted(self.expected.keys() - self.successes.keys())
        if not self.counted:
            return f"no Success from prefill ranks {silent}"
        short = sorted(rank for rank, nbytes in self.expected.items() if self.landed.get(rank, 0) != nbytes)
        return f"no Success from prefill ranks {silent}, bytes missing from prefill ranks {short}"

    def delivered(self) -> Delivered:
        """Return the statuses merged by the rule of the wire.

        A first token, a logprob and candidates that are present win, in rank order; cached tokens: the maximum.
        """
        statuses = [self.successes[rank] for rank in sorted(self.expected)]
        token = next((s.first_token for s in statuses if s.first_token >= 0), None)
        logprob = next((s.first_logprob for s in statuses if s.logprob is not None), None)
        candidates = next((s.candidates for s in statuses if s.candidates), None)
        top = next((s.top for s in statuses if s.top), ())
        cached = max(s.cached_tokens for s in statuses)
        return Delivered(token, logprob, candidates, cached, top, sum(self.expected.values()))


# ---- A decode rank's rooms, and what follows from the states that they enter
#
# A room that breaks closes its fence first and only then reports to its caller, so that the blocks are free by then.


_RAW: DecodeLife = (SessionId(""), Life(""))  # stands for prefill ranks whose words name no use


class DecodeRooms:
    """Every room of one decode rank: live, ended, and those whose blocks may still be written to."""

    def __init__(
        self,
        settings: DecodeSettings,
        layout: Layout,
        session: SessionId,
        peers: Peers,
        rejected: Counter[str],
        timers: DecodeTimers,
    ) -> None:
        self._settings, self._layout = settings, layout
        self._me: DecodeLife = (session, Life(""))  # the one decode rank whose uses these are
        self._peers, self._rejected, self._timers = peers, rejected, timers
        self._live: dict[Room, DecodeUse] = {}
        self._graveyard = Graveyard()
        self.quarantine = Quarantine(settings.quarantine_timeout_s, timers)
        self.totals: Counter[str] = Counter()

    # ---- questions

    def __iter__(self) -> Iterator[DecodeUse]:
        """Return the live rooms."""
        return iter(list(self._live.values()))

    def get(self, number: Room) -> DecodeUse | None:
        return self._live.get(number)

    def resolving(self, number: Room, bootstrap: Endpoint) -> DecodeUse | None:
        """Return the room that waits for this look-up."""
        room = self._live.get(number)
        if room is None or room.state is not DecodeState.RESOLVING or room.request.bootstrap != bootstrap:
            return None
        return room

    def waiting(
        self, turn: DecodeTurn, number: Room, generation: Generation, peer: PrefillPeer | None
    ) -> DecodeUse | None:
        """Return the waiting room of this generation (and this peer), or None after counting why there is none."""
        room, found = self._live.get(number), self._standing(number, generation, turn.now)
        if room is None or found is not Standing.LIVE or room.state is not DecodeState.WAITING:
            self._rejected["unknown_room" if found is Standing.NEW else "late"] += 1
        elif peer is None or room.peer == peer.key:
            return room
        else:
            self._rejected["foreign_peer"] += 1
        return None

    def _standing(self, number: Room, generation: Generation | None, now: float) -> Standing:
        """Return where a use stands that a prefill rank names by its generation; None for a caller's request."""
        room = self._live.get(number)
        if room is not None:
            known = Known(live={self._me: room.generation}, requested=True)
        else:
            known = Known(stone=self._graveyard.find(number, now))
        return standing(known, None if generation is None else RankUse(self._me, generation))

    def taken(self, turn: DecodeTurn, number: Room) -> str | None:
        """Return why the number takes no new use now, or None."""
        if number in self.quarantine:
            return "has failed, and its blocks may still be written to"
        found = self._standing(number, None, turn.now)
        if found is Standing.LIVE:
            return "is live"
        return "has just ended and its peer cannot tell uses apart" if found is Standing.UNCLEAR else None

    @property
    def is_full(self) -> bool:
        return len(self._live) + len(self.quarantine) >= self._settings.max_rooms

    def states(self) -> Counter[str]:
        return Counter(room.state.value for room in self._live.values())

    @property
    def tombstones(self) -> int:
        return len(self._graveyard)

    # ---- moves

    def open(self, turn: DecodeTurn, request: DecodeRequested) -> DecodeUse:
        """Open a room under a free number."""
        room = self._live[request.room] = DecodeUse(request, turn.now)
        self._timers.set(request.room, turn.now + self._settings.bootstrap_timeout_s)
        return room

    def attach(self, turn: DecodeTurn, room: DecodeUse, peer: PrefillPeer) -> None:
        room.peer = peer.key
        if peer.is_joined:
            self.move(turn, room, DecodeMove.JOINED)

    def offer(self, turn: DecodeTurn, room: DecodeUse, link: Link) -> None:
        manifest = None if link.idle else room.request.manifest
        turn.add(Tell(link.channel, room.window), Offer(link.channel, room.request.room, manifest))

    def succeeded(self, turn: DecodeTurn, room: DecodeUse, status: Status) -> None:
        """Record that an expected rank has written all of its bytes."""
        first = room.successes.setdefault(status.prefill_rank, status) is status
        self.move(turn, room, DecodeMove.REPORTED)
        if first and room.has_every_status and not room.has_every_byte:
            # Success follows the last acknowledgement, so missing bytes are not awaited for long
            self._timers.set(room.request.room, turn.now + self._settings.late_bytes_s)
        self.complete(turn, room)

    def complete(self, turn: DecodeTurn, room: DecodeUse) -> None:
        """Go on if nothing is missing any more."""
        if not (room.has_every_status and room.has_every_byte):
            return
        self.move(turn, room, DecodeMove.COMPLETED)

    def break_(self, turn: DecodeTurn, room: DecodeUse, why: Why) -> None:
        room.why = room.why or why
        self.move(turn, room, DecodeMove.BROKEN)

    def move(self, turn: DecodeTurn, room: DecodeUse, move: DecodeMove) -> None:
        before = room.state
        if room.move(move, turn.now):
            self._entered(turn, room, before)

    def decline(self, turn: DecodeTurn, window: Window, peer: PrefillPeer, why: Why) -> None:
        """Tell the prefill ranks that know us that this use gets no blocks, so that its request need not wait."""
        cancel = Cancel(window.room, window.generation, why)
        for link in peer.links.values():
            if link.registered and not link.channel.is_legacy:
                turn.add(Tell(link.channel, window), Tell(link.channel, cancel))

    def time_over(self, turn: DecodeTurn, number: Room) -> None:
        """Break the room whose deadline has passed, release its blocks, or forget the oldest tombstones."""
        if number == TOMBSTONES:
            self._graveyard.expire(turn.now)
            self._await_tombstones()
        elif number in self.quarantine:
            self.quarantine.release(turn, number)
        elif room := self._live.get(number):
            waited = f"after {turn.now - room.since:.1f} s"
            if room.state is DecodeState.RESOLVING:
                text = f"prefill at {room.request.bootstrap} did not register us {waited}"
                self.break_(turn, room, Why(Cause.UNREACHABLE, text))
            else:
                self.break_(turn, room, Why(Cause.TIMED_OUT, f"timed out {waited}: {room.missing()}"))

    def _await_tombstones(self) -> None:
        if TOMBSTONES not in self._timers and (until := self._graveyard.earliest()) is not None:
            self._timers.set(TOMBSTONES, until)

    # ---- states

    def _entered(self, turn: DecodeTurn, room: DecodeUse, before: DecodeState) -> None:
        if room.state is DecodeState.WAITING:
            self._enter_waiting(turn, room)
            return
        number, ticket = room.request.room, room.request.ticket
        if before is DecodeState.WAITING:
            turn.add(CloseFence(number, room.generation))
        peer = self._peers.get(room.peer)
        self._bury(turn, room, raw=before is DecodeState.WAITING and peer is not None and peer.is_legacy)
        if room.state is DecodeState.READY:
            turn.add(Deliver(number, ticket, room.delivered()))
            return
        why = room.why or Why(Cause.INTERNAL, "unknown")
        if peer is not None and before is DecodeState.WAITING:
            cancel = Cancel(number, room.generation, why)
            turn.add(*(Tell(link.channel, cancel) for link in peer.links.values()))
        elif peer is not None:
            self.decline(turn, room.window, peer, why)
        if room.writers_left:
            self.quarantine.hold(room.request, room.writers_left, turn.now)
        error = RoomFailed(number, why.cause, why.text, tuple(room.story))
        turn.add(Fail(number, ticket, error, held=bool(room.writers_left)))

    def _bury(self, turn: DecodeTurn, room: DecodeUse, *, raw: bool) -> None:
        number = room.request.room
        self._timers.drop(number)
        del self._live[number]
        ended = {self._me: room.generation} | ({_RAW: Generation(0)} if raw else {})
        until = turn.now + self._settings.tombstone_s
        self._graveyard.bury(number, Tombstone(room.why, until, ended=ended, members=frozenset({self._me})))
        self._await_tombstones()
        self.totals[room.state.value] += 1

    def _enter_waiting(self, turn: DecodeTurn, room: DecodeUse) -> None:
        peer = self._peers.get(room.peer)
        assert peer is not None, "a room joins through its peer"
        number, manifest = room.request.room, room.request.manifest
        room.expected = {rank: expected_bytes(self._layout, manifest, route) for rank, route in peer.routes.items()}
        room.counted = not (self._settings.one_sided or peer.is_legacy)
        self._timers.set(number, turn.now + self._settings.waiting_timeout_s)
        turn.add(OpenFence(number, room.generation, manifest, peer.writers))
        for link in peer.links.values():
            self.offer(turn, room, link)


# ---- The machine: events in, actions out


_TOO_MANY = Why(Cause.FULL, "too many live rooms")


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
        self._timers: DecodeTimers = Timers()
        self._peers = Peers(settings, layout, life, registration, fingerprint, self._timers)
        self._session = registration.session
        self._rejected: Counter[str] = Counter()
        self._rooms = DecodeRooms(settings, layout, self._session, self._peers, self._rejected, self._timers)
        self._closing: Why | None = None

    def handle(self, event: events.DecodeEvent, now: float) -> list[DecodeAction]:
        """Return the actions that one event causes, the next wake-up last."""
        turn: DecodeTurn = Turn(now)
        _handler_of(type(event))(self, event, turn)
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
        if room is None:
            return
        if peer is not None and peer.draining:
            self._rooms.break_(turn, room, Why(Cause.CLOSING, "prefill is draining"))
            return
        try:
            peer = peer or self._peers.join(turn, event)
        except ProtocolError as wrong:
            self._rooms.break_(turn, room, Why(Cause.REFUSED, f"prefill at {event.bootstrap} does not fit: {wrong}"))
            return
        self._rooms.attach(turn, room, peer)

    @_on.register
    def _(self, event: events.PeerMissing, turn: DecodeTurn) -> None:
        for peer in self._peers:
            if peer.suspect and peer.key[0] == event.bootstrap:
                self._lose(turn, peer, Why(Cause.PEER_LOST, f"prefill is gone: {event.why.text}"))
        room = self._rooms.resolving(event.room, event.bootstrap)
        if room is not None and room.peer is None:
            self._rooms.break_(turn, room, event.why)

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
            elif room.state is DecodeState.RESOLVING and peer.is_joined:
                self._rooms.move(turn, room, DecodeMove.JOINED)

    def _lose(self, turn: DecodeTurn, peer: PrefillPeer, why: Why, *, again: bool = True) -> None:
        """Forget a peer and break its rooms; those that offered nothing yet look it up again if `again`."""
        self._rooms.totals["peers_lost"] += 1
        mine = [room for room in self._rooms if room.peer == peer.key]
        for room in mine:
            if room.state is DecodeState.RESOLVING and again:
                room.peer = None
                turn.add(LookUp(room.request.bootstrap, room.request.room))
            else:
                self._rooms.break_(turn, room, why)
        self._peers.forget(turn, peer)

    # ---- rooms

    def _decline(self, turn: DecodeTurn, event: events.DecodeRequested | events.DecodeDeclined, why: Why) -> None:
        if peer := self._peers.fresh(event.bootstrap, event.room, turn.now):
            window = Window(event.room, Generation(event.ticket), event.prompt_hash)
            self._rooms.decline(turn, window, peer, why)

    def _failed_by_prefill(self, turn: DecodeTurn, peer: PrefillPeer, failed: Failed) -> None:
        if room := self._rooms.waiting(turn, failed.room, failed.generation, peer):
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


# As `self._on` calls it, without the wrapper that `singledispatchmethod` makes for each call.
_handler_of: Callable[[type], Callable[..., None]] = vars(DecodeMachine)["_on"].dispatcher.dispatch
