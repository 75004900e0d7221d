"""Which bytes go where: numpy u64 arrays, one row a run of bytes.

Offsets are relative to each side's arena. No Python loop runs over blocks or rows: one turn a fragment, that
is one a field in the usual case.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import LocalProtocolError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import U64 as U64
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest
from pdplane.kv.routes import Fragment, RankRoute


@attrs.frozen(eq=False)
class Copies:
    """`length[i]` bytes from source offset `source[i]` to destination offset `destination[i]`, each in its arena."""

    source: U64
    destination: U64
    length: U64

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())


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
    pairs = {
        group_id: (_ids(source_blocks.get(group_id, ()), source_layout, group_id), _ids(blocks))
        for group_id, blocks in destination_blocks.items()
    }
    for group_id, (ours, theirs) in pairs.items():
        if len(ours) != len(theirs):
            raise LocalProtocolError(f"group {group_id!r}: {len(ours)} source blocks for {len(theirs)} of the manifest")
    found = [
        _fragment_copies(fragment, source_layout, destination_layout, *pairs[fragment.group_id])
        for fragment in route.fragments
        if fragment.group_id in pairs and (fields is None or fragment.field_id in fields)
    ]
    if not found:
        return Copies(*(np.empty(0, np.uint64) for _ in range(3)))
    source, destination, length = (np.concatenate(column) for column in zip(*found, strict=True))
    return merged_copies(source, destination, length)


def expected_bytes(destination_layout: Layout, manifest: Manifest, route: RankRoute) -> int:
    """Return how many bytes the route's prefill rank must land in decode's arena for this manifest."""
    counts = {group.group_id: len(group.block_ids) for group in manifest.groups}
    return sum(fragment.rows * fragment.row_bytes * counts.get(fragment.group_id, 0) for fragment in route.fragments)


def window_runs(layout: Layout, manifest: Manifest) -> tuple[U64, U64]:
    """Return offsets and lengths of the runs in decode's arena that the manifest opens: sorted, disjoint, merged."""
    starts, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for group_id, blocks in manifest.blocks().items():
        ids = _ids(blocks)
        for field in layout.fields_of(group_id):
            starts.append(layout.page_offsets(field.field_id, ids))
            lengths.append(np.full(len(ids), field.payload_bytes, np.uint64))
    start, length = np.concatenate(starts), np.concatenate(lengths)
    if not len(start):
        return start, length
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(start[order] + length[order])
    # A peer's groups may name the same bytes twice, so overlapping runs are united, not only adjacent ones.
    first = np.concatenate(([True], start[1:] > end[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], end[last] - start[first]


def _ids(blocks: Sequence[int], layout: Layout | None = None, group_id: GroupId | None = None) -> U64:
    if layout is not None and group_id is not None and len(blocks):
        count = layout.group(group_id).page_count
        if min(blocks) < 1 or max(blocks) >= count:
            raise LocalProtocolError(f"group {group_id!r}: a source block is outside 1..{count - 1}")
    return np.asarray(blocks, dtype=np.uint64)


def _fragment_copies(
    fragment: Fragment, source_layout: Layout, destination_layout: Layout, source_ids: U64, destination_ids: U64
) -> tuple[U64, U64, U64]:
    rows = np.arange(fragment.rows, dtype=np.uint64)
    source_rows = rows * np.uint64(fragment.source_stride) + np.uint64(fragment.source_offset)
    destination_rows = rows * np.uint64(fragment.destination_stride) + np.uint64(fragment.destination_offset)
    source = source_layout.page_offsets(fragment.field_id, source_ids)[:, None] + source_rows
    destination = destination_layout.page_offsets(fragment.field_id, destination_ids)[:, None] + destination_rows
    return source.ravel(), destination.ravel(), np.full(source.size, fragment.row_bytes, np.uint64)


def merged_copies(source: U64, destination: U64, length: U64) -> Copies:
    """Sort by the side that leaves fewer runs on both sides together, and join what touches on both.

    A run on either side is an entry of a system call, which costs the kernel as much as some kilobytes: with
    4 KiB blocks in one piece at the source, reading them in its order halves the work of a pull. Where
    destinations overlap, the order is theirs, and of two copies to one place the later stays the later.
    """
    if not len(length):
        return Copies(source, destination, length)
    copies, other = (_sorted(side, source, destination, length) for side in (destination, source))
    overlapping = bool((copies.destination[:-1] + copies.length[:-1] > copies.destination[1:]).any())
    if not overlapping and _runs(other) <= _runs(copies):
        copies = other
    apart = _apart(copies.source, copies.length) | _apart(copies.destination, copies.length)
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return Copies(copies.source[first], copies.destination[first], np.add.reduceat(copies.length, first))


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
