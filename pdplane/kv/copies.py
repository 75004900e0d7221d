"""Who feeds whom, and which bytes go where."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import FieldId, GroupId, Rank, Room
from pdplane.kv.layout import FEW, Field, Layout, Partition, compare_layouts
from pdplane.kv.layout import U64 as U64
from pdplane.kv.manifest import Manifest

MAX_TP = 1024

_Cut: TypeAlias = tuple[int, int] | None
"""Shards on prefill and on decode; None when every rank holds the whole. It alone decides who feeds whom."""


@attrs.frozen
class Fragment:
    """A slice of every page of a field: `rows` runs of `row_bytes`, at offsets and strides in bytes inside the page."""

    group_id: GroupId
    field_id: FieldId
    source_offset: int
    destination_offset: int
    source_stride: int
    destination_stride: int
    row_bytes: int
    rows: int


@attrs.frozen(cache_hash=True)
class RankRoute:
    """What one prefill rank sends to one decode rank.

    `decode_ranks` are all decode ranks that this prefill rank waits for in a room: those that it serves, or
    rank 0 alone when it serves nobody (`dummy`) and only takes part in the agreement.
    """

    prefill_tp: int
    prefill_rank: Rank
    decode_tp: int
    decode_rank: Rank
    fragments: tuple[Fragment, ...]
    decode_ranks: tuple[Rank, ...]
    dummy: bool = False


@attrs.frozen
class _Shape:
    """What decides a field's fragments; many fields share one."""

    source: tuple[int, ...]
    destination: tuple[int, ...]
    element_bytes: int
    partition: Partition | None

    @property
    def cut(self) -> _Cut:
        if self.partition is None:
            return None
        extent, axis = self.partition.global_extent, self.partition.axis
        return extent // self.source[axis], extent // self.destination[axis]


@attrs.frozen
class _Slice:
    """Fragment numbers without a field's name."""

    source_offset: int
    destination_offset: int
    source_stride: int
    destination_stride: int
    row_bytes: int
    rows: int


def dp_group(room: Room, dp_size: int) -> int:
    """Return the data-parallel group of prefill that serves a room."""
    return room % dp_size


def plan_route(
    prefill_layout: Layout,
    decode_layout: Layout,
    prefill_tp: int,
    prefill_rank: int,
    decode_tp: int,
    decode_rank: int,
) -> RankRoute:
    """Return what `prefill_rank` sends to `decode_rank`.

    With equal tp each rank sends whole pages to its namesake. Raises LayoutMismatch (ours is prefill's) or
    WireError: sizes out of range, shards that the ranks cannot hold, or a decode rank to which this prefill rank
    sends nothing.
    """
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    _check_rank(prefill_rank, prefill_tp, "prefill_rank")
    _check_rank(decode_rank, decode_tp, "decode_rank")
    served = _served(_cuts(prefill_layout, decode_layout), prefill_tp, prefill_rank, decode_tp)
    dummy = not served
    if decode_rank not in (served or (0,)):
        raise WireError("decode_rank", "CachePD Decode registration targets the wrong Prefill TP rank")
    fragments = tuple(
        Fragment(field.group_id, field.field_id, *attrs.astuple(piece))
        for field, shape in _shapes(prefill_layout, decode_layout)
        for piece in _slices(shape, prefill_tp, prefill_rank, decode_tp, decode_rank)
    )
    return RankRoute(
        prefill_tp,
        Rank(prefill_rank),
        decode_tp,
        Rank(decode_rank),
        fragments,
        served or (Rank(0),),
        dummy,
    )


def expected_prefill_ranks(
    prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int, decode_rank: int
) -> tuple[Rank, ...]:
    """Return the prefill ranks that send to `decode_rank`, ascending: those whose Success it waits for."""
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    _check_rank(decode_rank, decode_tp, "decode_rank")
    return _feeders(_cuts(prefill_layout, decode_layout), prefill_tp, decode_tp, decode_rank)


