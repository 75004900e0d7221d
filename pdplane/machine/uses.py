"""What is remembered of ended rooms, so that late messages are told from unknown ones and revive nothing."""

from __future__ import annotations

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
        return is_over(self.ended, use)

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


def is_over(ended: Mapping[DecodeLife, Generation], use: RankUse) -> bool:
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
