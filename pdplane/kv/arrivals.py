"""Which pages of a room are whole already, found from the runs of bytes that have landed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pdplane.ids import FieldId
from pdplane.kv.arrays import U64
from pdplane.kv.layout import Layout

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
        """Take in runs of the arena; gives the pages that are whole now and were not before, field by field."""
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
