"""Every cache class of mlx-lm that can be moved, as named tensors and back, bit for bit.

A **history** tensor has one row a token, `[1, heads, rows, width]`, and is cut into pages. A **state** tensor is moved
whole after the last prefill step: a sliding window's ring in physical order with its indices, a recurrent state.
Classes that are not listed here are refused by name, since guessing what they hold would give silent wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import attrs
import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pdplane.engine.untyped import Cache
from pdplane.errors import ConfigError, InternalError

Tensors = Mapping[str, mx.array]


class Kind(Protocol):
    """How one cache class is turned into tensors and filled from them."""

    @property
    def is_history(self) -> bool: ...

    def length(self, cache: Cache) -> int | None:
        """Return how many tokens the cache holds; None when it does not count them."""

    def take(self, cache: Cache) -> Tensors:
        """Return the cache's tensors by name; history tensors with spare rows beyond the length."""

    def give(self, cache: Cache, tensors: Tensors, length: int) -> None:
        """Fill a fresh cache of this class; `tensors` are new arrays that nobody else holds."""


class PlainKind:
    """KVCache: keys and values, whose widths may differ (latent attention)."""

    is_history = True

    def length(self, cache: Cache) -> int:
        return int(cache.offset)

    def take(self, cache: Cache) -> Tensors:
        return {} if cache.keys is None else {"k": cache.keys, "v": cache.values}

    def give(self, cache: Cache, tensors: Tensors, length: int) -> None:
        cache.keys, cache.values, cache.offset = tensors["k"], tensors["v"], length


class QuantizedKind:
    """QuantizedKVCache: packed words, scales and biases, for keys and for values."""

    is_history = True
    _keys = ("k_packed", "k_scales", "k_biases")
    _values = ("v_packed", "v_scales", "v_biases")

    def length(self, cache: Cache) -> int:
        return int(cache.offset)

    def take(self, cache: Cache) -> Tensors:
        return dict(zip(self._keys + self._values, (*cache.keys, *cache.values), strict=True))

    def give(self, cache: Cache, tensors: Tensors, length: int) -> None:
        cache.keys = tuple(tensors[name] for name in self._keys)
        cache.values = tuple(tensors[name] for name in self._values)
        cache.offset = length


class RingKind:
    """RotatingKVCache: the ring in physical order, and `ring` = (tokens seen, write index, physical rows).

    The tensors always have `max_size` rows; a ring that has not grown to that has zeros behind its own rows. It is
    rebuilt with the same number of physical rows, so that it grows and wraps at the same tokens as the original.
    """

    is_history = False

    def length(self, cache: Cache) -> int:
        return int(cache.offset)

    def take(self, cache: Cache) -> Tensors:
        if cache.keys is None:
            return {}
        rows = int(cache.keys.shape[2])
        if rows > cache.max_size:
            raise InternalError(f"a ring of {cache.max_size} rows holds {rows}: its last step was not one token")
        where = mx.array([cache.offset, cache._idx, rows], dtype=mx.int64)
        return {
            "ring_k": _pad_rows(cache.keys, cache.max_size),
            "ring_v": _pad_rows(cache.values, cache.max_size),
            "ring": where,
        }

    def give(self, cache: Cache, tensors: Tensors, length: int) -> None:
        offset, index, rows = (int(number) for number in _integers(tensors["ring"]))
        if offset != length or not 0 <= index <= rows <= cache.max_size or rows < min(offset, cache.max_size):
            raise ValueError(f"the ring's indices {(offset, index, rows)} do not fit a prompt of {length} tokens")
        cache.keys, cache.values = tensors["ring_k"][..., :rows, :], tensors["ring_v"][..., :rows, :]
        cache.offset, cache._idx = offset, index


class ArraysKind:
    """ArraysCache: the fixed-size states of a recurrent or convolutional layer."""

    is_history = False

    def length(self, cache: Cache) -> None:
        return None

    def take(self, cache: Cache) -> Tensors:
        return {f"state{n}": array for n, array in enumerate(cache.cache) if array is not None}

    def give(self, cache: Cache, tensors: Tensors, length: int) -> None:
        for name, array in tensors.items():
            cache[int(name.removeprefix("state"))] = array


