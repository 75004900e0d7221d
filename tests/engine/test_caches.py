"""Cache classes as named tensors: what is moved, what is left out, what is refused."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pdplane.engine.caches import KINDS, Leaf, describe, refuse_unknown, walk
from pdplane.engine.layout import cache_layout, carried, field_id
from pdplane.engine.pages import Pages
from pdplane.errors import ConfigError
from pdplane.kv.arena import Arena, Pool
from tests.engine.pair import GARBAGE, options


@pytest.fixture(autouse=True)
def _random() -> None:
    mx.random.seed(7)


def rows(heads: int, count: int, width: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal((1, heads, count, width)).astype(dtype)


def filled(cache: KVCache, count: int, *, key_width: int = 16, value_width: int = 16) -> KVCache:
    cache.update_and_fetch(rows(2, count, key_width), rows(2, count, value_width))
    return cache


class HomeMade(KVCache):
    """A subclass may hold more than its parent, so it is not taken for it."""


@pytest.mark.parametrize("cache", [ConcatenateKVCache(), HomeMade()], ids=lambda c: type(c).__name__)
def test_unknown_classes_are_refused_by_name(cache: object) -> None:
    with pytest.raises(ConfigError, match=f"layer 1 keeps a {type(cache).__name__}"):
        refuse_unknown([KVCache(), CacheList(KVCache(), cache)])


def test_a_cache_that_does_not_hold_a_row_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="layer 0 keeps 3 rows for 12 tokens"):
        describe([filled(KVCache(), 3)], 12)


def test_unused_caches_are_left_out() -> None:
    states = ArraysCache(3)
    states[1] = mx.ones((1, 4, 2))
    leaves = describe([KVCache(), RotatingKVCache(8), states, filled(KVCache(), 2)], 2)
    assert [(leaf.layer, [tensor.name for tensor in leaf.tensors]) for leaf in leaves] == [
        (2, ["state1"]),
        (3, ["k", "v"]),
    ]


def test_nested_lists_name_their_places() -> None:
    caches = [CacheList(filled(KVCache(), 2), CacheList(filled(KVCache(), 2)))]
    leaves = describe(caches, 2)
    assert [leaf.prefix() for leaf in leaves] == ["layer.0.c0_", "layer.0.c1_c0_"]
    assert [leaf.find(caches) for leaf in leaves] == [cache for _, _, cache in walk(caches)]


def moved(source: list[object], target: list[object], length: int, *, block_tokens: int = 4) -> tuple[Leaf, ...]:
    """Move caches through an arena full of garbage."""
    leaves = describe(source, length)
    layout = cache_layout(leaves, options("tiny:llama", block_tokens=block_tokens, arena_bytes=1 << 20))
    arena = Arena.zeros(layout.arena_bytes)
    arena.bytes.fill(GARBAGE)
    pages = Pages(layout, arena, leaves)
    counts = {group.group_id: 1 for group in layout.groups}
    if "kv" in counts:
        counts[layout.groups[0].group_id] = -(-length // block_tokens)
    blocks = Pool(layout).allocate(counts)
    for leaf in leaves:
        pages.cut(leaf, leaf.find(source), blocks, range(length))
    for leaf in leaves:
        pages.assemble(leaf, leaf.find(target), blocks, length)
    return leaves


@pytest.mark.parametrize("length", [1, 4, 5, 11])
def test_unequal_and_empty_widths(length: int) -> None:
    plain, latent = filled(KVCache(), length, key_width=8, value_width=24), KVCache()
    latent.update_and_fetch(rows(1, length, 5, mx.float16), mx.zeros((1, 1, length, 0)))
    target = [KVCache(), KVCache()]
    leaves = moved([plain, latent], target, length)
    assert [field_id(leaf, tensor) for leaf in leaves for tensor in carried(leaf)] == [
        "layer.0.k",
        "layer.0.v",
        "layer.1.k",
    ]
    for ours, theirs in zip([plain, latent], target, strict=True):
        assert theirs.offset == length
        for mine, other in zip(ours.keys_and_values(), theirs.keys_and_values(), strict=True):
            assert mine.dtype == other.dtype
            assert mx.array_equal(mine, other)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_quantised(dtype: mx.Dtype, bits: int) -> None:
    source, target = QuantizedKVCache(32, bits), QuantizedKVCache(32, bits)
    source.update_and_fetch(rows(2, 10, 64, dtype), rows(2, 10, 32, dtype))
    moved([source], [target], 10)
    mine, other = source.update_and_fetch(*(step := (mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 32))))), None
    other = target.update_and_fetch(*step)
    for ours, theirs in zip([*mine[0], *mine[1]], [*other[0], *other[1]], strict=True):
        assert mx.array_equal(ours, theirs)


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("length", [1, 5, 7, 8, 9, 16, 25])
def test_rings_wrap_at_the_same_tokens(length: int, keep: int) -> None:
    source, target = RotatingKVCache(8, keep=keep), RotatingKVCache(8, keep=keep)
    if length > 1:
        source.update_and_fetch(rows(2, length - 1, 4), rows(2, length - 1, 4))
    source.update_and_fetch(rows(2, 1, 4), rows(2, 1, 4))
    moved([source], [target], length)
    for _ in range(12):
        step = rows(2, 1, 4), rows(2, 1, 4)
        for ours, theirs in zip(source.update_and_fetch(*step), target.update_and_fetch(*step), strict=True):
            assert mx.array_equal(ours, theirs)
        assert (source.offset, source._idx) == (target.offset, target._idx)


@pytest.mark.parametrize("where", [(4, 3, 8), (5, 9, 8), (5, -1, 8), (5, 5, 9), (5, 3, 4)])
def test_indices_that_do_not_fit_are_refused(where: tuple[int, int, int]) -> None:
    ring = {"ring": mx.array(where, dtype=mx.int64), "ring_k": rows(1, 8, 2), "ring_v": rows(1, 8, 2)}
    with pytest.raises(ValueError, match="do not fit"):
        KINDS[RotatingKVCache].give(RotatingKVCache(8), ring, 5)


@pytest.mark.parametrize("length", [1, 5, 8, 9, 25, 300])
def test_chunks_are_cut_at_the_same_tokens(length: int) -> None:
    source, target = ChunkedKVCache(8), ChunkedKVCache(8)
    if length > 1:
        source.update_and_fetch(rows(2, length - 1, 4), rows(2, length - 1, 4))
    source.maybe_trim_front()
    source.update_and_fetch(rows(2, 1, 4), rows(2, 1, 4))
    moved([source], [target], length)
    for _ in range(12):
        for cache in (source, target):
            cache.maybe_trim_front()
        step = rows(2, 1, 4), rows(2, 1, 4)
        for ours, theirs in zip(source.update_and_fetch(*step), target.update_and_fetch(*step), strict=True):
            assert mx.array_equal(ours, theirs)
        assert (source.offset, source.start_position) == (target.offset, target.start_position)


@pytest.mark.parametrize("where", [(4, 0, 8), (5, 6, 8), (5, -5, 8), (5, 0, 4), (5, 0, 9999)])
def test_a_chunk_whose_indices_do_not_fit_is_refused(where: tuple[int, int, int]) -> None:
    chunk = {"chunk": mx.array(where, dtype=mx.int64), "chunk_k": rows(1, 9, 2), "chunk_v": rows(1, 9, 2)}
    with pytest.raises(ValueError, match="do not fit"):
        KINDS[ChunkedKVCache].give(ChunkedKVCache(8), chunk, 5)


def test_states_keep_their_dtypes() -> None:
    source, target = ArraysCache(2), ArraysCache(2)
    source[0], source[1] = mx.random.normal((1, 3, 5)).astype(mx.bfloat16), mx.random.normal((1, 2, 2, 2))
    moved([source], [target], 9)
    for ours, theirs in zip(source.cache, target.cache, strict=True):
        assert ours.dtype == theirs.dtype
        assert mx.array_equal(ours, theirs)


def test_the_first_decode_step_writes_in_place() -> None:
    target = KVCache()
    moved([filled(KVCache(), 255)], [target], 255, block_tokens=16)
    capacity = target.keys.shape[2]
    assert capacity >= 255 + 256
    assert capacity % target.step == 0
    for _ in range(capacity - 255):
        target.update_and_fetch(rows(2, 1, 16), rows(2, 1, 16))
    assert target.keys.shape[2] == capacity


def test_a_leaf_is_replaced_in_its_own_place() -> None:
    caches = [filled(KVCache(), 2), CacheList(filled(KVCache(), 2), CacheList(filled(KVCache(), 2)))]
    for leaf in describe(caches, 2):
        others = [cache for layer, path, cache in walk(caches) if (layer, path) != (leaf.layer, leaf.path)]
        fresh = KVCache()
        leaf.put(caches, fresh)
        assert leaf.find(caches) is fresh
        assert [c for layer, path, c in walk(caches) if (layer, path) != (leaf.layer, leaf.path)] == others
