"""Copy lists against the legacy planner's, run by run and byte by byte."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import LocalProtocolError
from pdplane.ids import FieldId, GroupId
from pdplane.kv import copies as planner
from pdplane.kv.copies import (
    Copies,
    RankRoute,
    expected_bytes,
    merged_copies,
    plan_block_copies,
    plan_copies,
    plan_route,
    window_runs,
)
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, ManifestGroup, build_manifest
from tests.golden import Case, each, layout_of
from tests.samples import KV, SNAPSHOT, two_group_layout

# The legacy copy list of a rank that sends to nobody is never used; it holds whole pages for want of fragments.
NEVER_SENT = {"p4_d1_mla_src1_dummy": "a dummy rank sends nothing, so ours is empty"}


def _route(case: Case) -> tuple[RankRoute, Layout, Layout]:
    given = case["input"]
    prefill, decode = layout_of(given["prefill_layout"]), layout_of(given["decode_layout"])
    numbers = (given["prefill_tp_size"], given["prefill_rank"], given["decode_tp_size"], given["decode_rank"])
    return plan_route(prefill, decode, *numbers), prefill, decode


def _blocks(case: Case) -> tuple[dict[GroupId, list[int]], dict[GroupId, list[int]]]:
    """Source and destination blocks by group; a `selection` picks some of them by position."""
    given = case["input"]
    if "selection" not in given:
        return given["src_blocks"], given["dst_blocks"]
    source, destination = {}, {}
    groups = [spec["group_id"] for spec in given["decode_layout"]["group_specs"]]
    for group_id, chosen in zip(groups, given["selection"], strict=True):
        source[GroupId(group_id)] = chosen["source_block_ids"]
        row = given["dst_blocks"][group_id]
        destination[GroupId(group_id)] = [row[position] for position in chosen["destination_positions"]]
    return source, destination


def _joined(rows: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The legacy list sorted by destination, neighbours on both sides joined, in plain Python."""
    found: list[tuple[int, int, int]] = []
    for source, destination, length in sorted(rows, key=lambda row: row[1]):
        if found and found[-1][0] + found[-1][2] == source and found[-1][1] + found[-1][2] == destination:
            found[-1] = (*found[-1][:2], found[-1][2] + length)
        else:
            found.append((source, destination, length))
    return found


def _rows(copies: Copies) -> list[tuple[int, int, int]]:
    return list(zip(copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True))


@each("legacy/transfer_blocks")
def test_same_copies_as_the_legacy_planner(case: Case) -> None:
    given, expected = case["input"], case["expected"]
    route, prefill, decode = _route(case)
    source, destination = _blocks(case)
    copies = plan_block_copies(route, prefill, source, decode, destination, given.get("field_ids"))
    assert (route.dummy, list(route.decode_ranks)) == (expected["is_dummy"], expected["expected_decode_ranks"])
    relative = [(row[0] - given["src_base"], row[1] - given["dst_base"], row[2]) for row in expected["descriptors"]]
    wanted = [] if case["name"] in NEVER_SENT else _joined(relative)
    assert sorted(_rows(copies), key=lambda row: row[1]) == wanted


@each("legacy/transfer_blocks", lambda case: case["name"] in NEVER_SENT)
def test_each_reason_is_needed(case: Case) -> None:
    assert case["expected"]["is_dummy"]
    assert case["expected"]["descriptors"]


@each("legacy/transfer_blocks", lambda case: "selection" not in case["input"])
def test_expected_bytes_and_the_window(case: Case) -> None:
    given = case["input"]
    route, prefill, decode = _route(case)
    manifest = build_manifest(decode, given["dst_blocks"], given["prefix_len"], given["prompt_len"])
    copies = plan_copies(route, prefill, given["src_blocks"], decode, manifest)
    assert copies.nbytes == expected_bytes(decode, manifest, route)
    offsets, lengths = window_runs(decode, manifest)
    inside = np.zeros(decode.arena_bytes, dtype=bool)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        assert not inside[offset : offset + length].any()
        inside[offset : offset + length] = True
    for _, destination, length in _rows(copies):
        assert inside[destination : destination + length].all()
    assert (offsets[1:] > offsets[:-1] + lengths[:-1]).all()


