"""Comparing two ranks' layouts."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import LayoutMismatch
from pdplane.ids import FieldId
from pdplane.kv.layout import Layout, compare_layouts, differences
from pdplane.kv.planning import AttentionLayer, token_major_layout
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


def changed(**values: object) -> Layout:
    """A legacy layout of two layers, changed."""
    wishes = {"layers": [AttentionLayer(layer, 2, 4, "bfloat16") for layer in range(2)], "block_tokens": 16}
    return token_major_layout(num_lcm_blocks=3, **(wishes | values))


def renamed(layout: Layout, old: str, new: str) -> Layout:
    fields = tuple(attrs.evolve(f, field_id=FieldId(f.field_id.replace(old, new))) for f in layout.fields)
    return attrs.evolve(layout, fields=fields, partitions=())


@pytest.mark.parametrize(
    ("theirs", "field", "advice"),
    [
        (changed(block_tokens=64), "prefix_granularity", "--block-tokens 64"),
        (
            changed(layers=[AttentionLayer(layer, 2, 4, "uint8") for layer in range(2)]),
            "field[layer.0.k].dtype",
            "KV cache in 8 bits",
        ),
        (
            changed(layers=[AttentionLayer(layer, 2, 4, "bfloat16") for layer in range(3)]),
            "field_order[full_attention]",
            "layers of a draft model (layer.2.k)",
        ),
        (renamed(changed(), ".k", ".index_k"), "field_order[full_attention]", "keeps layer.0.index_k"),
        (
            changed(layers=[AttentionLayer(layer, 2, 8, "bfloat16") for layer in range(2)]),
            "field[layer.0.k].global_shape",
            "another --model",
        ),
    ],
)
def test_what_would_change_it_is_told(theirs: Layout, field: str, advice: str) -> None:
    first = next(differences(changed(), theirs))
    assert first.field == field
    assert advice in first.advice
    assert first.advice in str(first)


def test_both_values_are_told() -> None:
    with pytest.raises(LayoutMismatch) as caught:
        compare_layouts(two_group_layout(total_heads=4), two_group_layout(total_heads=8))
    assert caught.value.field == "field[layer.0.k].partition"
    assert "global_extent=4" in caught.value.ours
    assert "global_extent=8" in caught.value.theirs
