"""Derived values of a layout, and planning one, against the layouts of legacy engines."""

from __future__ import annotations

import numpy as np
import pytest

from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import FULL_HISTORY, FULL_SUFFIX, HISTORY, GroupSpec, Layout, Plane
from pdplane.kv.planning import FieldSpec, plan_layout
from pdplane.wire.cache_json import decode_layout, encode_layout
from tests.golden import Case, each, layout_of
from tests.samples import KV, SNAPSHOT, two_group_layout

_ALIGNMENT = {"pack_alignment_256": 256}


def _whole(case: Case) -> bool:
    return "arena_bytes" in case["expected"]


@each("legacy/layouts", _whole)
def test_derived_values(case: Case) -> None:
    layout, expected = layout_of(case["input"]), case["expected"]
    assert layout.arena_bytes == expected["arena_bytes"]
    for field_id, numbers in expected["fields"].items():
        field = layout.field(FieldId(field_id))
        assert field.element_bytes == numbers["element_size"]
        assert field.payload_bytes == numbers["payload_bytes"]
    for group_id, tokens in expected["block_granularity"].items():
        assert layout.spec(GroupId(group_id)).block_granularity == tokens
    for group_id, field_ids in expected["fields_for_group"].items():
        assert [field.field_id for field in layout.fields_of(GroupId(group_id))] == field_ids


@each("legacy/layouts", _whole)
def test_page_offsets(case: Case) -> None:
    layout = layout_of(case["input"])
    for field_id, offsets in case["expected"]["page_byte_offsets"].items():
        pages = np.array([int(page) for page in offsets], dtype=np.uint64)
        assert layout.page_offsets(FieldId(field_id), pages).tolist() == list(offsets.values())


@each("legacy/layouts", _whole)
def test_planning_gives_the_same_layout(case: Case) -> None:
    layout = layout_of(case["input"])
    planned = plan_layout(
        layout.group_specs,
        [FieldSpec(f.group_id, f.field_id, f.plane_id, f.shape, f.dtype) for f in layout.fields],
        num_lcm_blocks=layout.num_lcm_blocks,
        prefix_granularity=layout.prefix_granularity,
        packing={group.group_id: group.cache_blocks_per_lcm_block for group in layout.groups},
        partitions=layout.partitions,
        alignment=_ALIGNMENT.get(case["name"], 1),
    )
    assert planned == layout


def test_steps_are_layers_by_number_and_the_rest_last() -> None:
    spec = GroupSpec(KV, FULL_HISTORY, 4, 1, None, HISTORY, FULL_SUFFIX)
    names = ["layer.10.k", "layer.2.v", "layer.2.k", "rope", "layer.0.k", "layer.x.k"]
    fields = [FieldSpec(KV, FieldId(name), "p", (4,), "uint8") for name in names]
    layout = plan_layout([spec], fields, num_lcm_blocks=1, prefix_granularity=4)
    assert layout.steps == (("layer.0.k",), ("layer.2.k", "layer.2.v"), ("layer.10.k",), ("layer.x.k", "rope"))


LAYERS = [FieldId(f"layer.{number}.kv") for number in range(12)]


def layers_layout(**more: object) -> Layout:
    """Twelve layers, each a plane of its own, in order: as text, layer 10 would come before layer 2."""
    spec = GroupSpec(KV, FULL_HISTORY, 4, 1, None, HISTORY, FULL_SUFFIX)
    fields = [FieldSpec(KV, name, name, (4,), "uint8") for name in LAYERS]
    return plan_layout([spec], fields, num_lcm_blocks=3, prefix_granularity=4, **more)


def test_planes_and_the_fields_of_a_page_stand_in_the_callers_order() -> None:
    layout = layers_layout()
    assert [plane.plane_id for plane in layout.planes] == LAYERS
    assert [layout.plane(name).arena_offset_bytes for name in LAYERS] == [16 * number for number in range(12)]
    assert layout.steps == tuple((name,) for name in LAYERS)
    spec = GroupSpec(KV, FULL_HISTORY, 4, 1, None, HISTORY, FULL_SUFFIX)
    fields = [FieldSpec(KV, name, "one", (4,), "uint8") for name in LAYERS]
    layout = plan_layout([spec], fields, num_lcm_blocks=3, prefix_granularity=4)
    assert [layout.field(name).field_offset_bytes for name in LAYERS] == [4 * number for number in range(12)]


