"""Pages in the layout of legacy engines: token by token, heads inside."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache

from pdplane.engine.caches import Leaf, Tensor, walk
from pdplane.engine.layout import fit_arena
from pdplane.engine.options import EngineOptions
from pdplane.engine.pages import Blocks, Pages, join_rows, view_pages
from pdplane.engine.untyped import Cache
from pdplane.engine.views import Buffer, Numbers, bits_of, carrier, layout_dtype
from pdplane.errors import ConfigError, InternalError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Arena
from pdplane.kv.layout import GroupSpec, Layout
from pdplane.kv.manifest import logical_slots
from pdplane.kv.planning import (
    FULL,
    AttentionLayer,
    CacheLayer,
    LatentLayer,
    key_field,
    latent_field,
    token_major_layout,
    value_field,
)

_Ring: Callable[..., Cache] = RotatingKVCache

_REASONS = {
    "QuantizedKVCache": "a quantised KV cache",
    "ArraysCache": "a recurrent state, whose widths legacy revisions keep in either order without telling",
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
    """Return the contract that a legacy engine publishes for the model; `leaves` are those of the whole model.

    Raises ConfigError for what legacy engines cannot hold, and for an arena that is too small.
    """
    layers = list(_layers(leaves))
    if not layers:
        raise ConfigError(f"model {options.model!r} keeps no cache, so there is nothing to move")

    def plan(parents: int) -> Layout:
        return token_major_layout(layers, block_tokens=options.block_tokens, num_lcm_blocks=parents, tp_size=tp_size)

    return fit_arena(plan, options)


def is_latent(leaf: Leaf) -> bool:
    """Return whether a leaf is of latent attention: one head, the latent as keys, the rotary keys as values."""
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
    """Which token of a prompt each row of a ring holds: `tokens[row]`, -1 for a spare row; `index` is the next row."""

    tokens: Numbers
    index: int


@functools.lru_cache(maxsize=64)
def ring_of(length: int, window: int, step_size: int) -> Ring:
    """Return the ring after a prompt of `length` tokens, found by sending token numbers through a real one."""
    cache: Cache = _Ring(max_size=window)
    numbers = mx.arange(1, length + 1, dtype=mx.int32).reshape(1, 1, length, 1)
    edges = [*range(0, length - 1, step_size), length - 1, length]  # the last token runs alone
    for start, end in itertools.pairwise(edges):
        cache.update_and_fetch(numbers[:, :, start:end], numbers[:, :, start:end])
        mx.eval(cache.keys, cache.values)
    return Ring(np.array(cache.keys).reshape(-1).astype(np.int64) - 1, int(cache._idx))


# ---- Cutting caches into token-major pages and assembling them again; numpy copies on the MLX thread


_FIELDS = {"k": key_field, "v": value_field, "ring_k": key_field, "ring_v": value_field}


@attrs.frozen(eq=False)
class _Store:
    """Where one leaf's tensors lie in the pages: views of shape (blocks, heads, tokens, width) by tensor name."""

    group_id: GroupId
    field_id: FieldId
    views: Mapping[str, Numbers]


