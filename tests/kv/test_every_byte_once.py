"""Between any two tp sizes each byte of each offered page is written exactly once, with the right value.

The expectation is made from the global tensors by slicing; no planner takes part in it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.ids import GroupId
from pdplane.kv.arena import Pool
from pdplane.kv.copies import (
    decode_ranks_served,
    dummy_ranks,
    expected_bytes,
    expected_prefill_ranks,
    plan_copies,
    plan_route,
    window_runs,
)
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, build_manifest
from tests.samples import KV, SNAPSHOT
from tests.strategies import Cache, Tensor, caches

SIZES = (1, 2, 4, 8)
Bytes = npt.NDArray[np.uint8]
COUNTS = {KV: 3, SNAPSHOT: 1}


def _content(tensor: Tensor, block: int, layout: Layout) -> Bytes:
    """The tensor's bytes in one block over all ranks, shape (*global_shape, element bytes)."""
    element = layout.field(tensor.field_id).element_bytes
    seed = [*map(ord, tensor.field_id), block]
    return np.random.default_rng(seed).integers(1, 255, (*tensor.global_shape, element), dtype=np.uint8)


def _of_rank(tensor: Tensor, whole: Bytes, tp: int, rank: int) -> Bytes:
    """A rank's slice: its share of every part, one part after another."""
    if tensor.axis is None:
        return whole
    shards = tensor.shard_count(tp)
    shard = rank // (tp // shards)
    pieces, base = [], 0
    for part in tensor.parts or (tensor.global_shape[tensor.axis],):
        width = part // shards
        start = base + shard * width
        pieces.append(np.take(whole, range(start, start + width), axis=tensor.axis))
        base += part
    return np.concatenate(pieces, axis=tensor.axis)


def _pages(cache: Cache, layout: Layout, blocks: dict[GroupId, tuple[int, ...]], tp: int, rank: int) -> Bytes:
    """An arena of this rank with the tensors' bytes in its pages and zeros elsewhere."""
    arena = np.zeros(layout.arena_bytes, dtype=np.uint8)
    for tensor in cache.tensors:
        ids = np.array(blocks[tensor.group_id], dtype=np.uint64)
        for slot, offset in enumerate(layout.page_offsets(tensor.field_id, ids).tolist()):
            page = _of_rank(tensor, _content(tensor, slot, layout), tp, rank).ravel()
            assert not arena[offset : offset + page.size].any()
            arena[offset : offset + page.size] = page
    return arena


def _allocated(layout: Layout, skip: int) -> dict[GroupId, tuple[int, ...]]:
    groups = [spec.group_id for spec in layout.group_specs]
    pool = Pool(layout)
    pool.allocate(dict.fromkeys(groups, skip))
    return pool.allocate({group_id: COUNTS[group_id] for group_id in groups})


def _push(cache: Cache, prefill: Layout, decode: Layout, tps: tuple[int, int], decode_rank: int) -> None:
    source_blocks, manifest = _allocated(prefill, 1), _manifest(decode)
    arena = np.zeros(decode.arena_bytes, dtype=np.uint8)
    written = np.zeros(decode.arena_bytes, dtype=np.uint8)
    feeders = expected_prefill_ranks(prefill, decode, tps[0], tps[1], decode_rank)
    for prefill_rank in feeders:
        assert decode_rank in decode_ranks_served(prefill, decode, tps[0], prefill_rank, tps[1])
        source = _pages(cache, prefill, source_blocks, tps[0], prefill_rank)
        route = plan_route(prefill, decode, tps[0], prefill_rank, tps[1], decode_rank)
        copies = plan_copies(route, prefill, source_blocks, decode, manifest)
        assert copies.nbytes == expected_bytes(decode, manifest, route) > 0
        rows = zip(copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True)
        for start, to, length in rows:
            arena[to : to + length] = source[start : start + length]
            written[to : to + length] += 1
    assert np.array_equal(arena, _pages(cache, decode, manifest.blocks(), tps[1], decode_rank))
    assert written.max() == 1
    assert np.array_equal(written.astype(bool), _window(decode, manifest))


def _manifest(layout: Layout) -> Manifest:
    return build_manifest(layout, _allocated(layout, 2), 0, 12)


def _window(layout: Layout, manifest: Manifest) -> npt.NDArray[np.bool_]:
    inside = np.zeros(layout.arena_bytes, dtype=bool)
    offsets, lengths = window_runs(layout, manifest)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        inside[offset : offset + length] = True
    return inside


@pytest.mark.parametrize("decode_tp", SIZES)
@pytest.mark.parametrize("prefill_tp", SIZES)
@given(data=st.data())
def test_every_byte_once(prefill_tp: int, decode_tp: int, data: st.DataObject) -> None:
    cache = data.draw(caches())
    prefill = cache.layout(prefill_tp, packing=data.draw(st.integers(1, 3)), num_lcm_blocks=6)
    decode = cache.layout(decode_tp, packing=data.draw(st.integers(1, 3)), num_lcm_blocks=9)
    for decode_rank in range(decode_tp):
        _push(cache, prefill, decode, (prefill_tp, decode_tp), decode_rank)


@given(cache=caches(), prefill_tp=st.sampled_from(SIZES), decode_tp=st.sampled_from(SIZES))
def test_each_prefill_rank_serves_somebody_or_is_a_dummy(cache: Cache, prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = cache.layout(prefill_tp), cache.layout(decode_tp)
    dummies = dummy_ranks(prefill, decode, prefill_tp, decode_tp)
    for rank in range(prefill_tp):
        served = decode_ranks_served(prefill, decode, prefill_tp, rank, decode_tp)
        assert bool(served) != (rank in dummies)
        feeding = [
            d for d in range(decode_tp) if rank in expected_prefill_ranks(prefill, decode, prefill_tp, decode_tp, d)
        ]
        assert list(served) == feeding
