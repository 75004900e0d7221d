"""Pages cut from caches, and caches assembled from pages; numpy copies on the MLX thread."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from pdplane.engine.caches import Leaf
from pdplane.engine.layout import KV, STATE, carried, field_id
from pdplane.engine.prompts import Prefix
from pdplane.engine.thread import EngineThread, Turns
from pdplane.engine.untyped import Cache
from pdplane.engine.views import Buffer, Numbers, bits_later, bits_of, carrier, numbers_of
from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Arrivals
from pdplane.kv.layout import U64, Layout

Blocks = Mapping[GroupId, Sequence[int]]
Bits = Mapping[str, mx.array]
"""A leaf's tensors by name, as integers of their width."""

_RESERVE = 256  # tokens a sequence can grow before MLX has to copy its cache
_STEP = 256  # mlx-lm's caches grow by this many rows


@attrs.frozen
class _Run:
    """Blocks side by side: `count` pages from page index `page` (block id - 1) on, and slots from `slot` on."""

    slot: int
    page: int
    count: int


class Pages:
    """The arena seen as one array a field: shape (blocks, *field shape), without the null block."""

    history_group = KV
    has_snapshots = True
    """States are snapshots: the prompt's last chunk completes them, wherever it begins."""

    def __init__(self, layout: Layout, arena: Arena, leaves: Sequence[Leaf]) -> None:
        self._last = {group.group_id: group.page_count - 1 for group in layout.groups}
        self._views = {
            name: view_pages(layout, arena, name, tensor.dtype)
            for leaf in leaves
            for tensor in carried(leaf)
            for name in [field_id(leaf, tensor)]
        }

    def check(self, blocks: Blocks, needed: Mapping[GroupId, int]) -> None:
        """Raise ConfigError unless `blocks` are as many of each group as a prompt needs, all inside the arena."""
        for group_id, count in needed.items():
            ids = blocks.get(group_id, ())
            if len(ids) != count:
                raise ConfigError(f"the prompt needs {count} blocks of group {group_id!r}, not {len(ids)}")
            if any(not 1 <= block <= self._last[group_id] for block in ids):
                raise ConfigError(f"a block of group {group_id!r} lies outside 1..{self._last[group_id]}")

    def first_field(self, leaf: Leaf) -> FieldId:
        """Return one field of the leaf; all of its fields belong to one step of the layout."""
        return field_id(leaf, carried(leaf)[0])

    def bits(self, leaf: Leaf, cache: Cache) -> Bits:
        """Return the cache's tensors that have bytes, not computed yet."""
        tensors = leaf.kind.take(cache)
        return {tensor.name: bits_later(tensors[tensor.name]) for tensor in carried(leaf)}

    def cut(self, leaf: Leaf, cache: Cache, blocks: Blocks, rows: range) -> None:
        """Copy a cache into its blocks: of a history these rows (as in `cut_rows`), of a state all of it."""
        if leaf.kind.is_history:
            self.cut_history(leaf, self.bits(leaf, cache), blocks, rows)
        else:
            self._cut_state(leaf, cache, blocks, rows.stop)

    def cut_history(self, leaf: Leaf, bits: Bits, blocks: Blocks, rows: range) -> None:
        """Copy some rows of a history's tensors into its blocks, as in `cut_rows`, once they are computed."""
        for name, pages in self.history(leaf).items():
            cut_rows(numbers_of(bits[name])[0], pages, blocks[self.history_group], rows)

    def _cut_state(self, leaf: Leaf, cache: Cache, blocks: Blocks, length: int) -> None:
        """Copy a state as it is after `length` tokens."""
        del length  # a snapshot holds its own indices
        tensors = leaf.kind.take(cache)
        for tensor in carried(leaf):
            pages = self._views[field_id(leaf, tensor)]
            pages[blocks[STATE][0] - 1] = bits_of(tensors[tensor.name]).reshape(tensor.shape)

    def cut_passing(self, leaf: Leaf, cache: Cache, blocks: Blocks, tokens: range, length: int) -> None:
        """Copy what a state holds of the last `tokens` that it has seen and may lose before the prompt's end.

        A snapshot is whole at the end, so here nothing is.
        """

    def history(self, leaf: Leaf) -> Mapping[str, Numbers]:
        """Return pages of shape (blocks, heads, tokens, width) by tensor name."""
        return {tensor.name: self._views[field_id(leaf, tensor)] for tensor in carried(leaf)}

    def history_fields(self, leaf: Leaf) -> Mapping[FieldId, tuple[str, ...]]:
        """Return the fields of a history, and the tensors that lie in each of them."""
        return {field_id(leaf, tensor): (tensor.name,) for tensor in carried(leaf)}

    def assemble(self, leaf: Leaf, cache: Cache, blocks: Blocks, length: int) -> None:
        """Fill a fresh cache from its blocks; bytes beyond `length` tokens are never read.

        Raises ValueError when a state's own indices do not fit the length.
        """
        if not leaf.kind.is_history:
            self._assemble_state(leaf, cache, blocks, length)
            return
        ids = np.asarray(blocks[self.history_group], np.int64)
        buffers = reserve(leaf, length)
        for name, pages in self.history(leaf).items():
            join_rows(pages, buffers[name].view[0], ids, np.arange(len(ids)), length)
        give_history(leaf, cache, buffers, length)

    def _assemble_state(self, leaf: Leaf, cache: Cache, blocks: Blocks, length: int) -> None:
        tensors: dict[str, mx.array] = {}
        for tensor in leaf.tensors:
            buffer = Buffer(tensor.shape, tensor.dtype)
            if tensor in carried(leaf):
                buffer.view[...] = self._views[field_id(leaf, tensor)][blocks[STATE][0] - 1]
            tensors[tensor.name] = buffer.take()
        leaf.kind.give(cache, tensors, length)


