"""Uses of a room's number: which is new, live, late or over, and what is remembered of those that ended."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeAlias

import attrs

from pdplane.errors import Why
from pdplane.ids import Generation, Life, Room, SessionId

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
