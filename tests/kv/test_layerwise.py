"""Chunks and steps as the legacy peers cut them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import LocalProtocolError
from pdplane.kv.manifest import blocks_needed, check_chunk, chunk_blocks, chunk_positions, logical_slots
from tests.golden import Case, each, layout_of, refused
from tests.samples import KV, SNAPSHOT, two_group_layout


def _kind(prefix: str) -> pytest.MarkDecorator:
    return each("legacy/layerwise", lambda case: case["name"].startswith(prefix))


@_kind("select")
def test_golden_chunks(case: Case) -> None:
    given_ = case["input"]
    layout = layout_of(given_["layout"])
    prefix_len, prompt_len = given_["prefix_len"], given_["prompt_len"]
    chunk = range(given_["chunk_start"], given_["chunk_end"])
    if refused(case):
        with pytest.raises(LocalProtocolError):
            check_chunk(layout, prefix_len, prompt_len, chunk)
        return
    check_chunk(layout, prefix_len, prompt_len, chunk)
    tables = {}
    for spec in layout.group_specs:
        slots = logical_slots(spec, prefix_len, prompt_len)
        tables[spec.group_id] = given_["tables"][spec.group_id][given_["row"]][slots.start : slots.stop]
    blocks = chunk_blocks(layout, tables, prefix_len, prompt_len, chunk)
    found = [
        {
            "group_id": spec.group_id,
            "source_block_ids": list(blocks[spec.group_id]),
            "destination_positions": list(chunk_positions(spec, prefix_len, prompt_len, chunk)),
        }
        for spec in layout.group_specs
    ]
    assert found == case["expected"]


@given(
    prefix_blocks=st.integers(0, 5),
    length=st.integers(1, 60),
    cuts=st.sets(st.integers(1, 80)),
    cached=st.integers(0, 20),
)
def test_the_chunks_of_a_prompt_take_every_block_once(
    prefix_blocks: int, length: int, cuts: set[int], cached: int
) -> None:
    layout = two_group_layout()
    prefix_len = prefix_blocks * layout.prefix_granularity
    prompt_len = prefix_len + length
    ends = [*sorted(cut for cut in cuts if cached < cut < prompt_len), prompt_len]
    starts = [min(cached, prefix_len), *ends[:-1]]  # the first one takes what was cached here with it
    for spec in layout.group_specs:
        taken = [
            position
            for start, end in zip(starts, ends, strict=True)
            for position in chunk_positions(spec, prefix_len, prompt_len, range(start, end))
        ]
        assert taken == list(range(blocks_needed(layout, prompt_len, prefix_len)[spec.group_id]))


def test_a_snapshot_waits_for_the_last_chunk() -> None:
    layout, blocks = two_group_layout(), {KV: (5, 6, 7), SNAPSHOT: (2,)}
    assert chunk_blocks(layout, blocks, 0, 10, range(9)) == {KV: (5, 6), SNAPSHOT: ()}
    assert chunk_blocks(layout, blocks, 0, 10, range(9, 10)) == {KV: (7,), SNAPSHOT: (2,)}
