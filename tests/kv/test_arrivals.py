"""Pages become whole with their last byte, whatever the runs and their order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.ids import FieldId, GroupId
from pdplane.kv.copies import Arrivals
from pdplane.kv.layout import Layout
from tests.samples import two_group_layout

BLOCKS = (5, 2, 3, 9)


@pytest.fixture(scope="module")
def layout() -> Layout:
    return two_group_layout(num_lcm_blocks=16)


def _group(layout: Layout) -> tuple[GroupId, tuple[FieldId, ...]]:
    spec = layout.group_specs[0]
    return spec.group_id, tuple(field.field_id for field in layout.fields_of(spec.group_id))


def _add(arrivals: Arrivals, runs: list[tuple[int, int]]) -> list[tuple[str, int]]:
    offsets = np.array([start for start, _ in runs], np.uint64)
    lengths = np.array([end - start for start, end in runs], np.uint64)
    return [(name, int(slot)) for name, slots in arrivals.add(offsets, lengths) for slot in slots]


def _pages(layout: Layout, fields: tuple[FieldId, ...]) -> dict[tuple[str, int], tuple[int, int]]:
    found = {}
    for name in fields:
        starts = layout.page_offsets(name, np.array(BLOCKS, np.uint64))
        for slot, start in enumerate(starts.tolist()):
            found[name, slot] = (start, start + layout.field(name).payload_bytes)
    return found


@given(st.data())
def test_a_page_is_told_once_with_its_last_byte(layout: Layout, data: st.DataObject) -> None:
    _, fields = _group(layout)
    pages = _pages(layout, fields)
    marks = sorted({0, layout.arena_bytes, *data.draw(st.lists(st.integers(1, layout.arena_bytes - 1), max_size=40))})
    runs = data.draw(st.permutations(list(itertools.pairwise(marks))))
    arrivals, told, landed = Arrivals(layout, fields, BLOCKS), list[tuple[str, int]](), np.zeros(marks[-1], bool)
    while runs:
        taken = data.draw(st.integers(1, len(runs)))
        batch, runs = runs[:taken], runs[taken:]
        for start, end in batch:
            landed[start:end] = True
        told += _add(arrivals, batch)
        assert sorted(told) == sorted(name for name, (start, end) in pages.items() if landed[start:end].all())
    assert sorted(told) == sorted(pages)


def test_bytes_of_other_blocks_and_fields_are_nothing(layout: Layout) -> None:
    _, fields = _group(layout)
    arrivals = Arrivals(layout, fields[:1], BLOCKS)
    pages = _pages(layout, fields)
    assert _add(arrivals, [run for (name, _), run in pages.items() if name != fields[0]]) == []
    assert _add(arrivals, []) == []


def test_no_fields_or_no_blocks_have_no_pages(layout: Layout) -> None:
    _, fields = _group(layout)
    assert _add(Arrivals(layout, (), BLOCKS), [(0, 4096)]) == []
    assert _add(Arrivals(layout, fields, ()), [(0, 4096)]) == []
