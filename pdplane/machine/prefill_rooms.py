"""A prefill rank's rooms, and what follows from the states that they enter.

A number belongs to at most one live room. A room that fails gives its number up at once, so that the next use
need not wait, and lives on by its pushes until the last of them has ended: only then are its blocks released.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import attrs

from pdplane.errors import RoomFailed
from pdplane.ids import Generation, Rank, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.machine.actions import CancelPush, Fail, Push, Release, Send, Succeed, Windowed
from pdplane.machine.events import is_legacy
from pdplane.machine.graveyard import Graveyard, Tombstone, Use, merge
from pdplane.machine.prefill_room import Offered, PrefillRoom
from pdplane.machine.room import PrefillMove, PrefillState
from pdplane.machine.session import PrefillTurn, Session, Sessions
from pdplane.machine.settings import PrefillSettings
from pdplane.machine.timers import Timers
from pdplane.messages import Failed, Status, StatusCode, Window

_PUSHES = 2**32  # the data plane numbers a room's pushes by a u32; ours wrap around, long after the last use


class PrefillRooms:
    """Every room of one prefill rank: live, draining, ended."""

    def __init__(self, settings: PrefillSettings, sessions: Sessions) -> None:
        self._settings, self._sessions = settings, sessions
        self._live: dict[Room, PrefillRoom] = {}
        self._draining: dict[int, PrefillRoom] = {}  # failed, by ticket
        self._pushing: dict[int, PrefillRoom] = {}  # by push
        self._graveyard = Graveyard()
        self._timers: Timers[Room] = Timers()
        self._numbers = itertools.count(1)
        self.totals: Counter[str] = Counter()

    # ---- questions

    def __iter__(self) -> Iterator[PrefillRoom]:
        """The live rooms."""
        return iter(list(self._live.values()))

    def get(self, number: Room) -> PrefillRoom | None:
        return self._live.get(number)

    def current(self, number: Room, ticket: int) -> PrefillRoom | None:
        """The live room, if it is this caller's use of the number."""
        room = self._live.get(number)
        return room if room and room.request and room.request.ticket == ticket else None

    def tombstone(self, number: Room, now: float) -> Tombstone | None:
        return None if number in self._live else self._graveyard.find(number, now)

    @property
    def is_full(self) -> bool:
        return len(self._live) + len(self._draining) >= self._settings.max_rooms

    def earliest(self) -> float | None:
        times = [time for time in (self._timers.earliest(), self._graveyard.earliest()) if time is not None]
        return min(times, default=None)

    def states(self) -> Counter[str]:
        return Counter(room.state.value for room in (*self._live.values(), *self._draining.values()))

    @property
    def pushes(self) -> int:
        return len(self._pushing)

    @property
    def tombstones(self) -> int:
        return len(self._graveyard)

    # ---- moves

    def open(self, turn: PrefillTurn, number: Room) -> PrefillRoom:
        """A new room under a free number."""
        before = self._graveyard.find(number, turn.now)
        ended = self._graveyard.take(number, turn.now)
        room = self._live[number] = PrefillRoom(number, turn.now, ended, before)
        self._timers.set(number, turn.now + self._settings.bootstrap_timeout_s)
        return room

    def evict(self, turn: PrefillTurn) -> None:
        """A request is worth more than the longest waiting offer that nobody asked for."""
        early = next((room for room in self._live.values() if room.state is PrefillState.EARLY), None)
        if early is not None:
            self.break_(turn, early, "too many live rooms")

    def push(self, turn: PrefillTurn, room: PrefillRoom, session_id: SessionId, copies: Copies) -> None:
        offer, number = room.offers[session_id], next(self._numbers) % _PUSHES
        room.pushes.add(number)
        self._pushing[number] = room
        session = offer.session
        base = session.registration.arena_base
        turn.add(Push(session_id, session.life, room.room, offer.generation, number, copies, base))

    def push_ended(self, turn: PrefillTurn, push: int, cause: str | None) -> None:
        room = self._pushing.pop(push, None)
        if room is None:
            return
        room.pushes.discard(push)
        if cause is None:
            self.move(turn, room, PrefillMove.PUSHED)
        else:
            self.break_(turn, room, cause)
        self.drain(turn, room)

    def break_(self, turn: PrefillTurn, room: PrefillRoom, cause: str) -> None:
        room.cause = room.cause or cause
        self.move(turn, room, PrefillMove.BROKEN)

    def drain(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        if not room.pushes and room.state in (PrefillState.FINISHING, PrefillState.FAILING):
            self.move(turn, room, PrefillMove.DRAINED)

    def move(self, turn: PrefillTurn, room: PrefillRoom, move: PrefillMove) -> None:
        if room.move(move, turn.now):
            self._entered(turn, room)

    def offered(self, turn: PrefillTurn, room: PrefillRoom, offer: Offered) -> None:
        """A decode rank takes part."""
        if room.withdrawn:  # it is a new use after all: it has the usual time
            self._timers.set(room.room, room.since + self._settings.bootstrap_timeout_s)
        room.offers[offer.session.id] = offer
        self.move(turn, room, PrefillMove.OFFERED)

    def withdraw(self, turn: PrefillTurn, number: Room, use: Use, prompt_hash: str, cause: str) -> None:
        """A decode rank takes no part in a use of a number that no room has now."""
        stone = self._graveyard.find(number, turn.now)
        if stone is not None and stone.covers(use):
            return
        if stone is not None and (stone.missed_by(use.peer) or (stone.requested and stone.is_raw)):
            self.remember(turn, number, stone, use)
            return
        self._graveyard.bury(
            number,
            Tombstone(
                cause,
                until=turn.now + self._settings.tombstone_s,
                requested=False,
                ended=merge(stone.ended if stone else {}, use),
                members=frozenset({use.peer}),
                prompts=frozenset({prompt_hash} - {""}),
            ),
        )

    def decline(self, turn: PrefillTurn, room: PrefillRoom, use: Use, cause: str) -> None:
        """Break a room because a decode rank takes no part in it; a later generation of that rank is another use."""
        if use.generation:
            room.declined.append(use)
        self.break_(turn, room, cause)

    def remember(self, turn: PrefillTurn, number: Room, stone: Tombstone, use: Use) -> None:
        """A decode rank's word came for a room that had failed before: its use is over too."""
        self._graveyard.bury(
            number,
            attrs.evolve(
                stone,
                until=max(stone.until, turn.now + self._settings.tombstone_s),
                ended=merge(stone.ended, use),
                members=stone.members | {use.peer},
            ),
        )

    def expire(self, turn: PrefillTurn) -> None:
        self._graveyard.expire(turn.now)
        for number in list(self._timers.due(turn.now)):
            room = self._live[number]
            self.break_(turn, room, _timeout_cause(room, self._settings))

    def lost(self, turn: PrefillTurn, gone: list[Session], why: str) -> None:
        """Break every room that counted on one of these sessions."""
        for session in gone:
            for room in self:
                offer = room.offers.get(session.id)
                if offer is not None and offer.session is session:
                    self.break_(turn, room, f"session {session.id} lost: {why}")

    def tell_failed(self, turn: PrefillTurn, identity: bytes, room: Room, generation: Generation, cause: str) -> None:
        if self._sessions.is_native(identity):
            turn.add(Send(identity, Failed(room, generation, cause)))
        else:
            turn.add(Send(identity, Status(room, StatusCode.FAILED, Rank(self._settings.prefill_rank))))

    # ---- states

    def _entered(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        match room.state:
            case PrefillState.OPENED:
                limit = self._settings.bootstrap_timeout_s
                if room.withdrawn:
                    limit = min(limit, self._settings.reoffer_s)
                self._timers.set(room.room, turn.now + limit)
            case PrefillState.WINDOWED:
                self._timers.set(room.room, turn.now + self._settings.waiting_timeout_s)
                self._enter_windowed(turn, room)
            case PrefillState.FAILING:
                self._bury(turn, room)
                self._enter_failing(turn, room)
                self.drain(turn, room)
            case PrefillState.SUCCEEDED:
                self._bury(turn, room)
                self._enter_succeeded(turn, room)
                self._ended(turn, room)
            case PrefillState.FAILED:
                self._ended(turn, room)
            case _:
                return

    def _bury(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        self._timers.drop(room.room)
        del self._live[room.room]
        uses = [*(offer.use for offer in room.offers.values()), *room.declined]
        gave_up = room.before.members if room.before and room.withdrawn else frozenset()
        stone = Tombstone(
            cause=room.cause,
            until=turn.now + self._settings.tombstone_s,
            requested=room.request is not None,
            ended=merge(room.ended, *uses),
            members=gave_up.union(use.peer for use in uses),
            prompts=frozenset(offer.prompt_hash for offer in room.offers.values() if offer.prompt_hash),
        )
        if any(is_legacy(offer.session.identity) for offer in room.offers.values()):
            # Its late words look like those of a new use: none may begin while they can come.
            stone = attrs.evolve(stone, until=turn.now + self._settings.bootstrap_timeout_s)
        self._graveyard.bury(room.room, stone)

    def _enter_windowed(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        assert room.request is not None, "only an opened room is windowed"
        manifest = next((o.manifest for o in room.offers.values() if o.manifest is not None), None)
        prefix_len, prompt_len = (manifest.prefix_len, manifest.prompt_len) if manifest else (0, 0)
        turn.add(Windowed(room.room, room.request.ticket, prefix_len, prompt_len, room.destinations))

    def _enter_failing(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        cause = room.cause or "unknown"
        for offer in room.offers.values():
            session = offer.session
            if self._sessions.knows(session.identity):
                self.tell_failed(turn, session.identity, room.room, offer.generation, cause)
            if room.pushes and offer.manifest is not None:
                turn.add(CancelPush(session.id, session.life, room.room, offer.generation))
        if room.request:
            turn.add(Fail(room.room, room.request.ticket, RoomFailed(room.room, cause, tuple(room.story))))
            self._draining[room.request.ticket] = room

    def _enter_succeeded(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        finish = room.finish
        assert finish is not None, "only a finished room succeeds"
        for offer in room.offers_by_rank():  # a rank that only joins the vote expects no word
            status = Status(
                room.room,
                StatusCode.SUCCESS,
                Rank(self._settings.prefill_rank),
                finish.first_token,
                finish.candidates,
                finish.cached_tokens,
                finish.logprob,
            )
            identity = offer.session.identity
            if self._sessions.is_native(identity):  # a status carries no generation: this names the one it is for
                turn.add(Send(identity, Window(room.room, offer.generation, "")))
            turn.add(Send(identity, status))
        turn.add(Succeed(room.room, finish.ticket))

    def _ended(self, turn: PrefillTurn, room: PrefillRoom) -> None:
        self.totals[room.state.value] += 1
        if room.request:
            self._draining.pop(room.request.ticket, None)
            turn.add(Release(room.room, room.request.ticket))


def _timeout_cause(room: PrefillRoom, settings: PrefillSettings) -> str:
    if room.state is PrefillState.EARLY:
        return f"no request came for this room in {settings.bootstrap_timeout_s:g} s"
    if room.state is PrefillState.OPENED:
        return room.withdrawn or f"not every decode rank offered blocks in {settings.bootstrap_timeout_s:g} s"
    return f"not finished in {settings.waiting_timeout_s:g} s"
