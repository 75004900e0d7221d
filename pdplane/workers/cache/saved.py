"""A prefix's caches as named tensors and numbers, and back, for each of mlx-lm's classes that can be moved.

Unlike the pages of an arena, a saved cache is whole and stands at any token: a ring keeps all its physical rows, so the
copy grows and wraps at the same tokens as the original and continues with the same bits. Classes that are not listed
here are refused by name. Everything here runs on the MLX thread; the resulting values may be read by any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pdplane.engine.caches import walk
from pdplane.engine.untyped import Cache
from pdplane.engine.views import Numbers, bits_of, carrier
from pdplane.errors import ConfigError, IncompatibleCache

Tensors = dict[str, mx.array]
_ring: Any = RotatingKVCache  # mlx-lm's constructors have no types
_chunked: Any = ChunkedKVCache
_list: Any = CacheList
Counts = Mapping[str, int]

DTYPES: Mapping[str, mx.Dtype] = {
    str(dtype).removeprefix("mlx.core."): dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.int32, mx.int64, mx.uint8, mx.int8, mx.bool_)
}


@attrs.frozen(eq=False)
class SavedTensor:
    """One tensor: its MLX dtype by name, and its bits as unsigned integers (int64 for 8 bytes) of the same shape."""

    name: str
    dtype: str
    bits: Numbers

    @property
    def nbytes(self) -> int:
        return int(self.bits.nbytes)


@attrs.frozen(eq=False)
class SavedCache:
    """One cache object; `place` is `layer.<n>`, with a dot and a number more for each CacheList around it."""

    place: str
    class_name: str
    numbers: Counts
    tensors: tuple[SavedTensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@attrs.frozen
class _Form:
    """How one class is taken apart and put together.

    `fixed` names the numbers that belong to the model; `rows` tells how many rows the tensors of a cache with these
    numbers have along their token axis, as (fewest, most), None when they have no such axis.
    """

    take: Callable[[Cache], tuple[Counts, Tensors]]
    make: Callable[[Counts, Tensors], Cache]
    fixed: tuple[str, ...] = ()
    rows: Callable[[Counts], tuple[int, int]] | None = None


def _take_plain(cache: Cache) -> tuple[Counts, Tensors]:
    return {"offset": cache.offset}, _named(("keys", "values"), (cache.keys, cache.values), cache.offset)


def _make_plain(kind: Callable[[], Cache]) -> Callable[[Counts, Tensors], Cache]:
    def make(numbers: Counts, tensors: Tensors) -> Cache:
        cache = kind()
        cache.keys, cache.values, cache.offset = tensors["keys"], tensors["values"], numbers["offset"]
        return cache

    return make


_QUANTISED = tuple(f"{side}.{part}" for side in ("keys", "values") for part in ("packed", "scales", "biases"))


def _take_quantised(cache: Cache) -> tuple[Counts, Tensors]:
    numbers = {"offset": cache.offset, "group_size": cache.group_size, "bits": cache.bits}
    return numbers, _named(_QUANTISED, (*cache.keys, *cache.values), cache.offset)


def _make_quantised(numbers: Counts, tensors: Tensors) -> Cache:
    cache: Cache = QuantizedKVCache(numbers["group_size"], numbers["bits"])
    parts = [tensors[name] for name in _QUANTISED]
    cache.keys, cache.values, cache.offset = tuple(parts[:3]), tuple(parts[3:]), numbers["offset"]
    return cache


def _take_ring(cache: Cache) -> tuple[Counts, Tensors]:
    numbers = {"offset": cache.offset, "index": cache._idx, "keep": cache.keep, "max_size": cache.max_size}
    return numbers, _named(("keys", "values"), (cache.keys, cache.values), None)


def _make_ring(numbers: Counts, tensors: Tensors) -> Cache:
    cache: Cache = _ring(numbers["max_size"], numbers["keep"])
    cache.keys, cache.values = tensors["keys"], tensors["values"]
    cache.offset, cache._idx = numbers["offset"], numbers["index"]
    return cache


def _ring_rows(numbers: Counts) -> tuple[int, int]:
    # A chunk of many tokens leaves more rows than the window, one token at a time never does.
    return min(numbers["offset"], numbers["max_size"]), max(numbers["offset"], numbers["max_size"])


def _take_chunked(cache: Cache) -> tuple[Counts, Tensors]:
    numbers = {"offset": cache.offset, "start": cache.start_position, "chunk_size": cache.chunk_size}
    return numbers, _named(("keys", "values"), (cache.keys, cache.values), cache.offset - cache.start_position)


def _make_chunked(numbers: Counts, tensors: Tensors) -> Cache:
    cache: Cache = _chunked(numbers["chunk_size"])
    cache.keys, cache.values = tensors["keys"], tensors["values"]
    cache.offset, cache.start_position = numbers["offset"], numbers["start"]
    return cache


def _take_arrays(cache: Cache) -> tuple[Counts, Tensors]:
    if cache.left_padding is not None or cache.lengths is not None:
        raise ConfigError("an ArraysCache of a batch cannot be saved, only one of a single sequence")
    tensors = {f"state{n}": array for n, array in enumerate(cache.cache) if array is not None}
    return {"size": len(cache.cache)}, tensors


def _make_arrays(numbers: Counts, tensors: Tensors) -> Cache:
    cache: Cache = ArraysCache(numbers["size"])
    for name, array in tensors.items():
        cache[int(name.removeprefix("state"))] = array
    return cache


def _offset_rows(numbers: Counts) -> tuple[int, int]:
    return numbers["offset"], numbers["offset"]


FORMS: Mapping[type, _Form] = {
    KVCache: _Form(_take_plain, _make_plain(KVCache), (), _offset_rows),
    ConcatenateKVCache: _Form(_take_plain, _make_plain(ConcatenateKVCache), (), _offset_rows),
    QuantizedKVCache: _Form(_take_quantised, _make_quantised, ("group_size", "bits"), _offset_rows),
    RotatingKVCache: _Form(_take_ring, _make_ring, ("keep", "max_size"), _ring_rows),
    ChunkedKVCache: _Form(
        _take_chunked, _make_chunked, ("chunk_size",), lambda numbers: (numbers["offset"] - numbers["start"],) * 2
    ),
    ArraysCache: _Form(_take_arrays, _make_arrays, ("size",)),
}
_BY_NAME = {kind.__name__: form for kind, form in FORMS.items()}


def save_caches(caches: Sequence[Cache]) -> tuple[SavedCache, ...]:
    """Return every cache that the model has filled, as evaluated values.

    Raises ConfigError that names a class which cannot be saved.
    """
    return tuple(saved for place, cache in _places(caches) if (saved := _save(place, cache)).tensors)


def restore_caches(saved: Sequence[SavedCache], fresh: Sequence[Cache]) -> list[Cache]:
    """Return `saved` as caches in the places of a model's `fresh` ones; `check_caches` must have accepted it."""
    found = {cache.place: cache for cache in saved}
    return [_restored(f"layer.{layer}", cache, found) for layer, cache in enumerate(fresh)]


