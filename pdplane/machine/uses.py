"""Uses of a room's number: their legal moves, which is new, live, late or over, and what is kept of ended ones."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import TypeAlias, TypeVar

import attrs

from pdplane.errors import LocalProtocolError, Why
from pdplane.ids import Generation, Life, Rank, Room, SessionId
from pdplane.kv.manifest import Manifest
from pdplane.machine.actions import DecodeTimers, DecodeTurn, Release
from pdplane.messages import Status, StatusCode

DecodeLife: TypeAlias = tuple[SessionId, Life]
"""One life of a decode rank; the life is empty for a peer without `hello`."""

_MAX_ENDED = 64  # decode ranks remembered for one room number


@attrs.frozen
class RankUse:
    """One decode rank's part in one use of a room number. Generations grow within a life of the decode rank."""

    peer: DecodeLife
    generation: Generation


@attrs.frozen
class Tombstone:
    """An ended room. `ended` holds the newest generation that is over, by decode rank.

    `requested` is False for offers that nobody asked for: such a room failed no caller. `members` are the decode
    ranks whose part in this use is over: they had offered blocks, had given it up, or were told that it failed.
    `prompts` are the hashes that they named.
    """

    why: Why | None  # None: it succeeded
    until: float
    requested: bool = True
    ended: Mapping[DecodeLife, Generation] = attrs.field(factory=dict)
    members: frozenset[DecodeLife] = frozenset()
    prompts: frozenset[str] = frozenset()

    def covers(self, use: RankUse) -> bool:
        """Return whether this use is over, or older than one that is."""
        return _is_over(self.ended, use)

    def awaits(self, prompt_hash: str | None) -> bool:
        """Return whether a request of this prompt may belong to this use, given up by decode before it came."""
        if not self.why or self.requested:
            return False
        return not (prompt_hash and self.prompts) or prompt_hash in self.prompts

    def missed_by(self, peer: DecodeLife) -> bool:
        """Return whether the room failed its caller before this decode rank had any part in it."""
        return self.requested and self.why is not None and peer not in self.members

    @property
    def is_raw(self) -> bool:
        """Whether a peer without generations took part: its late messages cannot be told from new ones."""
        return 0 in self.ended.values()


class Standing(enum.Enum):
    """Where a use of a room's number stands."""

    NEW = "new"  # it may begin, or join the live room
    LIVE = "live"  # the live room has it
    LATE = "late"  # it failed here before this decode rank had a part in it, which must be told
    OVER = "over"  # it ended here, or is older than one that did
    UNCLEAR = "unclear"  # after an end, and nobody can tell: no generation says whether it is that use or another one


@attrs.frozen
class Known:
    """What is known of one room's number.

    `live` holds the generations of the live room by decode rank, None without one; `ended` what it remembers as over.
    `requested` says whether a caller has asked for it. `stone` is left of the last use, for a short time.
    """

    live: Mapping[DecodeLife, Generation] | None = None
    requested: bool = False
    ended: Mapping[DecodeLife, Generation] = attrs.field(factory=dict)
    stone: Tombstone | None = None


def standing(known: Known, use: RankUse | None, *, fits: bool = True) -> Standing:
    """Return where a use stands: no other place decides it, on either role.

    `use` is the one that a peer's message names; None is a caller's request, which begins a use of its own. `fits` says
    whether its prompt can be that of the live room.

        room   use                                                                      standing
        live   its rank has this generation in the room                                 LIVE
        live   its rank has a newer one in the room, or the room remembers it as over   OVER
        live   its rank missed the last use, which failed; and its prompt does not fit  LATE
        live   any other: a rank that joins, or the next generation of one              NEW
        none   it has no generation, and a use has just ended                           UNCLEAR
        none   it has just ended, or a newer one of its rank has                        OVER
        none   its rank missed the last use, which failed                               LATE
        none   any other                                                                NEW
        live   a request, after another one                                             LIVE
        live   a request, the first one                                                 NEW
        none   a request, and a peer without generations had a part in the last one     UNCLEAR
        none   a request, otherwise                                                     NEW
    """
    stone = known.stone
    if known.live is not None:
        return _standing_beside(known, known.live, use, fits=fits)
    if stone is None:
        return Standing.NEW
    if use is None:
        return Standing.UNCLEAR if stone.requested and stone.is_raw else Standing.NEW
    if not use.generation:
        return Standing.UNCLEAR
    if stone.covers(use):
        return Standing.OVER
    return Standing.LATE if stone.missed_by(use.peer) else Standing.NEW


