"""Deadlines by key: set, drop, ask which are due."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """At most one deadline a key; a dropped one costs nothing until it would have come due."""

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def set(self, key: Key, time: float) -> None:
        self._at[key] = time
        heapq.heappush(self._heap, (time, next(self._order), key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, next(self._order), kept) for kept, at in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        self._at.pop(key, None)

    def earliest(self) -> float | None:
        self._forget_stale()
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[Key]:
        """Yield each key whose time has come, and drop it."""
        while (earliest := self.earliest()) is not None and earliest <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._at[key]
            yield key

    def _forget_stale(self) -> None:
        while self._heap and self._at.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