def longest_nbytes(caches: Sequence[SavedCache], context: int) -> int:
    """Return how many bytes the tensors of caches like these can have after up to `context` tokens."""
    return sum(_longest_nbytes(cache, tensor, context) for cache in caches for tensor in cache.tensors)


def _longest_nbytes(cache: SavedCache, tensor: SavedTensor, context: int) -> int:
    rows = _BY_NAME[cache.class_name].rows
    if rows is None:
        return tensor.nbytes
    _fewest, most = rows({**cache.numbers, "offset": context, "start": 0})
    return tensor.nbytes // max(1, int(tensor.bits.shape[2])) * most


def check_caches(saved: Sequence[SavedCache], ours: Sequence[SavedCache], token_count: int) -> None:
    """Raise IncompatibleCache unless a model whose caches look like `ours` can go on from `saved`.

    `ours` are the same model's caches after any prompt: classes, fixed numbers, dtypes and shapes must agree, and every
    cache must stand at `token_count` tokens.
    """
    theirs = {cache.place: cache for cache in saved}
    if list(theirs) != [cache.place for cache in ours] or len(theirs) != len(saved):
        raise IncompatibleCache("caches", _listed(cache.place for cache in ours), _listed(c.place for c in saved))
    for own in ours:
        _check_cache(own, theirs[own.place], token_count)


