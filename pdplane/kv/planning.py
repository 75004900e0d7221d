"""Making a layout: fields are packed into pages, pages into parents, parents into planes.

Rules (legacy peers build theirs the same way, and a planned layout equals theirs to the byte): planes stand in
the order of their ids, one after another; inside a page the fields of one group and plane follow each other in
the order of their ids, each aligned to its element size; a plane's parent is as large as the most demanding
group needs, rounded up so that each group divides it into equal pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from pdplane.errors import ConfigError, WireError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import ELEMENT_BYTES, Field, Group, GroupSpec, Layout, Partition, Plane, validate_layout


@attrs.frozen
class FieldSpec:
    """A tensor that every page of its group must hold; `shape` is rank-local."""

    group_id: GroupId
    field_id: FieldId
    plane_id: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def plan_layout(
    specs: Sequence[GroupSpec],
    fields: Iterable[FieldSpec],
    *,
    num_lcm_blocks: int,
    prefix_granularity: int,
    packing: Mapping[GroupId, int] | None = None,
    partitions: Sequence[tuple[FieldId, Partition]] = (),
    alignment: int = 1,
) -> Layout:
    """Lay fields out in pages, parents and planes.

    `packing` is the number of blocks of a group in one parent (1 when absent); `alignment` divides every
    plane's bytes a parent. Raises ConfigError when they make no valid layout.
    """
    packs = {spec.group_id: (packing or {}).get(spec.group_id, 1) for spec in specs}
    _check_wishes(packs, fields := list(fields), alignment)
    wishes: dict[str, dict[GroupId, list[FieldSpec]]] = {}
    for wish in sorted(fields, key=lambda wish: (wish.plane_id, wish.group_id, wish.field_id)):
        wishes.setdefault(wish.plane_id, {}).setdefault(wish.group_id, []).append(wish)
    planes: list[Plane] = []
    placed: list[Field] = []
    arena_offset = 0
    for plane_id, by_group in wishes.items():
        parent_bytes = _parent_bytes(by_group, packs, alignment)
        planes.append(Plane(plane_id, parent_bytes, arena_offset))
        arena_offset += (num_lcm_blocks + 1) * parent_bytes
        for group_id, members in by_group.items():
            placed += _place(members, parent_bytes // packs[group_id])
    layout = Layout(
        prefix_granularity=prefix_granularity,
        lcm_block_bytes=sum(plane.bytes_per_lcm_block for plane in planes),
        num_lcm_blocks=num_lcm_blocks,
        groups=tuple(
            Group(group_id, packs[group_id], 1 + num_lcm_blocks * packs[group_id]) for group_id in sorted(packs)
        ),
        planes=tuple(planes),
        fields=tuple(placed),
        group_specs=tuple(specs),
        partitions=tuple(partitions),
    )
    try:
        validate_layout(layout)
    except WireError as error:
        raise ConfigError(f"no valid layout: {error}") from error
    return layout


def _check_wishes(packs: Mapping[GroupId, int], fields: Sequence[FieldSpec], alignment: int) -> None:
    if alignment < 1:
        raise ConfigError(f"alignment must be positive, not {alignment}")
    for group_id, blocks in packs.items():
        if blocks < 1:
            raise ConfigError(f"packing of group {group_id!r} must be positive, not {blocks}")
    for wish in fields:
        if wish.dtype not in ELEMENT_BYTES:
            raise ConfigError(f"field {wish.field_id!r} has the unknown dtype {wish.dtype!r}")
        if wish.group_id not in packs:
            raise ConfigError(f"field {wish.field_id!r} names the unknown group {wish.group_id!r}")


def _page_offsets(members: Sequence[FieldSpec]) -> list[int]:
    """Return the offset of each member in the page, and the page's end as the last entry."""
    offsets, end = [], 0
    for wish in members:
        start = _round_up(end, ELEMENT_BYTES[wish.dtype])
        offsets.append(start)
        end = start + wish.nbytes
    return [*offsets, end]


def _parent_bytes(by_group: Mapping[GroupId, Sequence[FieldSpec]], packs: Mapping[GroupId, int], alignment: int) -> int:
    needed, divisor = 0, alignment
    for group_id, members in by_group.items():
        element = max(ELEMENT_BYTES[wish.dtype] for wish in members)
        page = _round_up(_page_offsets(members)[-1], element)
        needed = max(needed, packs[group_id] * page)
        # Every page of the group starts aligned for its widest element.
        divisor = math.lcm(divisor, packs[group_id] * element)
    return _round_up(needed, divisor)


def _place(members: Sequence[FieldSpec], stride: int) -> list[Field]:
    return [
        Field(wish.group_id, wish.field_id, wish.plane_id, wish.shape, wish.dtype, offset, stride)
        for wish, offset in zip(members, _page_offsets(members), strict=False)
    ]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


# ---- The layout that a legacy engine publishes for a model, to the byte: token-major pages, its own names
#
# Rules (legacy engines, 2026): a page is `[block tokens, KV heads, head dim]`, keys and values apart, in the planes
# `unit.<i>.k` and `unit.<i>.v`, where the i-th layer of each group shares unit i. Full and sliding layers form the
# groups `full_attention` and `sliding_attention`, declared in the order of their first layers. Latent attention keeps
# one field a layer, the latent and the rotary key side by side for one head, in the plane `slot.<i>`. Heads are split
# over the ranks, at least one each; every rank holds the latents.


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
    """Return one rank's layout of a model with these layers. Raises ConfigError for what legacy engines cannot hold."""
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
    """Return the heads of one rank; more ranks than heads repeat them.

    Raises ConfigError if neither divides the other.
    """
    if heads % tp_size and tp_size % heads:
        raise ConfigError(f"{heads} KV heads cannot be split over {tp_size} ranks")
    return max(1, heads // tp_size)


def _wishes(layers: Iterable[CacheLayer], block_tokens: int, tp_size: int) -> Iterator[tuple[FieldSpec, int]]:
    """Yield every field with the heads of the whole model that it is split by; 0 when every rank holds all of it."""
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
