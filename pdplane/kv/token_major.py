"""The layout that a legacy engine publishes for a model, to the byte: token-major pages, its own names.

Rules (legacy engines, 2026): a page is `[block tokens, KV heads, head dim]`, keys and values apart, in the planes
`unit.<i>.k` and `unit.<i>.v`, where the i-th layer of each group shares unit i. Full and sliding layers form the
groups `full_attention` and `sliding_attention`, declared in the order of their first layers. Latent attention keeps
one field a layer, the latent and the rotary key side by side for one head, in the plane `slot.<i>`. Heads are split
over the ranks, at least one each; latents are every rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import attrs

from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import GroupSpec, Layout, Partition
from pdplane.kv.planning import FieldSpec, plan_layout

FULL = GroupId("full_attention")
SLIDING = GroupId("sliding_attention")


@attrs.frozen
class AttentionLayer:
    """Keys and values of `heads` heads in the whole model; `window` tokens, or None for the full history."""

    layer: int
    heads: int
    head_dim: int
    dtype: str
    window: int | None = None

    @property
    def group_id(self) -> GroupId:
        return FULL if self.window is None else SLIDING


@attrs.frozen
class LatentLayer:
    """Latent attention: `width` is that of the latent and the rotary key together."""

    layer: int
    width: int
    dtype: str

    @property
    def group_id(self) -> GroupId:
        return FULL

    @property
    def window(self) -> None:
        return None


CacheLayer: TypeAlias = AttentionLayer | LatentLayer


def latent_field(layer: int) -> FieldId:
    return FieldId(f"layer.{layer}.latent_kv")


def key_field(layer: int) -> FieldId:
    return FieldId(f"layer.{layer}.k")


def value_field(layer: int) -> FieldId:
    return FieldId(f"layer.{layer}.v")


def token_major_layout(
    layers: Sequence[CacheLayer], *, block_tokens: int, num_lcm_blocks: int, tp_size: int = 1
) -> Layout:
    """The rank-local contract of a model with these layers. Raises ConfigError for what legacy engines cannot have."""
    wishes = list(_wishes(layers, block_tokens, tp_size))
    wishes.sort(key=lambda wish: (wish[0].plane_id, wish[0].group_id, wish[0].field_id))
    return plan_layout(
        list(_specs(layers, block_tokens)),
        [field for field, _ in wishes],
        num_lcm_blocks=num_lcm_blocks,
        prefix_granularity=block_tokens,
        partitions=[(field.field_id, Partition(axis=1, global_extent=heads)) for field, heads in wishes if heads],
    )


def local_heads(heads: int, tp_size: int) -> int:
    """Heads of one rank; more ranks than heads repeat them. Raises ConfigError when neither divides the other."""
    if heads % tp_size and tp_size % heads:
        raise ConfigError(f"{heads} KV heads cannot be split over {tp_size} ranks")
    return max(1, heads // tp_size)


def _wishes(layers: Iterable[CacheLayer], block_tokens: int, tp_size: int) -> Iterator[tuple[FieldSpec, int]]:
    """Every field with the heads of the whole model that it is split by; 0 when every rank holds all of it."""
    units: dict[GroupId, int] = {}
    for layer in sorted(layers, key=lambda layer: layer.layer):
        group, number = layer.group_id, layer.layer
        unit = units[group] = units.get(group, -1) + 1
        if isinstance(layer, LatentLayer):
            shape = (block_tokens, 1, layer.width)
            yield FieldSpec(group, latent_field(number), f"slot.{unit}", shape, layer.dtype), 0
            continue
        shape = (block_tokens, local_heads(layer.heads, tp_size), layer.head_dim)
        yield FieldSpec(group, key_field(number), f"unit.{unit}.k", shape, layer.dtype), layer.heads
        yield FieldSpec(group, value_field(number), f"unit.{unit}.v", shape, layer.dtype), layer.heads


def _specs(layers: Iterable[CacheLayer], block_tokens: int) -> Iterator[GroupSpec]:
    windows: dict[GroupId, int | None] = {}
    for layer in sorted(layers, key=lambda layer: layer.layer):
        if windows.setdefault(layer.group_id, layer.window) != layer.window:
            raise ConfigError(
                f"layer {layer.layer} has a window of {layer.window} tokens, the one before {windows[layer.group_id]}: "
                "a legacy layout has one sliding window for all layers"
            )
    for group_id, window in windows.items():
        yield GroupSpec(
            group_id,
            retention="full_history" if window is None else "sliding_window",
            rows_per_page=block_tokens,
            entry_stride_tokens=1,
            sliding_window_tokens=window,
            transfer_policy="full_suffix",
        )