def test_planes_may_be_memory_that_is_there_already() -> None:
    places = {name: 1000 - 64 * number for number, name in enumerate(LAYERS)}  # from the last to the first, with gaps
    layout = layers_layout(planes=[Plane(name, 8, offset) for name, offset in places.items()])
    assert [layout.page_offsets(name, np.array([0, 1, 3], np.uint64)).tolist() for name in LAYERS] == [
        [offset, offset + 8, offset + 24] for offset in places.values()
    ]
    assert layout.end_bytes == 1000 + 4 * 8
    assert layout.arena_bytes >= layout.end_bytes
    assert decode_layout(encode_layout(layout)) == layout


def test_steps_may_be_the_callers() -> None:
    steps = [LAYERS[6:], LAYERS[:6]]
    layout = layers_layout(steps=steps)
    assert layout.steps == tuple(map(tuple, steps))
    assert layout == layers_layout()  # they are nobody else's affair
    assert decode_layout(encode_layout(layout)).steps == layers_layout().steps


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"planes": [Plane("layer.0.kv", 4, 0)]}, "'layer.1.kv' is not among"),
        ({"planes": [Plane(name, 4, 16 * n) for n, name in enumerate([*LAYERS, "x"])]}, "'x' is given, and no field"),
        ({"planes": [Plane(name, 4, 8 * n) for n, name in enumerate(LAYERS)]}, "overlaps another plane"),
        ({"planes": [Plane(name, 3, 16 * n) for n, name in enumerate(LAYERS)]}, "smaller than the page"),
        ({"steps": [LAYERS[:11]]}, "'layer.11.kv' stands in 0 steps"),
        ({"steps": [LAYERS, LAYERS[:1]]}, "'layer.0.kv' stands in 2 steps"),
        ({"steps": [[*LAYERS, "x"]]}, "unknown field 'x'"),
    ],
    ids=["plane missing", "plane unused", "planes overlap", "stride", "step missing", "step twice", "step unknown"],
)
def test_planes_and_steps_that_make_no_layout(change: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        layers_layout(**change)


def test_steps_of_two_groups() -> None:
    assert two_group_layout().steps == (
        ("layer.0.k", "layer.0.v"),
        ("layer.1.k", "layer.1.v"),
        ("layer.2.ssm",),
    )


def test_unknown_names_are_our_own_mistake() -> None:
    layout = two_group_layout()
    assert layout.group(KV).page_count == 15
    assert layout.spec(SNAPSHOT).family == "state"
    assert layout.plane("ssm").bytes_per_lcm_block == 48
    assert layout.partition(FieldId("nothing")) is None
    for look in (layout.group, layout.spec, layout.field, layout.plane):
        with pytest.raises(LocalProtocolError, match="nothing"):
            look("nothing")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_lcm_blocks": 0}, "num_lcm_blocks"),
        ({"packing": {KV: 0}}, "packing"),
        ({"alignment": 0}, "alignment"),
        ({"prefix_granularity": 6}, "prefix_granularity"),
        ({"fields": [FieldSpec(KV, FieldId("f"), "p", (4,), "uint32")]}, "uint32"),
        ({"fields": [FieldSpec(GroupId("x"), FieldId("f"), "p", (4,), "uint8")]}, "unknown group"),
        ({"fields": [FieldSpec(KV, FieldId("f"), "p", (0,), "uint8")]}, "lcm_block_bytes"),
        ({"fields": [FieldSpec(KV, FieldId("f"), "p", (1,), "uint8")] * 2}, "twice"),
    ],
    ids=["blocks", "packing", "alignment", "granularity", "dtype", "group", "shape", "twice"],
)
def test_wishes_that_make_no_layout(change: dict[str, object], text: str) -> None:
    spec = GroupSpec(KV, FULL_HISTORY, 4, 1, None, HISTORY, FULL_SUFFIX)
    wishes: dict[str, object] = {
        "specs": [spec],
        "fields": [FieldSpec(KV, FieldId("f"), "p", (4,), "uint8")],
        "num_lcm_blocks": 3,
        "prefix_granularity": 4,
    }
    with pytest.raises(ConfigError, match=text):
        plan_layout(**{**wishes, **change})


def test_pages_of_wide_elements_start_aligned() -> None:
    spec = GroupSpec(KV, FULL_HISTORY, 1, 1, None, HISTORY, FULL_SUFFIX)
    fields = [
        FieldSpec(KV, FieldId("a"), "p", (3,), "uint8"),
        FieldSpec(KV, FieldId("b"), "p", (1,), "float64"),
        FieldSpec(KV, FieldId("c"), "p", (1,), "uint8"),
    ]
    layout = plan_layout([spec], fields, num_lcm_blocks=2, prefix_granularity=1, packing={KV: 2})
    assert [field.field_offset_bytes for field in layout.fields] == [0, 8, 16]
    assert layout.field(FieldId("b")).page_stride_bytes == 24
