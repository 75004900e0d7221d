"""The layout's JSON: canonical out, any spelling in, everything unusable refused with the value named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from pdplane import wire
from pdplane.errors import LocalProtocolError, WireError
from tests.golden import Case, cases, each, refused, wire_bytes
from tests.rows import rows
from tests.samples import two_group_layout

# Rows that the legacy peer accepts and we refuse, with the value that is named and the reason.
STRICTER = {
    "accept_float_number_kept": ("layout.plan.num_lcm_blocks", "7.0 is no count"),
    "accept_plane_negative_offset_accepted": ("layout.plan.planes[0].arena_offset_bytes", "outside the arena"),
    "accept_missing_planes_entry_accepted": ("layout.plan.fields['layer.1.k'].plane_id", "no address can be computed"),
    "accept_unknown_policy_accepted": ("layout.group_specs['attn'].transfer_policy", "null says not what to transfer"),
    "accept_group_ids_disagree_accepted": ("layout.group_specs", "a group without meaning"),
    "accept_utf8_bom_less_unicode_group": ("layout.group_specs", "its specs name other groups than its plan"),
}

_CATEGORY = {"size": "layout", "json": "layout", "json_type": "layout"}

Json = dict[str, Any]


def _given(case: Case) -> bytes:
    given = case["input"]
    if "repeat_hex" in given:
        return bytes.fromhex(given["repeat_hex"]) * given["count"]
    return bytes.fromhex(given["wire_hex"]) if "wire_hex" in given else wire_bytes(given)


@each("legacy/layouts", lambda case: not refused(case) and case["name"] not in STRICTER)
def test_accepted_and_written_canonically(case: Case) -> None:
    assert wire.encode_layout(wire.decode_layout(_given(case))).hex() == case["expected"]["wire_hex"]


@each("legacy/layouts", refused)
def test_refused(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_layout(_given(case))
    category = case["expected"]["error"]["category"]
    if category in _CATEGORY:
        assert caught.value.field == _CATEGORY[category]
    else:
        assert caught.value.field.startswith("layout.")


def _other_generation(change: Callable[[Json], None]) -> bytes:
    layout = json.loads(wire.encode_layout(two_group_layout()))
    change(layout)
    return json.dumps(layout).encode()


def _newer(layout: Json) -> None:
    for spec in layout["group_specs"]:
        spec |= {"replayable": False, "shard_count": 1}


def _older(layout: Json) -> None:
    layout["field_dtypes"] = [field.pop("dtype") for field in layout["plan"]["fields"]]


@pytest.mark.parametrize(
    ("change", "says"),
    [(_newer, "newer generation of legacy engines (replayable, shard_count)"), (_older, "older generation")],
)
def test_another_generation_is_named(change: Callable[[Json], None], says: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_layout(_other_generation(change))
    assert says in caught.value.reason


@each("legacy/layouts", lambda case: case["name"] in STRICTER)
def test_each_reason_is_needed(case: Case) -> None:
    assert not refused(case)
    with pytest.raises(WireError) as caught:
        wire.decode_layout(_given(case))
    assert caught.value.field == STRICTER[case["name"]][0]


def test_a_non_ascii_group_is_fine_when_both_halves_name_it() -> None:
    (case,) = (case for case in cases("legacy/layouts") if case["name"] == "accept_utf8_bom_less_unicode_group")
    text = _given(case).decode().replace("attn\\u00e9", "attn").replace("lin\\u00e9", "lin")
    renamed = text.replace('"attn"', '"attn\u00e9"').replace('"lin"', '"lin\u00e9"')
    found = wire.decode_layout(renamed.encode())
    assert {spec.group_id for spec in found.group_specs} == {"attn\u00e9", "lin\u00e9"}
    assert b"attn\\u00e9" in wire.encode_layout(found)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_any_encoding_that_the_legacy_loader_reads(encoding: str) -> None:
    layout = two_group_layout()
    text = json.dumps(json.loads(wire.encode_layout(layout)), indent=1, sort_keys=True)
    assert wire.decode_layout(text.encode(encoding)) == layout


def _edited(edit: Callable[[Json], object]) -> bytes:
    found: Json = json.loads(wire.encode_layout(two_group_layout()))
    edit(found)
    return wire_bytes(found)


def _set(path: str, value: object) -> Callable[[Json], None]:
    """An edit: `plan.fields.0.shape` and the new value."""

    def edit(found: Json) -> None:
        *parents, last = path.split(".")
        target: Any = found
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        target[last] = value

    return edit


BAD = {
    "plan.num_lcm_blocks": [True, -1, 0, "7", 10**18, 2**63, None, [1]],
    "plan.lcm_block_bytes": [True, 1.0, 2**62],
    "plan.prefix_granularity": [0],
    "plan.groups.0.group_id": ["", 7, "x" * 257, "\ud800"],
    "plan.groups.0.page_count": [1, 2**40],
    "plan.groups.0.cache_blocks_per_lcm_block": [0, 3],
    "plan.planes.0.plane_id": ["elsewhere"],
    "plan.planes.0.arena_offset_bytes": [-1, 1, 2**62],
    "plan.planes.0.bytes_per_lcm_block": [1, 2**62],
    "plan.fields.0.group_id": ["state"],
    "plan.fields.0.field_id": ["layer.1.k"],
    "plan.fields.0.shape": [[], [0], [True], [2**62, 2**62], [1] * 17, "4", [4.0], [-4]],
    "plan.fields.0.dtype": ["float128", None, 4],
    "plan.fields.0.field_offset_bytes": [-8, 8, 2**62],
    "plan.fields.0.page_stride_bytes": [1, 2**62],
    "plan.fields.1.field_offset_bytes": [0],
    "group_specs.0.retention": ["sliding_window", "some_history", 1],
    "group_specs.0.family": ["bridge", 3],
    "group_specs.0.transfer_policy": ["everything", None],
    "group_specs.0.rows_per_page": [None, 0, True, 5],
    "group_specs.0.sliding_window_tokens": [0, -1],
    "group_specs.0.checkpoint_granularity": [4],
    "group_specs.1.family": ["history"],
    "transfer_schema.fields.0.partition.axis": [True, -1, 4],
    "transfer_schema.fields.0.partition.global_extent": [0, 3, 2**63],
    "transfer_schema.fields.0.partition.global_parts": [[4], [1, 2], None, [0, 4], [2] * 17],
    "transfer_schema.fields.0.field_id": ["layer.9.k", "layer.1.k"],
}


@rows(("path", "value"), [(path, value) for path, values in BAD.items() for value in values])
def test_unusable_values_are_refused_with_the_field_named(path: str, value: object) -> None:
    with pytest.raises(WireError, match=r"^layout\.") as caught:
        wire.decode_layout(_edited(_set(path, value)))
    assert caught.value.field.startswith(f"layout.{path.partition('.')[0]}")


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("plan.prefix_granularity", 3, "layout.group_specs['kv']"),
        ("plan.groups.0.group_id", "other", "layout.group_specs"),
    ],
)
def test_values_that_do_not_fit_together(path: str, value: object, field: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_layout(_edited(_set(path, value)))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [
        b'{"plan":{},"plan":{}}',
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"plan":NaN}',
        b'{"plan":-Infinity}',
        b'{"plan":' + b"9" * 100_000 + b"}",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\x00",
    ],
    ids=["twice", "deep", "deep_objects", "nan", "infinity", "digits", "half_utf16", "bom", "nul"],
)
def test_hostile_json(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode_layout(data)


def test_an_invalid_layout_is_not_written() -> None:
    with pytest.raises(LocalProtocolError, match="prefix_granularity"):
        wire.encode_layout(attrs.evolve(two_group_layout(), prefix_granularity=0))