def _check_cache(own: SavedCache, their: SavedCache, token_count: int) -> None:
    _agree(f"{own.place}.class", own.class_name, their.class_name)
    form = _BY_NAME[own.class_name]
    _agree(f"{own.place}.numbers", _listed(own.numbers), _listed(their.numbers))
    for name in form.fixed:
        _agree(f"{own.place}.{name}", own.numbers[name], their.numbers[name])
    _check_numbers(own.place, their.numbers, token_count)
    _agree(f"{own.place}.tensors", _listed(t.name for t in own.tensors), _listed(t.name for t in their.tensors))
    for mine, other in zip(own.tensors, their.tensors, strict=True):
        _check_tensor(f"{own.place}.{mine.name}", mine, other, form, their.numbers)


def _check_numbers(place: str, numbers: Counts, token_count: int) -> None:
    if "offset" in numbers:
        _agree(f"{place}.offset", token_count, numbers["offset"])
    start = numbers.get("start", 0)
    if not 0 <= start <= token_count:
        raise IncompatibleCache(f"{place}.start", f"0..{token_count}", str(start))


def _check_tensor(where: str, mine: SavedTensor, other: SavedTensor, form: _Form, numbers: Counts) -> None:
    _agree(f"{where}.dtype", mine.dtype, other.dtype)
    shape, wanted = other.bits.shape, mine.bits.shape
    if form.rows is None:
        _agree(f"{where}.shape", wanted, shape)
        return
    _agree(f"{where}.shape", (*wanted[:2], "rows", *wanted[3:]), (*shape[:2], "rows", *shape[3:]))
    fewest, most = form.rows(numbers)
    if not fewest <= shape[2] <= most:
        raise IncompatibleCache(f"{where}.rows", f"{fewest}..{most}", str(shape[2]))
    if not 0 <= numbers.get("index", 0) <= shape[2]:
        raise IncompatibleCache(f"{where}.index", f"0..{shape[2]}", str(numbers["index"]))


def _agree(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise IncompatibleCache(field, str(ours), str(theirs))


def _listed(names: Mapping[str, object] | Iterator[str]) -> str:
    return " ".join(names)


def _save(place: str, cache: Cache) -> SavedCache:
    form = FORMS.get(type(cache))
    if form is None:
        raise ConfigError(f"{place} keeps a {type(cache).__name__}, which pdplane cannot save")
    if getattr(cache, "keys", ()) is None:
        return SavedCache(place, type(cache).__name__, {}, ())
    numbers, tensors = form.take(cache)
    saved = tuple(_saved_tensor(name, array) for name, array in tensors.items())
    return SavedCache(place, type(cache).__name__, {name: int(number) for name, number in numbers.items()}, saved)


def _saved_tensor(name: str, array: mx.array) -> SavedTensor:
    dtype = str(array.dtype).removeprefix("mlx.core.")
    if dtype not in DTYPES:
        raise ConfigError(f"a cache tensor of dtype {dtype} cannot be saved")
    # A copy: the cache behind the view may grow in place while another thread still sends this.
    return SavedTensor(name, dtype, np.array(bits_of(array), copy=True, order="C"))


def _restored(place: str, cache: Cache, saved: Mapping[str, SavedCache]) -> Cache:
    if type(cache) is CacheList:
        inner = [_restored(f"{place}.{number}", one, saved) for number, one in enumerate(cache.caches)]
        return _list(*inner)
    if place not in saved:
        return cache
    found = saved[place]
    return _BY_NAME[found.class_name].make(found.numbers, {t.name: _array(t) for t in found.tensors})


def _array(tensor: SavedTensor) -> mx.array:
    dtype = DTYPES[tensor.dtype]
    return mx.array(np.ascontiguousarray(tensor.bits).view(carrier(dtype))).view(dtype)


def _places(caches: Sequence[Cache]) -> Iterator[tuple[str, Cache]]:
    for layer, path, cache in walk(caches):
        if cache is not None:
            yield ".".join(("layer", str(layer), *map(str, path))), cache


def _named(names: Sequence[str], arrays: Sequence[mx.array], rows: int | None) -> Tensors:
    return {name: array[..., :rows, :] for name, array in zip(names, arrays, strict=True)}