def _equal() -> tuple[Layout, RankRoute, Manifest]:
    layout = two_group_layout()
    manifest = build_manifest(layout, {KV: (1, 2, 5), SNAPSHOT: (6,)}, 0, 12)
    return layout, plan_route(layout, layout, 1, 0, 1, 0), manifest


def test_whole_neighbouring_blocks_become_one_run() -> None:
    layout, route, manifest = _equal()
    copies = plan_copies(route, layout, {KV: (3, 4, 9), SNAPSHOT: (1,)}, layout, manifest)
    assert len(copies.length) == 3
    assert copies.nbytes == expected_bytes(layout, manifest, route) == 3 * 4 * 64 + 48


def test_runs_join_only_when_both_sides_touch() -> None:
    layout, route, manifest = _equal()
    copies = plan_copies(route, layout, {KV: (4, 3, 9), SNAPSHOT: (1,)}, layout, manifest)
    assert len(copies.length) == 4


def test_a_step_takes_its_fields_only() -> None:
    layout, route, manifest = _equal()
    blocks = {KV: (3, 4, 9), SNAPSHOT: (1,)}
    steps = [plan_copies(route, layout, blocks, layout, manifest, step) for step in layout.steps]
    assert [copies.nbytes for copies in steps] == [3 * 2 * 64, 3 * 2 * 64, 48]
    assert plan_copies(route, layout, blocks, layout, manifest, [FieldId("other")]).nbytes == 0


def test_source_blocks_that_do_not_fit_the_manifest() -> None:
    layout, route, manifest = _equal()
    with pytest.raises(LocalProtocolError, match="2 source blocks for 3"):
        plan_copies(route, layout, {KV: (1, 2), SNAPSHOT: (1,)}, layout, manifest)
    with pytest.raises(LocalProtocolError, match=r"outside 1\.\.14"):
        plan_copies(route, layout, {KV: (1, 2, 15), SNAPSHOT: (1,)}, layout, manifest)


def test_a_careless_manifest_opens_its_bytes_once() -> None:
    layout = two_group_layout()
    manifest = Manifest((ManifestGroup(KV, (2, 2, 3)), ManifestGroup(SNAPSHOT, ())), 0, 12)
    offsets, lengths = window_runs(layout, manifest)
    assert lengths.tolist() == [2 * 4 * 64]
    assert offsets.tolist() == layout.page_offsets(FieldId("layer.0.k"), np.array([2], dtype=np.uint64)).tolist()


def test_an_empty_manifest_opens_nothing() -> None:
    offsets, lengths = window_runs(two_group_layout(), Manifest((), 0, 1))
    assert (offsets.size, lengths.size) == (0, 0)


def test_the_order_is_that_of_the_side_that_lies_in_fewer_runs() -> None:
    order, step = np.array([2, 0, 3, 1], np.uint64), np.uint64(16)
    straight, length = np.arange(4, dtype=np.uint64) * step, np.full(4, 16, np.uint64)
    assert _rows(merged_copies(order * step, straight * np.uint64(2), length)) == [
        (0, 32, 16), (16, 96, 16), (32, 0, 16), (48, 64, 16)
    ]  # fmt: skip
    assert _rows(merged_copies(straight * np.uint64(2), order * step, length)) == [
        (32, 0, 16), (96, 16, 16), (0, 32, 16), (64, 48, 16)
    ]  # fmt: skip
    assert _rows(merged_copies(straight, straight, length)) == [(0, 0, 64)]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 9)), max_size=12),
    st.integers(1, 9),
)
def test_few_runs_are_treated_as_many(rows: list[tuple[int, int, int]], unit: int) -> None:
    columns = [np.array(column, np.uint64) * np.uint64(unit) for column in zip(*rows, strict=True)] or [
        np.empty(0, np.uint64)
    ] * 3
    with pytest.MonkeyPatch.context() as patched:
        few, united = merged_copies(*columns), planner.united_runs(columns[1], columns[2])
        patched.setattr(planner, "FEW", 0)
        many = merged_copies(*columns)
        for ours, theirs in zip(united, planner.united_runs(columns[1], columns[2]), strict=True):
            assert ours.tolist() == theirs.tolist()
    for side in ("source", "destination", "length"):
        assert getattr(few, side).tolist() == getattr(many, side).tolist()