class ChunkedKind:
    """ChunkedKVCache: the rows of the last attention chunk and one more, and `chunk` = (tokens seen, tokens cut off,
    physical rows).

    The tensors always have `chunk_size` + 1 rows, with zeros behind the cache's own.
    """

    is_history = False

    def length(self, cache: Cache) -> int:
        return int(cache.offset)

    def take(self, cache: Cache) -> Tensors:
        if cache.keys is None:
            return {}
        held, most = cache.offset - cache.start_position, cache.chunk_size + 1
        if held > most:
            raise InternalError(f"a chunk of {cache.chunk_size} rows holds {held}: its last step was not one token")
        where = mx.array([cache.offset, cache.start_position, cache.keys.shape[2]], dtype=mx.int64)
        return {
            "chunk_k": _pad_rows(cache.keys[..., :held, :], most),
            "chunk_v": _pad_rows(cache.values[..., :held, :], most),
            "chunk": where,
        }

    def give(self, cache: Cache, tensors: Tensors, length: int) -> None:
        offset, cut, rows = (int(number) for number in _integers(tensors["chunk"]))
        held = offset - cut
        if offset != length or not 0 <= held <= cache.chunk_size + 1 or not held <= rows <= held + cache.step:
            raise ValueError(f"the chunk's indices {(offset, cut, rows)} do not fit a prompt of {length} tokens")
        cache.keys = _pad_rows(tensors["chunk_k"][..., :held, :], rows)
        cache.values = _pad_rows(tensors["chunk_v"][..., :held, :], rows)
        cache.offset, cache.start_position = offset, cut


KINDS: Mapping[type, Kind] = {
    KVCache: PlainKind(),
    QuantizedKVCache: QuantizedKind(),
    RotatingKVCache: RingKind(),
    ArraysCache: ArraysKind(),
    ChunkedKVCache: ChunkedKind(),
}


@attrs.frozen
class Tensor:
    """One tensor's geometry: history `(heads, width)` without its token axis, state its whole shape."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype


@attrs.frozen
class Leaf:
    """One cache object inside the model's list; `path` leads through nested CacheLists."""

    layer: int
    path: tuple[int, ...]
    cache_class: type
    tensors: tuple[Tensor, ...]

    @property
    def kind(self) -> Kind:
        return KINDS[self.cache_class]

    def find(self, caches: Sequence[Cache]) -> Cache:
        """Return this leaf's cache object in a model's list of caches."""
        found = caches[self.layer]
        for step in self.path:
            found = found[step]
        return found

    def put(self, caches: list[Cache], cache: Cache) -> None:
        """Replace this leaf's cache object by another one."""
        caches[self.layer] = _replaced(caches[self.layer], self.path, cache)

    def prefix(self) -> str:
        """Return the start of this leaf's field ids, ending with a dot or underscore."""
        return f"layer.{self.layer}." + "".join(f"c{step}_" for step in self.path)


def walk(caches: Sequence[Cache]) -> Iterator[tuple[int, tuple[int, ...], Cache]]:
    """Yield (layer, path, cache) of every leaf cache, in a fixed order."""
    for layer, cache in enumerate(caches):
        yield from ((layer, path, leaf) for path, leaf in _inside(cache, ()))


def refuse_unknown(caches: Sequence[Cache]) -> None:
    """Raise ConfigError that names the first cache class which cannot be moved."""
    for layer, _, cache in walk(caches):
        if cache is not None and type(cache) not in KINDS:
            raise ConfigError(
                f"layer {layer} keeps a {type(cache).__name__}, which pdplane cannot move: it has no form for its rows"
            )


def describe(caches: Sequence[Cache], length: int) -> tuple[Leaf, ...]:
    """Return the leaves of caches after a prompt of `length` tokens; caches that the model never uses are left out.

    Raises ConfigError for a class that cannot be moved, or a cache that does not hold one row a token.
    """
    refuse_unknown(caches)
    leaves = [_describe_leaf(layer, path, cache, length) for layer, path, cache in walk(caches) if cache is not None]
    return tuple(leaf for leaf in leaves if leaf.tensors)


def _describe_leaf(layer: int, path: tuple[int, ...], cache: Cache, length: int) -> Leaf:
    kind = KINDS[type(cache)]
    tensors = kind.take(cache)
    held = kind.length(cache)
    if tensors and held is not None and held != length:
        raise ConfigError(f"layer {layer} keeps {held} rows for {length} tokens, which pdplane cannot move")
    cut: Callable[[mx.array], tuple[int, ...]] = _row_shape if kind.is_history else _whole_shape
    described = tuple(Tensor(name, cut(array), array.dtype) for name, array in sorted(tensors.items()))
    return Leaf(layer, path, type(cache), described)


# ---- Caches of several sequences, as mlx-lm's batch classes hold them
#
# mlx-lm's `merge`, `extend` and `filter` do it, but for two cases of the class that grows, because all members wait
# meanwhile: a newcomer that is longer makes `extend` copy everybody's rows twice, and the next step, which finds no
# room for its rows, a third time; and `filter` copies the rows that it cuts off (SmolLM2 in f32, 8 members of 75 rows
# and a newcomer of 450: that step 310 ms instead of 490, usual are 175; its leaving 300 instead of 390).