def leaf_nbytes(leaf: Leaf, length: int) -> int:
    """Return the bytes of one cache at that many tokens, with the rows that it keeps in reserve."""
    rows = -(-length // _STEP) * _STEP if leaf.kind.is_history else 1
    return sum(rows * math.prod(tensor.shape) * tensor.dtype.size for tensor in leaf.tensors)


def reserve(leaf: Leaf, length: int) -> dict[str, Buffer]:
    """Return zeroed memory for a history of `length` tokens; without rows in reserve MLX would copy it at once."""
    return {
        tensor.name: Buffer((1, heads, -(-(length + _RESERVE) // _STEP) * _STEP, width), tensor.dtype)
        for tensor in leaf.tensors
        for heads, width in [tensor.shape]
    }


def give_history(leaf: Leaf, cache: Cache, buffers: Mapping[str, Buffer], length: int) -> None:
    """Give the filled buffers to a new cache."""
    leaf.kind.give(cache, {name: buffer.take() for name, buffer in buffers.items()}, length)


def cut_rows(source: Numbers, pages: Numbers, blocks: Sequence[int], rows: range) -> None:
    """Copy rows of (heads, rows, width) into pages (blocks, heads, tokens, width), whatever their strides.

    `rows` begin at a block's border and end at one, or at the prompt's end: then the rest of the page becomes zeros.
    """
    step = pages.shape[2]
    first, whole = rows.start // step, rows.stop // step
    ids = np.asarray(blocks[first:whole], np.int64)
    for run in _runs(ids, np.arange(first, whole)) if len(ids) else ():
        part = source[:, run.slot * step : (run.slot + run.count) * step]
        pages[run.page : run.page + run.count] = _paged(part, run.count).swapaxes(0, 1)
    if rest := rows.stop - whole * step:
        last = pages[blocks[whole] - 1]
        last[:, :rest] = source[:, whole * step : rows.stop]
        last[:, rest:] = 0


def join_rows(pages: Numbers, target: Numbers, ids: Numbers, slots: Numbers, length: int) -> None:
    """Copy pages back into rows, the reverse of `cut_rows`, for some slots, ascending; none beyond `length` rows."""
    step = pages.shape[2]
    whole = length // step
    for run in _runs(ids[slots], slots) if len(slots) else ():
        count = min(run.count, whole - run.slot)
        if count > 0:
            rows = target[:, run.slot * step : (run.slot + count) * step]
            _paged(rows, count)[...] = pages[run.page : run.page + count].swapaxes(0, 1)
        if count < run.count:  # the prompt ends inside its last block
            target[:, whole * step : length] = pages[ids[whole] - 1][:, : length - whole * step]


def view_pages(layout: Layout, arena: Arena, name: FieldId, dtype: mx.Dtype) -> Numbers:
    """Return all pages of a field but the null one, shape (blocks, *field shape), in the arena's memory."""
    field = layout.field(name)
    first = int(layout.page_offsets(field.field_id, np.array([1], dtype=np.uint64))[0])
    count = layout.group(field.group_id).page_count - 1
    inner = [field.element_bytes * math.prod(field.shape[axis + 1 :]) for axis in range(len(field.shape))]
    return np.ndarray(
        (count, *field.shape),
        dtype=carrier(dtype),
        buffer=arena.bytes,
        offset=first,
        strides=(field.page_stride_bytes, *inner),
    )


def _paged(rows: Numbers, count: int) -> Numbers:
    """Return a view of (heads, count * tokens, width) as (heads, count, tokens, width)."""
    heads, total, width = rows.shape
    by_head, by_row, by_element = rows.strides
    tokens = total // count
    strides = (by_head, tokens * by_row, by_row, by_element)
    return np.lib.stride_tricks.as_strided(rows, (heads, count, tokens, width), strides)


def _runs(ids: Numbers, slots: Numbers) -> Iterator[_Run]:
    """Yield runs of blocks that are neighbours by id and by slot."""
    starts = [0]
    if len(ids) > 1:
        starts += (np.flatnonzero((np.diff(ids) != 1) | (np.diff(slots) != 1)) + 1).tolist()
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield _Run(int(slots[start]), int(ids[start]) - 1, end - start)


# ---- A sequence's caches, filled page by page while the rest is still being written into the arena
#
# Pages that have landed are copied before the room's end, so that little is left to do then. The copies are work ahead
# only: no cache exists before `finish`, and a room that fails drops them. Transport threads report what has landed;
# every copy is made on the MLX thread, in turns that other sequences share.


_TURN_BYTES = 4 << 20  # about a millisecond of copying, between two tokens of other sequences


@attrs.define(eq=False)
class _Target:
    """One history: its memory, once it has any, and the slots that each tensor still lacks."""

    leaf: Leaf
    pages: Mapping[str, Numbers]
    lacks: dict[str, Numbers]
    buffers: dict[str, Buffer] | None = None


class Assembly:
    """One prompt's caches in the making. `landed` and `drop` may be called by any thread.

    With a `prefix` the blocks hold the tokens behind it; its own rows are copied at the end.
    """

    def __init__(
        self,
        thread: EngineThread,
        pages: Pages,
        layout: Layout,
        leaves: Sequence[Leaf],
        blocks: Blocks,
        length: int,
        ahead_bytes: int,
        prefix: Prefix | None = None,
    ) -> None:
        self._ahead_bytes = (
            ahead_bytes  # a prompt's last block is less, and a turn for it would only delay the room's end
        )
        self._thread, self._pages, self._layout, self._leaves = thread, pages, layout, leaves
        self._blocks, self._length, self._prefix = blocks, length, prefix
        self._done = prefix.tokens if prefix else 0
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
        """Copy the pages that these runs complete; they are final unless the room fails."""
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
        """Copy no more, since the room failed; harmless at any time."""
        with self._lock:
            self._over = True
            self._landed.clear()

    def finish(self, caches: list[Cache]) -> None:
        """Fill fresh caches, since every page is final. Once, on the MLX thread.

        Raises ValueError when a state's own indices do not fit the prompt.
        """
        self.drop()
        for target in self._targets:
            for name, lacks in target.lacks.items():
                if lacks.any():
                    self._copy(target, name, np.flatnonzero(lacks))
        self._join_prefix()
        for target in self._targets:
            buffers, target.buffers = self._buffers(target), None
            give_history(target.leaf, target.leaf.find(caches), buffers, self._length)
        for leaf in self._leaves:
            if not leaf.kind.is_history:
                self._pages.assemble(leaf, leaf.find(caches), self._blocks, self._length)

    def _join_prefix(self) -> None:
        if self._prefix is None:
            return
        for target, tensors in zip(self._targets, self._prefix.rows, strict=True):
            buffers = self._buffers(target)
            for name in target.lacks:
                buffers[name].view[0][:, : self._done] = bits_of(tensors[name])[0][:, : self._done]
        self._prefix.count()

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
        rows = self._buffers(target)[name].view[0][:, self._done :]
        join_rows(pages, rows, self._ids, slots, self._length - self._done)
        target.lacks[name][slots] = False
        return len(slots) * int(pages[0].nbytes)

    def _buffers(self, target: _Target) -> dict[str, Buffer]:
        if target.buffers is None:
            target.buffers = reserve(target.leaf, self._length)
        return target.buffers

    def _target(self, leaf: Leaf) -> _Target:
        pages = self._pages.history(leaf)
        return _Target(leaf, pages, {tensor.name: np.ones(len(self._ids), bool) for tensor in carried(leaf)})
