"""Manifests: which slots, which blocks, and what is refused."""

from __future__ import annotations

import sys

import pytest

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import GroupId
from pdplane.kv.layout import HISTORY, GroupSpec, Layout
from pdplane.kv.manifest import Manifest, ManifestGroup, blocks_needed, build_manifest, logical_slots, validate_manifest
from pdplane.wire.cache_json import decode_manifest
from tests.golden import Case, each, layout_of, refused, wire_bytes
from tests.samples import KV, SNAPSHOT, two_group_layout

# Rows that the legacy peer accepts and we refuse, with the reason.
STRICTER = {
    "quirk_duplicate_blocks_accepted": "two slots in one block: one would overwrite the other",
    "quirk_negative_prefix_accepted": "decode cannot hold fewer tokens than none",
    "quirk_bool_block_accepted": "true is no block id",
    "quirk_float_block_accepted": "3.5 is no block id; no address can be computed",
}

# Where the categories of the legacy peer's refusals are found in our fields.
_FIELD = {
    "prompt_window": "manifest.prompt_len",
    "prefix_alignment": "manifest.prefix_len",
    "group_order": "manifest.groups",
    "block_count": ".block_ids",
    "block_bounds": ".block_ids",
    "block_type": ".block_ids",
    "prompt_type": "manifest.prefix_len",
}


def _check(case: Case) -> None:
    manifest = decode_manifest(wire_bytes(case["input"]["manifest"]))
    validate_manifest(manifest, layout_of(case["input"]["layout"]))


@each("legacy/manifests", lambda case: not refused(case) and case["name"] not in STRICTER)
def test_accepted(case: Case) -> None:
    _check(case)


@each("legacy/manifests", refused)
def test_refused(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        _check(case)
    assert caught.value.field.endswith(_FIELD[case["expected"]["error"]["category"]])


@each("legacy/manifests", lambda case: case["name"] in STRICTER)
def test_each_reason_is_needed(case: Case) -> None:
    assert not refused(case)
    with pytest.raises(WireError):
        _check(case)


@each("legacy/logical_slots")
def test_logical_slots(case: Case) -> None:
    given = case["input"]
    spec = GroupSpec(
        GroupId("g"),
        given["retention"],
        given["block_granularity"],
        1,
        given["sliding_window_tokens"],
        HISTORY,
        given["transfer_policy"],
    )
    assert list(logical_slots(spec, given["prefix_len"], given["prompt_len"])) == case["expected"]


_BUILD_REFUSED = {
    "invalid_block": "holds an id outside",
    "group_ids": "are not the layout's groups",
    "prompt_window": "larger than prefix_len",
    "prefix_alignment": "prefix_granularity",
}


def _build(case: Case) -> tuple[Layout, Manifest]:
    given = case["input"]
    layout = layout_of(given["layout"])
    lengths, blocks = (given["prefix_len"], given["prompt_len"]), {}
    for group_id, rows in given["tables"].items():
        known = [spec for spec in layout.group_specs if spec.group_id == group_id]
        slots = logical_slots(known[0], *lengths) if known else range(0)
        blocks[GroupId(group_id)] = rows[given["row"]][slots.start : slots.stop]
    return layout, build_manifest(layout, blocks, *lengths)


@each("legacy/manifest_build", lambda case: not refused(case))
def test_built_from_block_tables(case: Case) -> None:
    layout, manifest = _build(case)
    assert manifest == decode_manifest(wire_bytes(case["expected"]["manifest"]))
    counts = blocks_needed(layout, manifest.prompt_len, manifest.prefix_len)
    assert counts == {group_id: len(ids) for group_id, ids in manifest.blocks().items()}


@each("legacy/manifest_build", lambda case: refused(case) and case["expected"]["error"]["category"] in _BUILD_REFUSED)
def test_not_built(case: Case) -> None:
    with pytest.raises(LocalProtocolError, match=_BUILD_REFUSED[case["expected"]["error"]["category"]]):
        _build(case)


def test_built_from_blocks() -> None:
    layout = two_group_layout()
    manifest = build_manifest(layout, {SNAPSHOT: (5,), KV: (1, 2, 4)}, 4, 14)
    assert manifest == Manifest((ManifestGroup(KV, (1, 2, 4)), ManifestGroup(SNAPSHOT, (5,))), 4, 14)
    with pytest.raises(LocalProtocolError, match="3 blocks where the window takes 2"):
        build_manifest(layout, {SNAPSHOT: (5,), KV: (1, 2, 4)}, 8, 14)
    with pytest.raises(LocalProtocolError, match="groups"):
        build_manifest(layout, {KV: (1,)}, 0, 4)


@pytest.mark.parametrize(
    ("prefix", "prompt"), [(0, 2**63 - 1), (0, 2**63), (0, 10**30), (-4, 4), (0, 0), (0, True), (2**63, 2**64)]
)
def test_absurd_lengths_build_no_list(prefix: int, prompt: int) -> None:
    manifest = Manifest((ManifestGroup(KV, (1,)), ManifestGroup(SNAPSHOT, (1,))), prefix, prompt)
    with pytest.raises(WireError):
        validate_manifest(manifest, two_group_layout())


def test_counts_beyond_the_machine_s_list_length() -> None:
    counts = blocks_needed(two_group_layout(), 2**63 - 1)
    assert counts[KV] == 2**61
    assert sys.maxsize > counts[KV]


@pytest.mark.parametrize("blocks", [(0,), (15,), (-1,), (2**64,), (True,), (1.0,), ("1",)])
def test_blocks_that_are_none(blocks: tuple[int, ...]) -> None:
    manifest = Manifest((ManifestGroup(KV, blocks), ManifestGroup(SNAPSHOT, (1,))), 0, 4)
    with pytest.raises(WireError, match="'kv'"):
        validate_manifest(manifest, two_group_layout())