class TokenPages(Pages):
    """The arena as a legacy engine sees it; a ring's tokens stand in it in their order.

    `step_size` must be that of the run whose caches are cut or replaced: it decides a ring's rows.
    """

    history_group = FULL
    has_snapshots = False

    def __init__(self, layout: Layout, arena: Arena, leaves: Sequence[Leaf], step_size: int) -> None:
        super().__init__(layout, arena, ())
        self._step_size = step_size
        self._specs = {spec.group_id: spec for spec in layout.group_specs}
        self._stores = {leaf.layer: _store(layout, arena, leaf) for leaf in leaves}

    def first_field(self, leaf: Leaf) -> FieldId:
        return self._stores[leaf.layer].field_id

    def cut_passing(self, leaf: Leaf, cache: Cache, blocks: Blocks, tokens: range, length: int) -> None:
        """Copy the rows of a ring that the prompt's last window and the blocks around it need.

        A ring holds a window; the first block that is sent may begin before it, and a legacy decode that reuses the
        block reads those rows too. So each chunk leaves its rows here while the ring has them.
        """
        rows = range(max(tokens.start, self._first_token(leaf, length)), tokens.stop)
        if not rows:
            return
        ids = blocks[self._stores[leaf.layer].group_id]
        for name, pages in self._stores[leaf.layer].views.items():
            source = _newest(cache, cache.keys if name == "ring_k" else cache.values, len(rows))
            _put_rows(bits_of(source)[0], pages, ids, rows.start - self._first_token(leaf, length))

    def _cut_state(self, leaf: Leaf, cache: Cache, blocks: Blocks, length: int) -> None:
        """Fill the rest of the last pages with zeros; a ring's rows are there already."""
        store = self._stores[leaf.layer]
        for pages in store.views.values():
            if rest := length % pages.shape[2]:
                pages[blocks[store.group_id][-1] - 1][:, rest:] = 0

    def history(self, leaf: Leaf) -> Mapping[str, Numbers]:
        return self._stores[leaf.layer].views

    def history_fields(self, leaf: Leaf) -> Mapping[FieldId, tuple[str, ...]]:
        names = tuple(self._stores[leaf.layer].views)
        return {latent_field(leaf.layer): names} if is_latent(leaf) else {_FIELDS[n](leaf.layer): (n,) for n in names}

    def _assemble_state(self, leaf: Leaf, cache: Cache, blocks: Blocks, length: int) -> None:
        views = self._stores[leaf.layer].views
        ring = ring_of(length, cache.max_size, self._step_size)
        tensor_of = {tensor.name: tensor for tensor in leaf.tensors}
        cache.keys = self._join_ring(views["ring_k"], leaf, tensor_of["ring_k"], blocks, length)
        cache.values = self._join_ring(views["ring_v"], leaf, tensor_of["ring_v"], blocks, length)
        cache.offset, cache._idx = length, ring.index

    def _join_ring(self, pages: Numbers, leaf: Leaf, tensor: Tensor, blocks: Blocks, length: int) -> mx.array:
        first = self._first_token(leaf, length)
        _, heads, window, width = tensor.shape
        tokens = ring_of(length, window, self._step_size).tokens
        ordered = np.zeros((heads, length - first, width), carrier(tensor.dtype))
        ids = np.asarray(blocks[self._stores[leaf.layer].group_id], np.int64)
        join_rows(pages, ordered, ids, np.arange(len(ids)), length - first)
        buffer = Buffer((1, heads, len(tokens), width), tensor.dtype)
        # The window's oldest token is not sent where a block ends with it: the next token overwrites it unread.
        rows = np.flatnonzero(tokens >= first)
        buffer.view[0][:, rows] = ordered[:, tokens[rows] - first]
        return buffer.take()

    def _first_token(self, leaf: Leaf, length: int) -> int:
        """Return the first token of the first block that the ring's group transfers."""
        spec: GroupSpec = self._specs[self._stores[leaf.layer].group_id]
        slots = logical_slots(spec, 0, length)
        return slots.start * (spec.rows_per_page or 1)


def _newest(ring: Cache, tensor: mx.array, count: int) -> mx.array:
    """Return the last `count` rows that a ring was given, oldest first."""
    if count <= ring._idx:
        return tensor[..., ring._idx - count : ring._idx, :]
    ordered: mx.array = ring._temporal_order(tensor)
    if ordered.shape[2] < count:
        raise InternalError(f"a ring of {ordered.shape[2]} rows has lost some of the last {count}")
    return ordered[..., -count:, :]


def _put_rows(source: Numbers, pages: Numbers, ids: Sequence[int], start: int) -> None:
    """Copy (heads, rows, width) into the pages of `ids`, from row `start` on; page by page, whatever their borders."""
    step, done, total = pages.shape[2], 0, source.shape[1]
    while done < total:
        slot, place = divmod(start + done, step)
        count = min(step - place, total - done)
        pages[ids[slot] - 1][:, place : place + count] = source[:, done : done + count]
        done += count


def _store(layout: Layout, arena: Arena, leaf: Leaf) -> _Store:
    views = dict(_latent_views(layout, arena, leaf) if is_latent(leaf) else _views(layout, arena, leaf))
    name = latent_field(leaf.layer) if is_latent(leaf) else key_field(leaf.layer)
    return _Store(layout.field(name).group_id, name, views)


def _views(layout: Layout, arena: Arena, leaf: Leaf) -> Iterator[tuple[str, Numbers]]:
    for tensor in leaf.tensors:
        if tensor.name in _FIELDS:
            pages = view_pages(layout, arena, _FIELDS[tensor.name](leaf.layer), tensor.dtype)
            yield tensor.name, pages.swapaxes(1, 2)


def _latent_views(layout: Layout, arena: Arena, leaf: Leaf) -> Iterator[tuple[str, Numbers]]:
    start = 0
    for tensor in leaf.tensors:  # the latent first, then the rotary keys
        pages = view_pages(layout, arena, latent_field(leaf.layer), tensor.dtype).swapaxes(1, 2)
        width = tensor.shape[-1]
        if width:
            yield tensor.name, pages[..., start : start + width]
        start += width
