"""A model's caches in the layout of legacy engines: which of them it can express, and the ring of a sliding window.

Legacy pages hold tokens in their order. A sliding window's ring is therefore unrolled into them, and rolled up again
where a single process would have it: the same prompt in the same chunks puts each token into the same row.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from pdplane.engine.caches import Leaf, Tensor, walk
from pdplane.engine.layout import fit_arena
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import Cache
from pdplane.engine.views import Numbers, layout_dtype
from pdplane.errors import ConfigError
from pdplane.kv.layout import Layout
from pdplane.kv.token_major import AttentionLayer, CacheLayer, LatentLayer, token_major_layout

_Ring: Callable[..., Cache] = RotatingKVCache

_REASONS = {
    "QuantizedKVCache": "a quantised KV cache",
    "ArraysCache": "a recurrent state, whose legacy names differ by model",
}


def refuse_inexpressible(caches: Sequence[Cache]) -> None:
    """Raise ConfigError that names the first layer whose cache legacy pages cannot carry, and why."""
    for layer, path, cache in walk(caches):
        if cache is None:
            continue
        name = type(cache).__name__
        if path:
            reason = "several caches"
        elif type(cache) is RotatingKVCache and cache.keep:
            reason = f"a ring that keeps its first {cache.keep} tokens in place"
        elif type(cache) in (KVCache, RotatingKVCache):
            continue
        else:
            reason = _REASONS.get(name, f"a {name}")
        raise ConfigError(f"layer {layer} keeps {reason}: legacy pages (nhd) cannot express it, take hnd")


def legacy_layout(leaves: Sequence[Leaf], options: EngineOptions, tp_size: int = 1) -> Layout:
    """The contract that a legacy engine publishes for the model; `leaves` are those of the whole model.

    Raises ConfigError for what legacy engines cannot have, and for an arena that is too small.
    """
    layers = list(_layers(leaves))
    if not layers:
        raise ConfigError(f"model {options.model!r} keeps no cache, so there is nothing to move")

    def plan(parents: int) -> Layout:
        return token_major_layout(layers, block_tokens=options.block_tokens, num_lcm_blocks=parents, tp_size=tp_size)

    return fit_arena(plan, options)


def is_latent(leaf: Leaf) -> bool:
    """Latent attention keeps one head, with the latent as keys and the rotary keys as values, of other widths."""
    keys, values = _keys_and_values(leaf)
    return leaf.kind.is_history and keys.shape[0] == 1 and keys.shape[-1] != values.shape[-1]


def _layers(leaves: Sequence[Leaf]) -> Iterator[CacheLayer]:
    for leaf in leaves:
        keys, values = _keys_and_values(leaf)
        name = f"layer {leaf.layer}"
        if keys.dtype != values.dtype:
            raise ConfigError(f"{name} keeps keys in {keys.dtype} and values in {values.dtype}: legacy pages cannot")
        dtype = layout_dtype(keys.dtype, name)
        if is_latent(leaf):
            yield LatentLayer(leaf.layer, keys.shape[-1] + values.shape[-1], dtype)
            continue
        if keys.shape != values.shape:
            raise ConfigError(f"{name} keeps keys and values of unequal widths: legacy pages (nhd) cannot, take hnd")
        if leaf.kind.is_history:
            heads, width = keys.shape
            yield AttentionLayer(leaf.layer, heads, width, dtype)
        else:
            _, heads, window, width = keys.shape
            yield AttentionLayer(leaf.layer, heads, width, dtype, window)


def _keys_and_values(leaf: Leaf) -> tuple[Tensor, Tensor]:
    tensors = {tensor.name: tensor for tensor in leaf.tensors}
    if leaf.kind.is_history:
        return tensors["k"], tensors["v"]
    return tensors["ring_k"], tensors["ring_v"]


@attrs.frozen(eq=False)
class Ring:
    """Where a ring keeps which token of a prompt: `tokens[row]`, -1 for a spare row; `index` is the next row."""

    tokens: Numbers
    index: int


@functools.lru_cache(maxsize=64)
def ring_of(length: int, window: int, step_size: int) -> Ring:
    """The ring after a prompt of `length` tokens, found by sending token numbers through a real one."""
    cache: Cache = _Ring(max_size=window)
    numbers = mx.arange(1, length + 1, dtype=mx.int32).reshape(1, 1, length, 1)
    edges = [*range(0, length - 1, step_size), length - 1, length]  # the last token runs alone
    for start, end in itertools.pairwise(edges):
        cache.update_and_fetch(numbers[:, :, start:end], numbers[:, :, start:end])
        mx.eval(cache.keys, cache.values)
    return Ring(np.array(cache.keys).reshape(-1).astype(np.int64) - 1, int(cache._idx))
