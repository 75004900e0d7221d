"""A decode rank's rooms: all facts of one use in one object, and what follows from the states that they enter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from pdplane.errors import Cause, RoomFailed, Why
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import expected_bytes
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest
from pdplane.machine.actions import (
    CloseFence,
    DecodeSettings,
    DecodeTimers,
    DecodeTurn,
    Deliver,
    Delivered,
    Fail,
    Offer,
    OpenFence,
    PeerKey,
    Tell,
)
from pdplane.machine.events import DecodeRequested
from pdplane.machine.peers import Link, Partings, Peers, PrefillPeer, parting_words
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
from pdplane.messages import Cancel, Queued, Status, Window


@attrs.define
class DecodeUse:
    """One use of a room number; its ticket is the generation in notices to prefill."""

    request: DecodeRequested
    since: float
    state: DecodeState
    peer: PeerKey | None = None
    told: bool = False  # prefill knows that it stands in line
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

    @property
    def manifest(self) -> Manifest:
        assert self.request.manifest is not None, "it stands in line for its blocks"
        return self.request.manifest

    @property
    def is_known(self) -> bool:
        """Whether prefill has heard of it."""
        return self.told or self.state is DecodeState.WAITING

    @property
    def is_resolving(self) -> bool:
        """Whether no blocks are offered yet."""
        return self.state in (DecodeState.QUEUED, DecodeState.RESOLVING)

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
        self.partings = Partings(settings.max_rooms)
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
        if room is None or not room.is_resolving or room.request.bootstrap != bootstrap:
            return None
        return room

    def waiting(
        self, turn: DecodeTurn, number: Room, generation: Generation, peer: PrefillPeer | None
    ) -> DecodeUse | None:
        """Return the waiting room of this generation (and this peer), or None after counting why there is none."""
        return self._known(turn, number, generation, peer, waiting=True)

    def known(self, turn: DecodeTurn, number: Room, generation: Generation, peer: PrefillPeer) -> DecodeUse | None:
        """Return the room that this peer has heard of, or None after counting why there is none."""
        return self._known(turn, number, generation, peer, waiting=False)

    def _known(
        self, turn: DecodeTurn, number: Room, generation: Generation, peer: PrefillPeer | None, *, waiting: bool
    ) -> DecodeUse | None:
        room, found = self._live.get(number), self._standing(number, generation, turn.now)
        fits = room is not None and (room.state is DecodeState.WAITING or (not waiting and room.told))
        if room is None or found is not Standing.LIVE or not fits:
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
        state = DecodeState.QUEUED if request.manifest is None else DecodeState.RESOLVING
        room = self._live[request.room] = DecodeUse(request, turn.now, state)
        self._timers.set(request.room, turn.now + self._settings.peer_timeout_s)
        self.partings.forget(request.room)
        return room

    def attach(self, turn: DecodeTurn, room: DecodeUse, peer: PrefillPeer) -> None:
        room.peer = peer.key
        if peer.is_joined:
            self.joined(turn, room, peer)

    def joined(self, turn: DecodeTurn, room: DecodeUse, peer: PrefillPeer) -> None:
        """Offer the blocks, or say that the room stands in line for them, since every rank has registered us."""
        if room.state is not DecodeState.QUEUED:
            self.move(turn, room, DecodeMove.JOINED)
            return
        room.told = True
        self._timers.set(room.request.room, turn.now + self._settings.waiting_timeout_s)
        queued = Queued(room.request.room, self._me[0], room.generation, room.request.prompt_hash)
        turn.add(*(Tell(link.channel, queued) for link in peer.links.values() if not link.channel.is_legacy))

    def give(self, turn: DecodeTurn, room: DecodeUse, manifest: Manifest) -> None:
        """Go on with the blocks for which the room stood in line."""
        room.request = attrs.evolve(room.request, manifest=manifest)
        self.move(turn, room, DecodeMove.FILLED)
        peer = self._peers.get(room.peer)
        if peer is not None and peer.is_joined:
            self.joined(turn, room, peer)

    def offer(self, turn: DecodeTurn, room: DecodeUse, link: Link) -> None:
        manifest = None if link.idle else room.manifest
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
        for link in peer.links.values():
            if (link.registered or link.refused) and not link.channel.is_legacy:
                turn.add(*parting_words(link, window, why))

    def part(self, turn: DecodeTurn, peer: PrefillPeer) -> None:
        """Tell a peer which uses were given up while it was looked up or registering us."""
        for parting in self.partings.take(peer.key):
            self.decline(turn, parting.window, peer, parting.why)

    def time_over(self, turn: DecodeTurn, number: Room) -> None:
        """Break the room whose deadline has passed, release its blocks, or forget the oldest tombstones."""
        if number == TOMBSTONES:
            self._graveyard.expire(turn.now)
            self._await_tombstones()
        elif number in self.quarantine:
            self.quarantine.release(turn, number)
        elif room := self._live.get(number):
            waited = f"after {turn.now - room.since:.1f} s"
            if room.is_resolving and not room.told:
                text = f"prefill at {room.request.bootstrap} did not register us {waited}"
                self.break_(turn, room, Why(Cause.UNREACHABLE, text))
            elif room.is_resolving:
                self.break_(turn, room, Why(Cause.FULL, f"no blocks were free {waited}"))
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
        if room.state is DecodeState.RESOLVING:
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
        elif peer is not None and peer.is_joined:
            self.decline(turn, room.window, peer, why)
        else:
            self.partings.keep(room.request.bootstrap, room.window, why, room.peer)
        if room.writers_left:
            self.quarantine.hold(number, ticket, room.manifest, room.writers_left, turn.now)
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
        number, manifest = room.request.room, room.manifest
        room.expected = {rank: expected_bytes(self._layout, manifest, route) for rank, route in peer.routes.items()}
        room.counted = not (self._settings.one_sided or peer.is_legacy)
        self._timers.set(number, turn.now + self._settings.waiting_timeout_s)
        turn.add(OpenFence(number, room.generation, manifest, peer.writers))
        for link in peer.links.values():
            self.offer(turn, room, link)
