"""A node's blocks: whoever cannot have them now waits in line, nobody overtakes, nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeAlias

import attrs

from pdplane.control.http_thread import HttpThread
from pdplane.errors import ConfigError, PoolExhausted
from pdplane.ids import GroupId
from pdplane.kv.layout import Layout
from pdplane.kv.pool import Pool

Blocks: TypeAlias = Mapping[GroupId, tuple[int, ...]]


@attrs.define(eq=False)
class Place:
    """One place in the line."""

    counts: Mapping[GroupId, int]
    then: Callable[[Blocks | PoolExhausted], None]
    expiry: Future[None] | None = None


class BlockQueue:
    """First come, first served over one pool.

    A large request at the head waits until enough is free, and those behind it wait too: so it is served in the
    end, and so are they. Whoever takes a place out of the line, under the lock, decides how it ends.
    """

    def __init__(self, layout: Layout, http: HttpThread, *, timeout_s: float, max_waiting: int) -> None:
        self._pool, self._http = Pool(layout), http
        self._timeout_s, self._max_waiting = timeout_s, max_waiting
        self._lock = threading.Lock()
        self._line: deque[Place] = deque()

    def check(self, counts: Mapping[GroupId, int]) -> None:
        """Raise ConfigError for what an empty pool could not serve."""
        if not self._pool.fits(counts):
            raise ConfigError(f"the prompt needs {sum(counts.values())} blocks, more than the arena can hold")

    def acquire(self, counts: Mapping[GroupId, int], then: Callable[[Blocks | PoolExhausted], None]) -> Place:
        """Call `then` once, here or later on another thread, with the blocks or with PoolExhausted (waited too long).

        Raises ConfigError for what can never fit and PoolExhausted when the line is full.
        """
        self.check(counts)
        place = Place(counts, then)
        with self._lock:
            if len(self._line) >= self._max_waiting:
                raise PoolExhausted(sum(counts.values()), self._pool.free_parents)
            self._line.append(place)
        self._serve()
        if self._has(place):
            place.expiry = self._http.run(self._expire(place))
            if not self._has(place):  # served meanwhile, by somebody who saw nothing to cancel
                place.expiry.cancel()
        return place

    def leave(self, place: Place) -> bool:
        """Give the place up, `then` is not called; False when the place has ended already."""
        left = self._take_out(place)
        if left:
            self._serve()  # it may have been the head that the others waited behind
        return left

    def release(self, blocks: Blocks) -> None:
        """Give blocks back; serves who waits, on this thread."""
        self._pool.release(blocks)
        self._serve()

    def counts(self) -> dict[str, int]:
        return {
            "free_parents": self._pool.free_parents,
            "used_blocks": sum(self._pool.used_blocks().values()),
            "waiting": len(self._line),
        }

    def _has(self, place: Place) -> bool:
        with self._lock:
            return place in self._line

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    return
                place = self._line[0]
                try:
                    blocks = self._pool.allocate(place.counts)
                except PoolExhausted:
                    return
                self._line.popleft()
            if place.expiry is not None:
                place.expiry.cancel()
            place.then(blocks)

    async def _expire(self, place: Place) -> None:
        await asyncio.sleep(self._timeout_s)
        if self._take_out(place):
            place.then(PoolExhausted(sum(place.counts.values()), self._pool.free_parents))
            self._serve()

    def _take_out(self, place: Place) -> bool:
        with self._lock:
            if place not in self._line:
                return False
            self._line.remove(place)
        if place.expiry is not None:
            place.expiry.cancel()
        return True
