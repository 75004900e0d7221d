"""mlx-lm's caches with one addition: they tell of their updates. What they hold and give back stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from pdplane.engine.untyped import Cache

Told: TypeAlias = Callable[[Cache], None]
"""Called with the cache after each update, as it will be at the end: quantised, if it will be."""


class TappedCache(KVCache):
    """A plain cache; with a `form` (group size, bits) it is quantised after each update, not at the chunk's end.

    That is the same operation on the same rows. mlx-lm asks for the result at the chunk's end and goes on with it.
    """

    def __init__(self, told: Told, form: tuple[int, int] | None = None) -> None:
        _typed(super()).__init__()
        self._told, self._form = told, form
        self._made: Cache | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:  # noqa: ANN401  (the model knows it)
        found = _typed(super()).update_and_fetch(keys, values)
        if self._form is None:
            self._told(self)
        else:
            group_size, bits = self._form
            self._made = TappedQuantizedCache(_typed(super()).to_quantized(group_size, bits), self._told)
            self._told(self._made)
        return found

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:  # noqa: ANN401
        made, self._made = self._made, None
        if made is not None and (made.group_size, made.bits) == (group_size, bits):
            return made
        return _typed(super()).to_quantized(group_size, bits)


class TappedQuantizedCache(QuantizedKVCache):
    """A quantised cache, taken over from a plain one."""

    def __init__(self, plain: Cache, told: Told) -> None:
        _typed(super()).__init__(group_size=plain.group_size, bits=plain.bits)
        self.keys, self.values, self.offset = plain.keys, plain.values, plain.offset
        self._told = told

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:  # noqa: ANN401  (the model knows it)
        found = _typed(super()).update_and_fetch(keys, values)
        self._told(self)
        return found


def _typed(parent: Any) -> Any:  # noqa: ANN401  (mlx-lm's methods have no types)
    return parent