def decode_ranks_served(
    prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, prefill_rank: int, decode_tp: int
) -> tuple[Rank, ...]:
    """Return the decode ranks that `prefill_rank` sends to, ascending."""
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    return _served(_cuts(prefill_layout, decode_layout), prefill_tp, prefill_rank, decode_tp)


def dummy_ranks(prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int) -> tuple[Rank, ...]:
    """Return the prefill ranks that send to nobody, ascending; only decode rank 0 contacts them."""
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    return _dummies(_cuts(prefill_layout, decode_layout), prefill_tp, decode_tp)


def contact_order(
    prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int, decode_rank: int
) -> tuple[Rank, ...]:
    """Return the prefill ranks that `decode_rank` registers with, ascending: its feeders, for rank 0 dummies too."""
    feeders = expected_prefill_ranks(prefill_layout, decode_layout, prefill_tp, decode_tp, decode_rank)
    if decode_rank != 0:
        return feeders
    return tuple(sorted({*feeders, *_dummies(_cuts(prefill_layout, decode_layout), prefill_tp, decode_tp)}))


def _check_pair(prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int) -> None:
    for name, size in (("prefill_tp_size", prefill_tp), ("decode_tp_size", decode_tp)):
        if not 1 <= size <= MAX_TP:
            raise WireError(name, f"{name} must be 1..{MAX_TP}, not {size}")
    compare_layouts(prefill_layout, decode_layout)
    for field, shape in _shapes(prefill_layout, decode_layout):
        if prefill_tp == decode_tp:
            if shape.source != shape.destination:
                raise WireError(
                    f"{field.field_id}.shape",
                    f"{field.field_id} has the shape {shape.source} on prefill and {shape.destination} on decode, "
                    f"at the same tp {prefill_tp}",
                )
        elif shape.partition is not None:
            _check_shards(field, shape.partition, shape.source, prefill_tp)
            _check_shards(field, shape.partition, shape.destination, decode_tp)


def _check_shards(field: Field, partition: Partition, shape: tuple[int, ...], tp: int) -> None:
    shards = partition.global_extent // shape[partition.axis]
    if shards > tp or tp % shards:
        raise WireError(
            f"{field.field_id}.partition",
            f"{field.field_id}: global extent {partition.global_extent} and local extent "
            f"{shape[partition.axis]} cannot be mapped to tp {tp}",
        )


def _check_rank(rank: int, tp: int, name: str) -> None:
    if not 0 <= rank < tp:
        raise WireError(name, f"{name} must be 0..{tp - 1}, not {rank}")


def _shapes(prefill_layout: Layout, decode_layout: Layout) -> Iterator[tuple[Field, _Shape]]:
    """Yield every field with what decides its slices; groups in spec order, their fields in string order."""
    for spec in prefill_layout.group_specs:
        for field in prefill_layout.fields_of(spec.group_id):
            destination = decode_layout.field(field.field_id).shape
            partition = prefill_layout.partition(field.field_id)
            yield field, _Shape(field.shape, destination, field.element_bytes, partition)


def _cuts(prefill_layout: Layout, decode_layout: Layout) -> frozenset[_Cut]:
    return frozenset(shape.cut for _, shape in _shapes(prefill_layout, decode_layout))


def _served(cuts: frozenset[_Cut], prefill_tp: int, prefill_rank: int, decode_tp: int) -> tuple[Rank, ...]:
    return tuple(Rank(rank) for rank in range(decode_tp) if prefill_rank in _feeders(cuts, prefill_tp, decode_tp, rank))


def _dummies(cuts: frozenset[_Cut], prefill_tp: int, decode_tp: int) -> tuple[Rank, ...]:
    busy = {rank for decode_rank in range(decode_tp) for rank in _feeders(cuts, prefill_tp, decode_tp, decode_rank)}
    return tuple(Rank(rank) for rank in range(prefill_tp) if rank not in busy)