def _standing_beside(
    known: Known, live: Mapping[DecodeLife, Generation], use: RankUse | None, *, fits: bool
) -> Standing:
    if use is None:
        return Standing.LIVE if known.requested else Standing.NEW
    has = live.get(use.peer)
    if has == use.generation:
        return Standing.LIVE
    if (has is not None and use.generation < has) or _is_over(known.ended, use):
        return Standing.OVER
    missed = has is None and known.stone is not None and known.stone.missed_by(use.peer)
    return Standing.LATE if missed and not fits else Standing.NEW


def _is_over(ended: Mapping[DecodeLife, Generation], use: RankUse) -> bool:
    newest = ended.get(use.peer)
    return newest is not None and use.generation <= newest


def merge(ended: Mapping[DecodeLife, Generation], *uses: RankUse) -> dict[DecodeLife, Generation]:
    """Return `ended` with these uses added; the oldest entries go when there are too many."""
    merged = dict(ended)
    for use in uses:
        newest = max(merged.pop(use.peer, use.generation), use.generation)
        merged[use.peer] = newest
    while len(merged) > _MAX_ENDED:
        del merged[next(iter(merged))]
    return merged


TOMBSTONES = Room(-1)
"""The key of the deadline at which a machine forgets its oldest tombstones."""


@attrs.define
class Graveyard:
    """Ended rooms, for a limited time and in a limited number; the oldest go first.

    Most tombstones last equally long, so they expire in the order in which they were added. Those behind one that lasts
    longer stop counting in time, but are removed a little later.
    """

    capacity: int = 65536
    _stones: dict[Room, Tombstone] = attrs.field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self._stones)

    def bury(self, room: Room, stone: Tombstone) -> None:
        self._stones.pop(room, None)
        self._stones[room] = stone
        while len(self._stones) > self.capacity:
            del self._stones[next(iter(self._stones))]

    def find(self, room: Room, now: float) -> Tombstone | None:
        self.expire(now)
        stone = self._stones.get(room)
        return stone if stone is not None and stone.until > now else None

    def take(self, room: Room, now: float) -> Mapping[DecodeLife, Generation]:
        """Free the number for a new use; return the newest ended generation of each peer that has generations."""
        stone = self.find(room, now)
        self._stones.pop(room, None)
        return {peer: newest for peer, newest in stone.ended.items() if newest} if stone else {}

    def expire(self, now: float) -> None:
        while (until := self.earliest()) is not None and until <= now:
            del self._stones[next(iter(self._stones))]

    def earliest(self) -> float | None:
        return next(iter(self._stones.values())).until if self._stones else None


# ---- The life of a room on each role, as tables of legal moves.
#
# Guards are events of their own ("all offers are in" is counted first and then fed to the table),
# and actions follow from the state that is entered, never from the event that led there. Members are compared by
# identity, and hashed so: an enum's own hash is that of its name, in Python.


class PrefillState(enum.Enum):
    """Where a room stands on a prefill rank."""

    __hash__ = object.__hash__

    EARLY = "early"  # decode offered blocks or stands in line for them, no request came yet
    OPENED = "opened"  # the request is here, not every offer
    OFFERED = "offered"  # every offer is here: compute and push
    FINISHING = "finishing"  # all is pushed, not all of it acknowledged
    FAILING = "failing"  # failed, but a push may still be reading the source blocks
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class PrefillMove(enum.Enum):
    """What can move it."""

    __hash__ = object.__hash__

    REQUESTED = "requested"
    QUEUED = "queued"  # a decode rank stands in line for blocks
    OFFERED = "offered"
    COMPLETED = "completed"  # the last expected offer was counted
    PUSHED = "pushed"  # one push ended well
    FINISHED = "finished"
    DRAINED = "drained"  # no push is under way
    BROKEN = "broken"


P, PM = PrefillState, PrefillMove

PREFILL_TABLE: Mapping[tuple[PrefillState, PrefillMove], PrefillState] = {
    (P.EARLY, PM.QUEUED): P.EARLY,
    (P.EARLY, PM.OFFERED): P.EARLY,
    (P.EARLY, PM.REQUESTED): P.OPENED,
    (P.EARLY, PM.BROKEN): P.FAILING,
    (P.OPENED, PM.QUEUED): P.OPENED,
    (P.OPENED, PM.OFFERED): P.OPENED,
    (P.OPENED, PM.COMPLETED): P.OFFERED,
    (P.OPENED, PM.BROKEN): P.FAILING,
    (P.OFFERED, PM.PUSHED): P.OFFERED,
    (P.OFFERED, PM.FINISHED): P.FINISHING,
    (P.OFFERED, PM.BROKEN): P.FAILING,
    (P.FINISHING, PM.PUSHED): P.FINISHING,
    (P.FINISHING, PM.DRAINED): P.SUCCEEDED,
    (P.FINISHING, PM.BROKEN): P.FAILING,
    (P.FAILING, PM.PUSHED): P.FAILING,
    (P.FAILING, PM.BROKEN): P.FAILING,  # a second cause changes nothing
    (P.FAILING, PM.DRAINED): P.FAILED,
}


