"""The cache layout of a loaded model: what its caches look like, as groups, fields and pages of one arena."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from pdplane.engine.caches import Leaf, Tensor
from pdplane.engine.options import EngineOptions
from pdplane.engine.views import layout_dtype
from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Pool
from pdplane.kv.layout import ELEMENT_BYTES, GroupSpec, Layout, Partition
from pdplane.kv.manifest import blocks_needed
from pdplane.kv.planning import FieldSpec, local_heads, plan_layout

KV = GroupId("kv")
"""One block holds `block_tokens` rows of every history tensor of every layer, as one run of bytes."""
STATE = GroupId("state")
"""One block holds every state tensor of every layer, as they are after the prompt's last token."""

_PLANE = "cache"
_ALIGNMENT = 64  # a cache line: no two blocks share one


def field_id(leaf: Leaf, tensor: Tensor) -> FieldId:
    """Return `layer.<n>.<name>`, where the name of a cache inside a CacheList begins with its place in the list."""
    return FieldId(leaf.prefix() + tensor.name)


def carried(leaf: Leaf) -> tuple[Tensor, ...]:
    """Return the tensors of a leaf that have bytes; some models keep values of width 0."""
    return tuple(tensor for tensor in leaf.tensors if math.prod(tensor.shape) > 0)


def cache_layout(leaves: Sequence[Leaf], options: EngineOptions, tp_size: int = 1) -> Layout:
    """Return the layout of one of `tp_size` ranks, with as many parents as `options.arena_bytes` allow.

    `leaves` are those of the whole model. History pages are head-major, `(heads, block_tokens, width)`; state pages
    are whole tensors. Raises ConfigError when a dtype cannot be carried, the heads cannot be split, or the arena cannot
    hold one parent beside the null parent.
    """
    block_tokens = options.block_tokens
    fields = list(_fields(leaves, block_tokens, tp_size))
    if not fields:
        raise ConfigError(f"model {options.model!r} keeps no cache, so there is nothing to move")
    present = {field.group_id for field in fields}
    specs = [spec for spec in _specs(block_tokens) if spec.group_id in present]
    partitions = tuple(_partitions(leaves))
    packing = _packing(fields)

    def plan(parents: int) -> Layout:
        return plan_layout(
            specs,
            fields,
            num_lcm_blocks=parents,
            prefix_granularity=block_tokens,
            packing=packing,
            partitions=partitions,
            alignment=_ALIGNMENT,
        )

    return fit_arena(plan, options)


def fit_arena(plan: Callable[[int], Layout], options: EngineOptions) -> Layout:
    """Return the layout with the most parents that the arena holds.

    Raises ConfigError if they are too few for a prompt of one token.
    """
    smallest = plan(1)
    parent_bytes, needed = smallest.lcm_block_bytes, Pool(smallest).parents(blocks_needed(smallest, 1, 0))
    parents = options.arena_bytes // parent_bytes - 1
    if parents < needed:
        raise ConfigError(
            f"an arena of {options.arena_bytes} bytes is too small for {options.model!r}: "
            f"it needs at least {(needed + 1) * parent_bytes} bytes (--arena-bytes)"
        )
    return plan(parents)


def _specs(block_tokens: int) -> tuple[GroupSpec, GroupSpec]:
    history = GroupSpec(
        KV, retention="full_history", rows_per_page=block_tokens, entry_stride_tokens=1, transfer_policy="full_suffix"
    )
    state = GroupSpec(
        STATE,
        retention="full_history",
        family="state",
        transfer_policy="latest_snapshot",
        checkpoint_granularity=block_tokens,
    )
    return history, state


def _fields(leaves: Sequence[Leaf], block_tokens: int, tp_size: int) -> Iterator[FieldSpec]:
    for leaf in leaves:
        for tensor in carried(leaf):
            name = field_id(leaf, tensor)
            shape = tensor.shape
            if leaf.kind.is_history:
                heads, width = tensor.shape
                shape = (local_heads(heads, tp_size), block_tokens, width)
            elif tp_size > 1:
                raise ConfigError(f"{name} is a state, which pdplane cannot split over {tp_size} ranks")
            group = KV if leaf.kind.is_history else STATE
            yield FieldSpec(group, name, _PLANE, shape, layout_dtype(tensor.dtype, name))


def _partitions(leaves: Sequence[Leaf]) -> Iterator[tuple[FieldId, Partition]]:
    """Yield how histories are split over ranks: by heads, unless there is a single one (latent attention)."""
    for leaf in leaves:
        for tensor in carried(leaf) if leaf.kind.is_history else ():
            heads = tensor.shape[0]
            if heads > 1:
                yield field_id(leaf, tensor), Partition(axis=0, global_extent=heads)


def _packing(fields: Sequence[FieldSpec]) -> dict[GroupId, int]:
    """Return the blocks a parent of each group: of the smaller kind as many as one of the larger takes."""
    page: dict[GroupId, int] = {}
    for field in fields:
        widest = max(ELEMENT_BYTES.values())
        nbytes = -(-field.nbytes // widest) * widest
        page[field.group_id] = page.get(field.group_id, 0) + nbytes
    largest = max(page.values())
    return {group_id: largest // nbytes for group_id, nbytes in page.items()}
