"""Comparing two ranks' layouts."""

from __future__ import annotations

import pytest

from pdplane.errors import LayoutMismatch
from pdplane.kv.layout import compare_layouts
from tests.golden import Case, each, layout_of, refused
from tests.samples import two_group_layout

_FIELD = {
    "prefix_granularity": "prefix_granularity",
    "group_order": "group_order",
    "group_semantics": "group[",
    "field_order": "field_order[",
    "field_semantics": "field[",
}


@each("legacy/peer_layouts", lambda case: not refused(case))
def test_compatible(case: Case) -> None:
    ours, theirs = layout_of(case["input"]["local"]), layout_of(case["input"]["peer"])
    compare_layouts(ours, theirs)
    compare_layouts(theirs, ours)


@each("legacy/peer_layouts", refused)
def test_mismatch_names_the_field(case: Case) -> None:
    ours, theirs = layout_of(case["input"]["local"]), layout_of(case["input"]["peer"])
    with pytest.raises(LayoutMismatch) as caught:
        compare_layouts(ours, theirs)
    assert caught.value.field.startswith(_FIELD[case["expected"]["error"]["category"]])
    assert caught.value.ours != caught.value.theirs


def test_both_values_are_told() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        compare_layouts(two_group_layout(total_heads=4), two_group_layout(total_heads=8))
    assert caught.value.field == "field[layer.0.k].partition"
    assert "global_extent=4" in caught.value.ours
    assert "global_extent=8" in caught.value.theirs
