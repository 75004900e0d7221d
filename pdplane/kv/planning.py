"""Making a layout: fields are packed into pages, pages into parents, parents into planes.

Rules (legacy peers build theirs the same way, and a planned layout equals theirs to the byte): planes stand in
the order of their ids, one after another; inside a page the fields of one group and plane follow each other in
the order of their ids, each aligned to its element size; a plane's parent is as large as the most demanding
group needs, rounded up so that each group divides it into equal pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from pdplane.errors import ConfigError, WireError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.geometry import validate_layout
from pdplane.kv.layout import ELEMENT_BYTES, Field, Group, GroupSpec, Layout, Partition, Plane


@attrs.frozen
class FieldSpec:
    """A tensor that wants room in every page of its group; `shape` is rank-local."""

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
    plane's bytes a parent. Raises ConfigError when the wishes do not make a valid layout.
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
    """Offset of each member in the page, and the page's end as the last entry."""
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