class DecodeState(enum.Enum):
    """Where a room stands on a decode rank."""

    __hash__ = object.__hash__

    QUEUED = "queued"  # it stands in line for blocks; the prefill is looked up, registered with and told
    RESOLVING = "resolving"  # it has blocks; the prefill is looked up and registered with
    WAITING = "waiting"  # blocks are offered and their window is open
    READY = "ready"
    FAILED = "failed"


class DecodeMove(enum.Enum):
    """What can move it."""

    __hash__ = object.__hash__

    FILLED = "filled"  # its place in line got blocks
    JOINED = "joined"  # every prefill rank that we need has registered us
    REPORTED = "reported"  # a status of an expected rank
    LANDED = "landed"  # bytes of an expected rank
    COMPLETED = "completed"  # every expected status and every expected byte
    BROKEN = "broken"


D, DM = DecodeState, DecodeMove

DECODE_TABLE: Mapping[tuple[DecodeState, DecodeMove], DecodeState] = {
    (D.QUEUED, DM.FILLED): D.RESOLVING,
    (D.QUEUED, DM.BROKEN): D.FAILED,
    (D.RESOLVING, DM.JOINED): D.WAITING,
    (D.RESOLVING, DM.BROKEN): D.FAILED,
    (D.WAITING, DM.REPORTED): D.WAITING,
    (D.WAITING, DM.LANDED): D.WAITING,
    (D.WAITING, DM.COMPLETED): D.READY,
    (D.WAITING, DM.BROKEN): D.FAILED,
}

State = TypeVar("State", bound=enum.Enum)
Move = TypeVar("Move", bound=enum.Enum)


def advance(table: Mapping[tuple[State, Move], State], state: State, move: Move) -> State:
    """Return the next state. Raises LocalProtocolError, which names the illegal move."""
    try:
        return table[state, move]
    except KeyError:
        raise LocalProtocolError(f"a room that is {state.value} cannot be {move.value}") from None


# ---- Blocks of failed rooms that somebody may still write to, because no fence stands before a one-sided write
#
# Only a prefill rank's Success means that its writes are over: legacy peers were seen to write after their Failed. So
# the blocks of a rank that failed or fell silent are kept for a time after its last status, which bounds the risk and
# does not remove it.


@attrs.define
class _Quarantined:
    ticket: int
    blocks: int
    until: dict[Rank, float]


class Quarantine:
    """Failed rooms whose blocks are held. Their numbers take no new use, since a status names only the number."""

    def __init__(self, timeout_s: float, timers: DecodeTimers) -> None:
        self._timeout_s, self._timers = timeout_s, timers
        self._held: dict[Room, _Quarantined] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: Room) -> bool:
        return number in self._held

    def counts(self) -> dict[str, int]:
        return {"rooms": len(self._held), "blocks": sum(held.blocks for held in self._held.values())}

    def hold(self, room: Room, ticket: int, manifest: Manifest, writers: Collection[Rank], now: float) -> None:
        """Hold a room's blocks until each of these prefill ranks reports Success or its time is over."""
        blocks = sum(len(group.block_ids) for group in manifest.groups)
        until = dict.fromkeys(writers, now + self._timeout_s)
        self._held[room] = _Quarantined(ticket, blocks, until)
        self._timers.set(room, now + self._timeout_s)

    def heard(self, turn: DecodeTurn, status: Status) -> bool:
        """Take a rank's status; return whether the room is in quarantine."""
        held = self._held.get(status.room)
        if held is None:
            return False
        if status.prefill_rank in held.until:
            if status.code is StatusCode.SUCCESS:
                del held.until[status.prefill_rank]
            else:
                held.until[status.prefill_rank] = turn.now + self._timeout_s
            self._timers.set(status.room, max(held.until.values(), default=turn.now))
        return True

    def release(self, turn: DecodeTurn, number: Room) -> None:
        """Release the blocks of a room whose last writer is no longer waited for."""
        turn.add(Release(number, self._held.pop(number).ticket))
