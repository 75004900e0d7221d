"""The address-free geometry of a paged cache: groups of blocks, planes of the arena, fields of a page."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pdplane.ids import FieldId, GroupId

ELEMENT_BYTES: Mapping[str, int] = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip


@attrs.frozen
class Group:
    """Blocks of one kind; `page_count` counts the null block 0."""

    group_id: GroupId
    cache_blocks_per_lcm_block: int
    page_count: int


@attrs.frozen
class Plane:
    """A contiguous part of the arena: (num_lcm_blocks + 1) parents of `bytes_per_lcm_block`."""

    plane_id: str
    bytes_per_lcm_block: int
    arena_offset_bytes: int


@attrs.frozen
class Field:
    """One tensor's slice of a page; `shape` is rank-local."""

    group_id: GroupId
    field_id: FieldId
    plane_id: str
    shape: tuple[int, ...]
    dtype: str
    field_offset_bytes: int
    page_stride_bytes: int


@attrs.frozen
class GroupSpec:
    """What a group's blocks mean: tokens per block, retention, and what a transfer takes."""

    group_id: GroupId
    retention: str
    rows_per_page: int | None = None
    entry_stride_tokens: int | None = None
    sliding_window_tokens: int | None = None
    family: str = "history"
    transfer_policy: str | None = None
    checkpoint_granularity: int | None = None


@attrs.frozen
class Partition:
    """How a field is split over the tensor-parallel ranks."""

    axis: int
    global_extent: int
    global_parts: tuple[int, ...] = ()


@attrs.frozen
class Layout:
    """The whole contract of one rank's cache. Group specs keep their declaration order (the manifests' order)."""

    prefix_granularity: int
    lcm_block_bytes: int
    num_lcm_blocks: int
    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    fields: tuple[Field, ...]
    group_specs: tuple[GroupSpec, ...]
    partitions: tuple[tuple[FieldId, Partition], ...] = ()
