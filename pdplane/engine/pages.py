"""Cutting caches into pages of the arena, and assembling caches from them; numpy copies on the MLX thread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from pdplane.engine.caches import Leaf
from pdplane.engine.layout import KV, STATE, carried, field_id
from pdplane.engine.untyped import Cache
from pdplane.engine.views import Buffer, Numbers, bits_later, bits_of, carrier, numbers_of
from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Arena
from pdplane.kv.layout import Layout

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
        """A field of the leaf's; all of them belong to one step of the layout."""
        return field_id(leaf, carried(leaf)[0])

    def bits(self, leaf: Leaf, cache: Cache) -> Bits:
        """The cache's tensors that have bytes, not computed yet."""
        tensors = leaf.kind.take(cache)
        return {tensor.name: bits_later(tensors[tensor.name]) for tensor in carried(leaf)}

    def cut(self, leaf: Leaf, cache: Cache, blocks: Blocks, rows: range) -> None:
        """Copy a cache into its blocks: of a history these rows (as in `cut_rows`), of a state all of it."""
        if leaf.kind.is_history:
            self.cut_history(leaf, self.bits(leaf, cache), blocks, rows)
        else:
            self._cut_state(leaf, cache, blocks, rows.stop)

    def cut_history(self, leaf: Leaf, bits: Bits, blocks: Blocks, rows: range) -> None:
        """Copy some rows of a history's tensors into its blocks, as in `cut_rows`; waits until they are computed."""
        for name, pages in self.history(leaf).items():
            cut_rows(numbers_of(bits[name])[0], pages, blocks[self.history_group], rows)

    def _cut_state(self, leaf: Leaf, cache: Cache, blocks: Blocks, length: int) -> None:
        """Copy a state as it is after `length` tokens."""
        del length  # a snapshot holds its own indices
        tensors = leaf.kind.take(cache)
        for tensor in carried(leaf):
            pages = self._views[field_id(leaf, tensor)]
            pages[blocks[STATE][0] - 1] = bits_of(tensors[tensor.name]).reshape(tensor.shape)

    def history(self, leaf: Leaf) -> Mapping[str, Numbers]:
        """Pages of shape (blocks, heads, tokens, width) by tensor name."""
        return {tensor.name: self._views[field_id(leaf, tensor)] for tensor in carried(leaf)}

    def history_fields(self, leaf: Leaf) -> Mapping[FieldId, tuple[str, ...]]:
        """The fields of a history, and the tensors that lie in each of them."""
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


def reserve(leaf: Leaf, length: int) -> dict[str, Buffer]:
    """Zeroed memory for a history of `length` tokens, with rows in reserve: without them MLX copies it at once."""
    return {
        tensor.name: Buffer((1, heads, -(-(length + _RESERVE) // _STEP) * _STEP, width), tensor.dtype)
        for tensor in leaf.tensors
        for heads, width in [tensor.shape]
    }


def give_history(leaf: Leaf, cache: Cache, buffers: Mapping[str, Buffer], length: int) -> None:
    """Make the filled buffers a fresh cache's own."""
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
    """The way back of `cut_rows` for some slots, ascending, of the blocks `ids`; nothing beyond `length` rows."""
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
    """All pages of a field but the null one, shape (blocks, *field shape), in the arena's memory."""
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
    """(heads, count * tokens, width) as (heads, count, tokens, width), sharing memory."""
    heads, total, width = rows.shape
    by_head, by_row, by_element = rows.strides
    tokens = total // count
    strides = (by_head, tokens * by_row, by_row, by_element)
    return np.lib.stride_tricks.as_strided(rows, (heads, count, tokens, width), strides)


def _runs(ids: Numbers, slots: Numbers) -> Iterator[_Run]:
    """Neighbours by id and by slot together."""
    starts = [0]
    if len(ids) > 1:
        starts += (np.flatnonzero((np.diff(ids) != 1) | (np.diff(slots) != 1)) + 1).tolist()
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        yield _Run(int(slots[start]), int(ids[start]) - 1, end - start)
