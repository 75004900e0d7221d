"""A sequence's caches on their way out of the arena: filled page by page while the rest is still being written.

Whatever has landed is copied ahead of the room's end, so that little is left to do then. The copies are work ahead
only: no cache exists before `finish`, and a room that fails drops them. Transport threads say what has landed; every
copy is made on the MLX thread, in turns that other sequences share.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from pdplane.engine.caches import Leaf
from pdplane.engine.layout import carried
from pdplane.engine.pages import Blocks, Pages, give_history, join_rows, reserve
from pdplane.engine.thread import EngineThread, Turns
from pdplane.engine.untyped import Cache
from pdplane.engine.views import Buffer, Numbers
from pdplane.kv.arrays import U64
from pdplane.kv.arrivals import Arrivals
from pdplane.kv.layout import Layout

_TURN_BYTES = 4 << 20  # about a millisecond of copying, between two tokens of other sequences


@attrs.define(eq=False)
class _Target:
    """One history: its memory, once it has any, and the slots that each tensor still lacks."""

    leaf: Leaf
    pages: Mapping[str, Numbers]
    lacks: dict[str, Numbers]
    buffers: dict[str, Buffer] | None = None


class Assembly:
    """One prompt's caches in the making. `landed` and `drop` may be called by any thread."""

    def __init__(
        self,
        thread: EngineThread,
        pages: Pages,
        layout: Layout,
        leaves: Sequence[Leaf],
        blocks: Blocks,
        length: int,
        ahead_bytes: int,
    ) -> None:
        self._ahead_bytes = ahead_bytes  # a prompt's last block is less: a turn for it would only delay the room's end
        self._thread, self._pages, self._layout, self._leaves = thread, pages, layout, leaves
        self._blocks, self._length = blocks, length
        self._ids = np.asarray(blocks.get(pages.history_group, ()), np.int64)
        self._targets = [self._target(leaf) for leaf in leaves if leaf.kind.is_history]
        self._places = {
            name: (target, tensors)
            for target in self._targets
            if carried(target.leaf)
            for name, tensors in pages.history_fields(target.leaf).items()
        }
        self._arrivals: Arrivals | None = None  # made on the MLX thread: a long prompt has a million pages
        self._lock = threading.Lock()
        self._landed: list[tuple[U64, U64]] = []
        self._landed_bytes = 0
        self._busy = self._over = False

    def landed(self, offsets: U64, lengths: U64) -> None:
        """These runs of the arena are final, unless the room fails: copy the pages that they complete."""
        with self._lock:
            if self._over:
                return
            self._landed.append((offsets, lengths))
            self._landed_bytes += int(lengths.sum())
            if self._busy or self._landed_bytes < self._ahead_bytes:
                return
            self._busy = True
        self._thread.submit(self._turns)

    def drop(self) -> None:
        """The room failed: copy no more; harmless at any time."""
        with self._lock:
            self._over = True
            self._landed.clear()

    def finish(self, caches: list[Cache]) -> None:
        """Every page is final: fill fresh caches with all of it. Once, on the MLX thread.

        Raises ValueError when a state's own indices do not fit the prompt.
        """
        self.drop()
        for target in self._targets:
            for name, lacks in target.lacks.items():
                if lacks.any():
                    self._copy(target, name, np.flatnonzero(lacks))
            buffers, target.buffers = self._buffers(target), None
            give_history(target.leaf, target.leaf.find(caches), buffers, self._length)
        for leaf in self._leaves:
            if not leaf.kind.is_history:
                self._pages.assemble(leaf, leaf.find(caches), self._blocks, self._length)

    def _turns(self) -> Turns[None]:
        nbytes = 0
        while landed := self._take():
            offsets, lengths = (np.concatenate(column) for column in zip(*landed, strict=True))
            for target, name, slots in self._completed(offsets, lengths):
                if self._over:
                    return
                nbytes += self._copy(target, name, slots)
                if nbytes > _TURN_BYTES:
                    nbytes = 0
                    yield

    def _take(self) -> list[tuple[U64, U64]]:
        with self._lock:
            self._busy = self._landed_bytes >= self._ahead_bytes and not self._over
            if not self._busy:
                return []
            landed, self._landed, self._landed_bytes = self._landed, [], 0
            return landed

    def _completed(self, offsets: U64, lengths: U64) -> Iterator[tuple[_Target, str, Numbers]]:
        if self._arrivals is None:
            self._arrivals = Arrivals(self._layout, list(self._places), self._ids.tolist())
        for field, slots in self._arrivals.add(offsets, lengths):
            target, names = self._places[field]
            yield from ((target, name, slots) for name in names)

    def _copy(self, target: _Target, name: str, slots: Numbers) -> int:
        pages = target.pages[name]
        join_rows(pages, self._buffers(target)[name].view[0], self._ids, slots, self._length)
        target.lacks[name][slots] = False
        return len(slots) * int(pages[0].nbytes)

    def _buffers(self, target: _Target) -> dict[str, Buffer]:
        if target.buffers is None:
            target.buffers = reserve(target.leaf, self._length)
        return target.buffers

    def _target(self, leaf: Leaf) -> _Target:
        pages = self._pages.history(leaf)
        return _Target(leaf, pages, {tensor.name: np.ones(len(self._ids), bool) for tensor in carried(leaf)})
