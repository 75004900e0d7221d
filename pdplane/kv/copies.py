"""Which bytes go where: numpy u64 arrays, one row a run of bytes.

Offsets are relative to each side's arena. No Python loop runs over blocks or rows: one turn a fragment, that
is one a field in the usual case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from operator import itemgetter

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import LocalProtocolError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import FEW, Layout
from pdplane.kv.layout import U64 as U64
from pdplane.kv.manifest import Manifest
from pdplane.kv.routes import Fragment, RankRoute


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