@lru_cache(maxsize=4096)
def _feeders(cuts: frozenset[_Cut], prefill_tp: int, decode_tp: int, decode_rank: int) -> tuple[Rank, ...]:
    if prefill_tp == decode_tp:
        return (Rank(decode_rank),)
    found: set[int] = set()
    for cut in cuts:
        if cut is None:
            found.add(decode_rank * prefill_tp // decode_tp)
        else:
            found.update(_shard_feeders(*cut, prefill_tp, decode_tp, decode_rank))
    return tuple(Rank(rank) for rank in sorted(found))


def _shard_feeders(prefill_shards: int, decode_shards: int, prefill_tp: int, decode_tp: int, decode_rank: int) -> range:
    """Return the representatives of those prefill shards that overlap decode's shard.

    Every part is cut in the same ratio.
    """
    shard = decode_rank // (decode_tp // decode_shards)
    first = shard * prefill_shards // decode_shards
    stop = -(-(shard + 1) * prefill_shards // decode_shards)
    replicas = prefill_tp // prefill_shards
    return range(first * replicas, stop * replicas, replicas)


@lru_cache(maxsize=4096)
def _slices(shape: _Shape, prefill_tp: int, prefill_rank: int, decode_tp: int, decode_rank: int) -> tuple[_Slice, ...]:
    partition, cut = shape.partition, shape.cut
    if prefill_rank not in _feeders(frozenset((cut,)), prefill_tp, decode_tp, decode_rank):
        return ()
    if prefill_tp == decode_tp or partition is None or cut is None:
        whole = math.prod(shape.source) * shape.element_bytes
        return (_Slice(0, 0, whole, whole, whole, 1),)
    shards = (prefill_rank * cut[0] // prefill_tp, decode_rank * cut[1] // decode_tp)
    inner = math.prod(shape.source[partition.axis + 1 :]) * shape.element_bytes
    rows = math.prod(shape.source[: partition.axis])
    source_stride = shape.source[partition.axis] * inner
    destination_stride = shape.destination[partition.axis] * inner
    found = []
    for source_at, destination_at, width in _overlaps(partition, cut, shards):
        row_bytes, offsets = width * inner, (source_at * inner, destination_at * inner)
        if rows > 1 and source_stride == destination_stride == row_bytes:
            whole = rows * row_bytes  # the rows touch on both sides
            found.append(_Slice(*offsets, whole, whole, whole, 1))
        else:
            found.append(_Slice(*offsets, source_stride, destination_stride, row_bytes, rows))
    return tuple(found)


def _overlaps(partition: Partition, cut: tuple[int, int], shards: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield source start, destination start and width, in elements of the axis, of each part that both sides hold."""
    source_base = destination_base = 0
    for part in partition.global_parts or (partition.global_extent,):
        source_width, destination_width = part // cut[0], part // cut[1]
        source_start, destination_start = shards[0] * source_width, shards[1] * destination_width
        start = max(source_start, destination_start)
        width = min(source_start + source_width, destination_start + destination_width) - start
        if width > 0:
            yield source_base + start - source_start, destination_base + start - destination_start, width
        source_base += source_width
        destination_base += destination_width


# ---- Which bytes go where: numpy u64 arrays, one row a run of bytes
#
# Offsets are relative to each side's arena. No Python loop runs over blocks or rows: one turn a fragment, that
# is one a field in the usual case.


@attrs.frozen(eq=False)
class Copies:
    """`length[i]` bytes from source offset `source[i]` to destination offset `destination[i]`, each in its arena."""

    source: U64
    destination: U64
    length: U64

    @cached_property
    def nbytes(self) -> int:
        return sum(self.length.tolist()) if len(self.length) <= FEW else int(self.length.sum())


def plan_copies(
    route: RankRoute,
    source_layout: Layout,
    source_blocks: Mapping[GroupId, Sequence[int]],
    destination_layout: Layout,
    manifest: Manifest,
    fields: Collection[FieldId] | None = None,
) -> Copies:
    """Return the copies of one prefill rank into one decode rank's blocks, sorted by one side, neighbours merged.

    `source_blocks` are prefill's blocks for the manifest's slots, same count and order; `fields` limits the
    copies to some fields (a step). The manifest is trusted: validate it first.
    """
    return plan_block_copies(route, source_layout, source_blocks, destination_layout, manifest.blocks(), fields)


def plan_block_copies(
    route: RankRoute,
    source_layout: Layout,
    source_blocks: Mapping[GroupId, Sequence[int]],
    destination_layout: Layout,
    destination_blocks: Mapping[GroupId, Sequence[int]],
    fields: Collection[FieldId] | None = None,
) -> Copies:
    """Return the copies between any two equally long lists of blocks, such as those of a chunk; see plan_copies."""
    found: list[tuple[U64, U64, U64]] = []
    wanted = None if fields is None else frozenset(fields)
    for group_id, pages in _pages_of(route, source_layout, destination_layout, wanted):
        if (theirs := destination_blocks.get(group_id)) is not None:
            ours = source_blocks.get(group_id, ())
            if len(ours) != len(theirs):
                raise LocalProtocolError(
                    f"group {group_id!r}: {len(ours)} source blocks for {len(theirs)} of the manifest"
                )
            found.append(pages.between(_ids(ours, source_layout, group_id), _ids(theirs)))
    if not found:
        return Copies(*(np.empty(0, np.uint64) for _ in range(3)))
    columns = found[0] if len(found) == 1 else (np.concatenate(column) for column in zip(*found, strict=True))
    return merged_copies(*columns)


@attrs.frozen(eq=False)
class _PagePairs:
    """The runs of one group's pages on both sides, as columns: offsets in block 0, strides to the next block."""

    source: U64
    source_stride: U64
    destination: U64
    destination_stride: U64
    length: U64

    def between(self, source_ids: U64, destination_ids: U64) -> tuple[U64, U64, U64]:
        """Return offsets on both sides and lengths for pairs of blocks."""
        source = self.source + self.source_stride * source_ids
        destination = self.destination + self.destination_stride * destination_ids
        return source.ravel(), destination.ravel(), np.broadcast_to(self.length, source.shape).ravel()


@lru_cache(maxsize=256)
def _pages_of(
    route: RankRoute, source_layout: Layout, destination_layout: Layout, fields: frozenset[FieldId] | None
) -> tuple[tuple[GroupId, _PagePairs], ...]:
    """Return what all rooms between two ranks have in common: each group's runs for any block."""
    found: dict[GroupId, list[tuple[U64, ...]]] = {}
    for fragment in route.fragments:
        if fields is None or fragment.field_id in fields:
            columns = _columns(fragment, source_layout, destination_layout)
            found.setdefault(fragment.group_id, []).append(columns)
    return tuple(
        (group_id, _PagePairs(*(np.concatenate(column)[:, None] for column in zip(*parts, strict=True))))
        for group_id, parts in found.items()
    )


def _columns(fragment: Fragment, source_layout: Layout, destination_layout: Layout) -> tuple[U64, ...]:
    """Return the five columns of one fragment's rows."""
    ours, theirs = source_layout.field(fragment.field_id), destination_layout.field(fragment.field_id)
    rows = np.arange(fragment.rows, dtype=np.uint64)
    source = (source_layout.null_page(ours) + fragment.source_offset) % 2**64
    destination = (destination_layout.null_page(theirs) + fragment.destination_offset) % 2**64
    same = (ours.page_stride_bytes, theirs.page_stride_bytes, fragment.row_bytes)
    source_stride, destination_stride, length = (np.full(fragment.rows, number, np.uint64) for number in same)
    return (
        rows * np.uint64(fragment.source_stride) + np.uint64(source),
        source_stride,
        rows * np.uint64(fragment.destination_stride) + np.uint64(destination),
        destination_stride,
        length,
    )


def expected_bytes(destination_layout: Layout, manifest: Manifest, route: RankRoute) -> int:
    """Return how many bytes the route's prefill rank must land in decode's arena for this manifest."""
    counts = {group.group_id: len(group.block_ids) for group in manifest.groups}
    return sum(fragment.rows * fragment.row_bytes * counts.get(fragment.group_id, 0) for fragment in route.fragments)


def window_runs(layout: Layout, manifest: Manifest) -> tuple[U64, U64]:
    """Return offsets and lengths of the runs in decode's arena that the manifest opens: sorted, disjoint, merged."""
    starts, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for group_id, blocks in manifest.blocks().items():
        null_page, stride, nbytes = _windows_of(layout, group_id)
        start = (null_page + stride * _ids(blocks)).ravel()
        starts.append(start)
        lengths.append(np.broadcast_to(nbytes, (len(nbytes), len(blocks))).ravel())
    start, end = united_runs(np.concatenate(starts), np.concatenate(lengths))
    return start, end - start


@lru_cache(maxsize=256)
def _windows_of(layout: Layout, group_id: GroupId) -> tuple[U64, U64, U64]:
    """Return the group's pages of block 0, their strides and their bytes, as columns."""
    rows = [
        (layout.null_page(field), field.page_stride_bytes, field.payload_bytes) for field in layout.fields_of(group_id)
    ]
    pages, strides, nbytes = np.array(rows, np.uint64).reshape(-1, 3).T[:, :, None].copy()
    return pages, strides, nbytes


def united_runs(offsets: U64, lengths: U64) -> tuple[U64, U64]:
    """Return starts and ends of the runs' union, ascending and apart; groups of a careless peer may overlap."""
    if len(offsets) <= FEW:
        return _united_few(offsets.tolist(), lengths.tolist())
    order = np.argsort(offsets, kind="stable")
    start, end = offsets[order], np.maximum.accumulate(offsets[order] + lengths[order])
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last]


def _united_few(offsets: list[int], lengths: list[int]) -> tuple[U64, U64]:
    starts: list[int] = []
    ends: list[int] = []
    for start, length in sorted(zip(offsets, lengths, strict=True)):
        if ends and start <= ends[-1]:
            ends[-1] = max(ends[-1], start + length)
        else:
            starts.append(start)
            ends.append(start + length)
    return np.array(starts, np.uint64), np.array(ends, np.uint64)


def _ids(blocks: Sequence[int], layout: Layout | None = None, group_id: GroupId | None = None) -> U64:
    if layout is not None and group_id is not None and len(blocks):
        count = layout.group(group_id).page_count
        if min(blocks) < 1 or max(blocks) >= count:
            raise LocalProtocolError(f"group {group_id!r}: a source block is outside 1..{count - 1}")
    return np.asarray(blocks, dtype=np.uint64)


def merged_copies(source: U64, destination: U64, length: U64) -> Copies:
    """Sort by the side that leaves fewer runs on both sides together, and join what touches on both.

    A run on either side is an entry of a system call, which costs the kernel as much as some kilobytes: with
    4 KiB blocks in one piece at the source, reading them in its order halves the work of a pull. Where
    destinations overlap, the order is theirs, and of two copies to one place the later stays the later.
    """
    if len(length) <= FEW:
        return _merged_few(list(zip(source.tolist(), destination.tolist(), length.tolist(), strict=True)))
    copies, other = (_sorted(side, source, destination, length) for side in (destination, source))
    overlapping = bool((copies.destination[:-1] + copies.length[:-1] > copies.destination[1:]).any())
    if not overlapping and _runs(other) <= _runs(copies):
        copies = other
    apart = _apart(copies.source, copies.length) | _apart(copies.destination, copies.length)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Copies(copies.source[first], copies.destination[first], np.add.reduceat(copies.length, first))


def _merged_few(rows: list[tuple[int, int, int]]) -> Copies:
    """Return the same as `merged_copies`, computed on lists."""
    copies, other = sorted(rows, key=itemgetter(1)), sorted(rows, key=itemgetter(0))
    overlapping = any(one[1] + one[2] > next_one[1] for one, next_one in pairwise(copies))
    if not overlapping and _breaks(other) <= _breaks(copies):
        copies = other
    joined: list[list[int]] = []
    for source, destination, length in copies:
        last = joined[-1] if joined else None
        if last and last[0] + last[2] == source and last[1] + last[2] == destination:
            last[2] += length
        else:
            joined.append([source, destination, length])
    return Copies(*np.array(joined, np.uint64).reshape(-1, 3).T.copy())


def _breaks(rows: list[tuple[int, int, int]]) -> int:
    return sum((one[0] + one[2] != next_one[0]) + (one[1] + one[2] != next_one[1]) for one, next_one in pairwise(rows))


def _sorted(side: U64, source: U64, destination: U64, length: U64) -> Copies:
    order = np.argsort(side, kind="stable")
    return Copies(source[order], destination[order], length[order])


def _runs(copies: Copies) -> int:
    return sum(int(_apart(start, copies.length).sum()) for start in (copies.source, copies.destination))


def _apart(start: U64, length: U64) -> npt.NDArray[np.bool_]:
    """Return, for each run but the first, whether there is a gap between it and the run before."""
    apart: npt.NDArray[np.bool_] = start[:-1] + length[:-1] != start[1:]
    return apart


# ---- Which pages of a room are whole already, found from the runs of bytes that have landed


Slots = npt.NDArray[np.int64]
"""Positions in a list of blocks, ascending."""


class Arrivals:
    """The pages of some fields of one group in some blocks; not thread-safe.

    Runs may cover several pages or a part of one (several prefill ranks fill a page together). Each byte is expected
    once, as the fence counts it; memory is 40 bytes a page.
    """

    def __init__(self, layout: Layout, fields: Sequence[FieldId], blocks: Sequence[int]) -> None:
        ids = np.asarray(blocks, np.uint64)
        starts = [layout.page_offsets(name, ids).astype(np.int64) for name in fields]
        sizes = [np.full(len(ids), layout.field(name).payload_bytes, np.int64) for name in fields]
        start, size = (np.concatenate(column) if column else np.empty(0, np.int64) for column in (starts, sizes))
        self._order = np.argsort(start, kind="stable")
        self._start, self._missing = start[self._order], size[self._order]
        self._end = self._start + self._missing
        self._fields, self._count = tuple(fields), len(ids)

    def add(self, offsets: U64, lengths: U64) -> Iterator[tuple[FieldId, Slots]]:
        """Take in runs of the arena; return the pages that are whole now and were not before, field by field."""
        start = offsets.astype(np.int64)
        end = start + lengths.astype(np.int64)
        first = np.searchsorted(self._end, start, side="right")
        count = np.maximum(np.searchsorted(self._start, end, side="left") - first, 0)
        run = np.repeat(np.arange(len(start)), count)
        # The pages of each run in turn: its first one and those behind it.
        page = np.arange(len(run)) + np.repeat(first - (np.cumsum(count) - count), count)
        landed = np.minimum(end[run], self._end[page]) - np.maximum(start[run], self._start[page])
        np.subtract.at(self._missing, page, landed)
        touched = np.unique(page)
        whole = np.sort(self._order[touched[self._missing[touched] == 0]])
        if not len(whole):
            return
        fields = whole // self._count
        first = np.flatnonzero(np.diff(fields, prepend=-1))
        slots = np.split(whole - fields * self._count, first[1:])
        yield from zip((self._fields[number] for number in fields[first].tolist()), slots, strict=True)
