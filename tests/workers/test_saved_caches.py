"""Every cache class through tensors, a safetensors file and back: bit-equal, and refused when it does not fit."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import attrs
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models import cache as lm

from pdplane.engine.thread import EngineThread
from pdplane.errors import ConfigError, IncompatibleCache, WireError
from pdplane.workers.cache.codecs import expand, shrink
from pdplane.workers.cache.file import CacheFile, CacheManifest, decode_cache_file, encode_cache_file
from pdplane.workers.cache.saved import SavedCache, check_caches, longest_nbytes, restore_caches, save_caches

Untyped: TypeAlias = Any  # mlx-lm's caches and their states have no types

MANIFEST = CacheManifest("r1", "c1", "w1", "p1", "doc", 5, "float32", "0.32", "0.32")


@pytest.fixture(scope="module")
def mlx_thread() -> Iterator[EngineThread]:
    thread = EngineThread()
    thread.start()
    thread.call(lambda: None)  # the first call starts it
    yield thread
    thread.close()


def rows(count: int, dtype: mx.Dtype = mx.bfloat16, width: int = 64) -> mx.array:
    return mx.random.normal((1, 2, count, width), key=mx.random.key(count + width)).astype(dtype)


def filled(cache: Untyped, *steps: int, values_width: int = 64) -> Untyped:
    for count in steps:
        cache.update_and_fetch(rows(count), rows(count, width=values_width))
    return cache


def arrays() -> Untyped:
    cache: Untyped = lm.ArraysCache(3)
    cache[0], cache[2] = rows(3, mx.float32), mx.array([True, False])
    return cache


CACHES: dict[str, Callable[[], Any]] = {
    "plain": lambda: filled(lm.KVCache(), 4, 1),
    "plain-unequal": lambda: filled(lm.KVCache(), 5, values_width=16),
    "concatenate": lambda: filled(lm.ConcatenateKVCache(), 3, 2),
    "quantised-8": lambda: filled(lm.QuantizedKVCache(64, 8), 5),
    "quantised-4": lambda: filled(lm.QuantizedKVCache(32, 4), 4, 1),
    "ring-growing": lambda: filled(lm.RotatingKVCache(8, 2), 1, 1, 1, 1, 1),
    "ring-wrapped": lambda: filled(lm.RotatingKVCache(3, 0), *[1] * 5),
    "ring-after-a-chunk": lambda: filled(lm.RotatingKVCache(3, 1), 5),
    "ring-chunk-and-step": lambda: filled(lm.RotatingKVCache(3, 1), 4, 1),
    "chunked": lambda: filled(lm.ChunkedKVCache(8), 5),
    "arrays": arrays,
    "list": lambda: lm.CacheList(filled(lm.KVCache(), 5), arrays(), filled(lm.RotatingKVCache(3, 0), 5)),
}


def fresh_like(cache: Untyped) -> Untyped:
    if isinstance(cache, lm.CacheList):
        return lm.CacheList(*map(fresh_like, cache.caches))
    return lm.KVCache()  # a place holder: what stands there is replaced


def leaves(state: Untyped) -> Iterator[Any]:
    if isinstance(state, list | tuple):
        for item in state:
            yield from leaves(item)
    else:
        yield state


def same(left: Untyped, right: Untyped) -> bool:
    """Equal states, arrays by bits; spare rows that hold no token do not count."""
    pairs = list(zip(leaves(left), leaves(right), strict=True))
    return all(
        mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)).item() if isinstance(a, mx.array) else a == b
        for a, b in pairs
    )


def step(cache: Untyped) -> Untyped:
    """What attention sees after one more token, and then the whole state."""
    if isinstance(cache, lm.CacheList):
        return [step(inner) for inner in cache.caches]
    if isinstance(cache, lm.ArraysCache):
        return cache.state
    return cache.update_and_fetch(rows(1), rows(1, width=cache.values[0].shape[-1] if _unequal(cache) else 64))


def _unequal(cache: Untyped) -> bool:
    return isinstance(cache, lm.KVCache) and cache.values.shape[-1] != 64


@pytest.mark.parametrize("name", CACHES)
def test_round_trip_is_bit_equal(mlx_thread: EngineThread, name: str) -> None:
    def run() -> None:
        original = CACHES[name]()
        saved = save_caches([original, lm.KVCache()])
        data = encode_cache_file(CacheFile(MANIFEST, saved))
        file = decode_cache_file(data)
        assert file.manifest == MANIFEST
        check_caches(file.caches, saved, 5)
        copy, unused = restore_caches(file.caches, [fresh_like(original), lm.KVCache()])
        assert unused.keys is None
        assert type(copy) is type(original)
        again = encode_cache_file(CacheFile(MANIFEST, save_caches([copy])))
        assert again == data
        for _ in range(3):  # both go on alike, also over the end of a window
            assert same(step(copy), step(original))

    mlx_thread.call(run)


def test_any_safetensors_reader_opens_it(mlx_thread: EngineThread) -> None:
    def run() -> None:
        cache = CACHES["plain"]()
        data = encode_cache_file(CacheFile(MANIFEST, save_caches([cache])))
        load: Untyped = mx.load
        tensors, metadata = load(io.BytesIO(data), format="safetensors", return_metadata=True)
        assert metadata["prefix_hash"] == "p1"
        assert mx.array_equal(tensors["layer.0:keys"], cache.keys[..., :5, :]).item()

    mlx_thread.call(run)


def test_other_classes_are_refused_by_name(mlx_thread: EngineThread) -> None:
    class LayerCache:
        keys = 1

    with pytest.raises(ConfigError, match=r"layer\.0 keeps a LayerCache"):
        mlx_thread.call(lambda: save_caches([LayerCache()]))


def _saved(thread: EngineThread, name: str) -> tuple[SavedCache, ...]:
    return thread.call(lambda: save_caches([CACHES[name]()]))


def _changed(cache: SavedCache, **numbers: int) -> SavedCache:
    return attrs.evolve(cache, numbers={**cache.numbers, **numbers})


def _with_bits(cache: SavedCache, bits: Untyped, dtype: str | None = None) -> SavedCache:
    first = attrs.evolve(cache.tensors[0], bits=bits, dtype=dtype or cache.tensors[0].dtype)
    return attrs.evolve(cache, tensors=(first, *cache.tensors[1:]))


MISMATCHES: dict[str, tuple[str, Callable[[SavedCache], SavedCache]]] = {
    "layer.0.class": ("plain", lambda c: attrs.evolve(c, class_name="ConcatenateKVCache")),
    "caches": ("plain", lambda c: attrs.evolve(c, place="layer.1")),
    "layer.0.offset": ("plain", lambda c: _changed(c, offset=6)),
    "layer.0.numbers": ("plain", lambda c: _changed(c, more=1)),
    "layer.0.bits": ("quantised-8", lambda c: _changed(c, bits=4)),
    "layer.0.group_size": ("quantised-8", lambda c: _changed(c, group_size=32)),
    "layer.0.max_size": ("ring-wrapped", lambda c: _changed(c, max_size=4)),
    "layer.0.keep": ("ring-wrapped", lambda c: _changed(c, keep=1)),
    "layer.0.keys.index": ("ring-wrapped", lambda c: _changed(c, index=4)),
    "layer.0.start": ("chunked", lambda c: _changed(c, start=6)),
    "layer.0.size": ("arrays", lambda c: _changed(c, size=4)),
    "layer.0.keys.dtype": ("plain", lambda c: _with_bits(c, c.tensors[0].bits, "float16")),
    "layer.0.keys.shape": ("plain", lambda c: _with_bits(c, c.tensors[0].bits[:, :1])),
    "layer.0.keys.rows": ("plain", lambda c: _with_bits(c, c.tensors[0].bits[:, :, :4])),
    "layer.0.state0.shape": ("arrays", lambda c: _with_bits(c, c.tensors[0].bits[:, :1])),
    "layer.0.tensors": ("plain", lambda c: attrs.evolve(c, tensors=c.tensors[:1])),
}


@pytest.mark.parametrize("field", MISMATCHES)
def test_each_mismatch_names_its_field(mlx_thread: EngineThread, field: str) -> None:
    name, change = MISMATCHES[field]
    ours = _saved(mlx_thread, name)
    check_caches(ours, ours, 5)
    with pytest.raises(IncompatibleCache) as refused:
        check_caches(tuple(map(change, ours)), ours, 5)
    assert refused.value.field == field


@pytest.mark.parametrize("field", [f.name for f in attrs.fields(CacheManifest) if f.name != "document_id"])
def test_each_fact_of_the_manifest_is_compared(field: str) -> None:
    theirs = attrs.evolve(MANIFEST, **{field: 6 if field == "token_count" else "other"})
    with pytest.raises(IncompatibleCache) as refused:
        theirs.check(MANIFEST)
    assert refused.value.field == field
    attrs.evolve(MANIFEST, document_id="another").check(MANIFEST)


@pytest.mark.parametrize(("codec", "error"), [("q8", 0.03), ("q4", 0.4)])
def test_lossy_forms_keep_shapes_and_come_close(mlx_thread: EngineThread, codec: str, error: float) -> None:
    caches = (*_saved(mlx_thread, "plain"), *_saved(mlx_thread, "ring-after-a-chunk"), *_saved(mlx_thread, "arrays"))
    small = shrink(caches, codec)
    assert sum(c.nbytes for c in small[:2]) < sum(c.nbytes for c in caches[:2]) * (0.7 if codec == "q8" else 0.5)
    for before, after in zip(caches, expand(small, codec), strict=True):
        for mine, other in zip(before.tensors, after.tensors, strict=True):
            assert (mine.name, mine.dtype, mine.bits.shape) == (other.name, other.dtype, other.bits.shape)
            if mine.dtype == "bfloat16":
                wide = [(t.bits.astype(np.uint32) << 16).view(np.float32) for t in (mine, other)]
                assert np.abs(wide[0] - wide[1]).max() < error
            else:
                assert np.array_equal(mine.bits, other.bits)


def test_lossy_parts_that_do_not_fit_are_refused(mlx_thread: EngineThread) -> None:
    small = shrink(_saved(mlx_thread, "plain"), "q8")[0]
    broken = attrs.evolve(small, tensors=tuple(t for t in small.tensors if t.name != "keys.low"))
    with pytest.raises(IncompatibleCache, match=r"layer\.0\.keys"):
        expand([broken], "q8")


def _file(**header: Untyped) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


_META = {"format": "pdplane-cache/1", **{k: str(v) for k, v in attrs.asdict(MANIFEST).items()}, "caches": "[]"}
_TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BAD_FILES: dict[str, bytes] = {
    "empty": b"",
    "header longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "no metadata": _file(),
    "tensor without bytes": _file(__metadata__=_META, a=_TENSOR),
    "a huge shape": _file(__metadata__=_META, a={**_TENSOR, "shape": [2**40, 2**40]}) + bytes(4),
    "a gap": _file(__metadata__=_META, a={**_TENSOR, "data_offsets": [4, 8]}) + bytes(8),
    "bytes behind the last tensor": _file(__metadata__=_META) + b"x",
    "an unknown dtype": _file(__metadata__=_META, a={**_TENSOR, "dtype": "F8"}) + bytes(4),
    "a tensor of no cache": _file(__metadata__=_META, a=_TENSOR) + bytes(4),
    "a negative count": _file(__metadata__={**_META, "token_count": "-1"}),
    "a nested list": _file(__metadata__={**_META, "caches": "[" * 100_000}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_wire_errors(name: str) -> None:
    with pytest.raises(WireError):
        decode_cache_file(BAD_FILES[name])


def test_another_format_is_incompatible() -> None:
    with pytest.raises(IncompatibleCache, match="format"):
        decode_cache_file(_file(__metadata__={"format": "other/2"}))


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_cleanly(data: bytes) -> None:
    with pytest.raises((WireError, IncompatibleCache)):
        decode_cache_file(len(data).to_bytes(8, "little") + data)


@pytest.mark.parametrize("name", CACHES)
def test_no_cache_is_larger_than_the_bound_of_its_context(mlx_thread: EngineThread, name: str) -> None:
    def run() -> tuple[int, int, int]:
        original = CACHES[name]()
        before, bound = save_caches([original]), longest_nbytes(save_caches([original]), 25)
        for _ in range(20):
            step(original)
        return sum(cache.nbytes for cache in before), sum(cache.nbytes for cache in save_caches([original])), bound

    small, large, bound = mlx_thread.call(run)
    assert max(small, large) <= bound <= 25 * small
