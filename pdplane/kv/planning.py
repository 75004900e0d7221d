"""Making a layout: fields are packed into pages, pages into parents, parents into planes.

Everything stands in the caller's order: planes as their first fields come, one after another; inside a page the
fields of one group and plane follow each other, each aligned to its element size. A plane's parent is as large as the
most demanding group needs, rounded up so that each group divides it into equal pages. Where planes are given, they are
memory that is there already: fields go into them, and nothing is moved.

Fields in the order of (plane id, group id, field id) as text give the layout of legacy peers, to the byte.
"""

from __future__ import annotations

import math
from collections import Counter
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
    planes: Sequence[Plane] = (),
    steps: Sequence[Sequence[FieldId]] = (),
) -> Layout:
    """Lay fields out in pages, parents and planes.

    `packing` is the number of blocks of a group in one parent (1 when absent); `alignment` divides every
    plane's bytes a parent. `planes` say where memory that exists lies in the arena: a plane's `bytes_per_lcm_block` is
    the stride from one parent to the next, and its first parent is the null one. `steps` name the fields that become
    ready together, in order; without them a step is the layer n of the fields `layer.<n>.<suffix>`, and ids
    without a number form the last step. Raises ConfigError when they make no valid layout.
    """
    packs = {spec.group_id: (packing or {}).get(spec.group_id, 1) for spec in specs}
    _check_wishes(packs, fields := list(fields), alignment)
    _check_steps(fields, steps)
    wishes: dict[str, dict[GroupId, list[FieldSpec]]] = {}
    for wish in fields:
        wishes.setdefault(wish.plane_id, {}).setdefault(wish.group_id, []).append(wish)
    parents = num_lcm_blocks + 1
    planes = _given(planes, wishes) if planes else _stacked(wishes, packs, alignment, parents)
    placed = [
        field
        for plane in planes
        for group_id, members in wishes[plane.plane_id].items()
        for field in _place(members, plane.bytes_per_lcm_block // packs[group_id])
    ]
    end = max((plane.arena_offset_bytes + parents * plane.bytes_per_lcm_block for plane in planes), default=0)
    layout = Layout(
        prefix_granularity=prefix_granularity,
        # The planes' bytes together; more only where given planes leave gaps between each other.
        lcm_block_bytes=max(sum(plane.bytes_per_lcm_block for plane in planes), -(-end // max(parents, 1))),
        num_lcm_blocks=num_lcm_blocks,
        groups=tuple(
            Group(group_id, packs[group_id], 1 + num_lcm_blocks * packs[group_id]) for group_id in sorted(packs)
        ),
        planes=tuple(planes),
        fields=tuple(placed),
        group_specs=tuple(specs),
        partitions=tuple(partitions),
        given_steps=tuple(tuple(step) for step in steps),
    )
    try:
        validate_layout(layout)
    except WireError as error:
        raise ConfigError(f"no valid layout: {error}") from error
    return layout


_Wishes: TypeAlias = Mapping[str, Mapping[GroupId, Sequence[FieldSpec]]]


def _stacked(wishes: _Wishes, packs: Mapping[GroupId, int], alignment: int, parents: int) -> list[Plane]:
    """Return planes one after another."""
    planes: list[Plane] = []
    arena_offset = 0
    for plane_id, by_group in wishes.items():
        planes.append(Plane(plane_id, _parent_bytes(by_group, packs, alignment), arena_offset))
        arena_offset += parents * planes[-1].bytes_per_lcm_block
    return planes


def _given(planes: Sequence[Plane], wishes: _Wishes) -> Sequence[Plane]:
    """Return the caller's planes; raise ConfigError unless they are those that the fields name."""
    known = {plane.plane_id for plane in planes}
    for plane_id in wishes:
        if plane_id not in known:
            raise ConfigError(f"plane {plane_id!r} is not among the planes that are given")
    for plane_id in known:
        if plane_id not in wishes:
            raise ConfigError(f"plane {plane_id!r} is given, and no field lies in it")
    return planes


def _check_steps(fields: Sequence[FieldSpec], steps: Sequence[Sequence[FieldId]]) -> None:
    named = Counter(field_id for step in steps for field_id in step)
    if not steps:
        return
    for wish in fields:
        if named[wish.field_id] != 1:
            raise ConfigError(f"field {wish.field_id!r} stands in {named[wish.field_id]} steps, each field has one")
    if unknown := named.keys() - {wish.field_id for wish in fields}:
        raise ConfigError(f"the steps name the unknown field {min(unknown)!r}")


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
# groups `full_attention` and `sliding_attention`, or `sliding_attention_<window>` where there are several windows,
# declared in the order of their first layers. Latent attention keeps
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


@attrs.frozen
class LatentLayer:
    """Latent attention: `width` is that of the latent and the rotary key together."""

    layer: int
    width: int
    dtype: str

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


def _wishes(layers: Sequence[CacheLayer], block_tokens: int, tp_size: int) -> Iterator[tuple[FieldSpec, int]]:
    """Yield every field with the heads of the whole model that it is split by; 0 when every rank holds all of it."""
    units: dict[GroupId, int] = {}
    group_of = _group_ids(layers)
    for layer in sorted(layers, key=lambda layer: layer.layer):
        group, number = group_of[layer.window], layer.layer
        unit = units[group] = units.get(group, -1) + 1
        if isinstance(layer, LatentLayer):
            shape = (block_tokens, 1, layer.width)
            yield FieldSpec(group, latent_field(number), f"slot.{unit}", shape, layer.dtype), 0
            continue
        shape = (block_tokens, local_heads(layer.heads, tp_size), layer.head_dim)
        yield FieldSpec(group, key_field(number), f"unit.{unit}.k", shape, layer.dtype), layer.heads
        yield FieldSpec(group, value_field(number), f"unit.{unit}.v", shape, layer.dtype), layer.heads


def _group_ids(layers: Sequence[CacheLayer]) -> dict[int | None, GroupId]:
    """Return the group of each window, None for the full history, in the order of their first layers."""
    windows = list(dict.fromkeys(layer.window for layer in sorted(layers, key=lambda layer: layer.layer)))
    several = sum(window is not None for window in windows) > 1
    return {
        window: FULL if window is None else GroupId(f"{SLIDING}_{window}") if several else SLIDING for window in windows
    }


def _specs(layers: Sequence[CacheLayer], block_tokens: int) -> Iterator[GroupSpec]:
    for window, group_id in _group_ids(layers).items():
        yield GroupSpec(
            group_id,
            retention="full_history" if window is None else "sliding_window",
            rows_per_page=block_tokens,
            entry_stride_tokens=1,
            sliding_window_tokens=window,
            transfer_policy="full_suffix",
        )