_cache_list: Any = CacheList
_ROOM = 256
"""Rows that a growing cache adds at a time, as mlx-lm's do."""


def joined(mine: Cache, its: Cache, *, is_merged: bool) -> Cache:
    """Return the cache of a batch, or of one sequence if not `is_merged`, with one more sequence at its end."""
    if isinstance(its, CacheList):
        pairs = zip(mine.caches, its.caches, strict=True)
        return _cache_list(*(joined(one, other, is_merged=is_merged) for one, other in pairs))
    if is_merged and type(its) is KVCache and its.offset > mine._idx:
        return _lengthened(mine, its)
    if not is_merged:
        return mine.merge([mine, its])
    mine.extend(its.merge([its]))
    return mine


def keep(cache: Cache, numbers: list[int]) -> None:
    """Leave only these sequences, in ascending order, in a batch's cache; rows that pad all of them go too."""
    if isinstance(cache, CacheList):
        for inner in cache.caches:
            keep(inner, numbers)
    elif numbers and type(cache) is BatchKVCache and cache.keys is not None:
        _cut(cache, numbers)
    else:
        cache.filter(numbers)


def _cut(cache: Cache, numbers: list[int]) -> None:
    kept = mx.array(numbers)
    cache.offset, cache.left_padding = cache.offset[kept], cache.left_padding[kept]
    first = min(_integers(cache.left_padding))
    cache.keys, cache.values = (
        mx.concatenate([array[run, :, first:] for run in _runs(numbers)]) for array in (cache.keys, cache.values)
    )
    cache.left_padding, cache._idx = cache.left_padding - first, cache._idx - first


def _runs(numbers: list[int]) -> list[slice]:
    """Return ascending numbers as slices of neighbours."""
    breaks = [place for place in range(1, len(numbers)) if numbers[place] != numbers[place - 1] + 1]
    return [
        slice(numbers[start], numbers[end - 1] + 1)
        for start, end in zip([0, *breaks], [*breaks, len(numbers)], strict=True)
    ]


def _lengthened(mine: Cache, its: Cache) -> Cache:
    """Join a history that is longer than a batch's: all rows end where its rows end, with room for more behind."""
    left = its.offset - mine._idx
    found: Cache = BatchKVCache([])
    found.keys = _side_by_side(mine.keys[:, :, : mine._idx], its.keys[:, :, : its.offset])
    found.values = _side_by_side(mine.values[:, :, : mine._idx], its.values[:, :, : its.offset])
    found.left_padding = mx.concatenate([mine.left_padding + left, mx.array([0])])
    found.offset = mx.concatenate([mine.offset, mx.array([its.offset])])
    found._idx = its.offset
    return found


def _side_by_side(mine: mx.array, its: mx.array) -> mx.array:
    count, heads, held, width = mine.shape
    rows = its.shape[2]
    whole = mx.zeros((count + 1, heads, rows + _ROOM - rows % _ROOM, width), dtype=mine.dtype)
    whole[:count, :, rows - held : rows] = mine
    whole[count:, :, :rows] = its
    return whole


def _inside(cache: Cache, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Cache]]:
    if type(cache) is not CacheList:
        yield path, cache
        return
    for number, inner in enumerate(cache.caches):
        yield from _inside(inner, (*path, number))


def _replaced(holder: Cache, path: tuple[int, ...], cache: Cache) -> Cache:
    if not path:
        return cache
    inner = list(holder.caches)
    inner[path[0]] = _replaced(inner[path[0]], path[1:], cache)
    holder.caches = tuple(inner)
    return holder


def _row_shape(array: mx.array) -> tuple[int, ...]:
    batch, heads, _, width = array.shape
    if batch != 1:
        raise InternalError(f"a cache of batch {batch}: only single sequences are moved")
    return (heads, width)


def _whole_shape(array: mx.array) -> tuple[int, ...]:
    return tuple(array.shape)


def _pad_rows(array: mx.array, rows: int) -> mx.array:
    missing = rows - array.shape[2]
    return array if missing <= 0 else mx.pad(array, [(0, 0), (0, 0), (0, missing), (0, 0)])


def _integers(array: mx.array) -> list[int]:
    numbers = array.tolist()
    if not isinstance(numbers, list):
        raise InternalError("a ring's indices are no list")
    return [int(number) for number in numbers if isinstance(number, int)]
