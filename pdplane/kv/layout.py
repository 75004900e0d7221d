"""The address-free geometry of a paged cache: groups of blocks, planes of the arena, fields of a page.

An arena holds `num_lcm_blocks + 1` *parents* of `lcm_block_bytes`; the first one is the null parent.
A parent holds `cache_blocks_per_lcm_block` blocks of one group, and each field of that group has one page a
block. Block id 0 is the null block and is never transferred.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import TypeVar

import attrs
import numpy as np

from pdplane.errors import LocalProtocolError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.arrays import U64

ELEMENT_BYTES: Mapping[str, int] = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip

FULL_HISTORY, SLIDING_WINDOW = "full_history", "sliding_window"
HISTORY, STATE = "history", "state"
FULL_SUFFIX, LATEST_SNAPSHOT = "full_suffix", "latest_snapshot"

_LAYER = re.compile(r"layer\.([0-9]{1,9})\.")

_V = TypeVar("_V")
_K = TypeVar("_K")


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

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one page of this field, without padding."""
        return math.prod(self.shape) * self.element_bytes


@attrs.frozen
class GroupSpec:
    """What a group's blocks mean: tokens per block, retention, and what a transfer takes."""

    group_id: GroupId
    retention: str
    rows_per_page: int | None = None
    entry_stride_tokens: int | None = None
    sliding_window_tokens: int | None = None
    family: str = HISTORY
    transfer_policy: str | None = None
    checkpoint_granularity: int | None = None

    @property
    def block_granularity(self) -> int:
        """Tokens a slot of the block table stands for."""
        if self.checkpoint_granularity is not None:
            return self.checkpoint_granularity
        return (self.rows_per_page or 0) * (self.entry_stride_tokens or 0)


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

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole arena, the null parent included."""
        return (self.num_lcm_blocks + 1) * self.lcm_block_bytes

    @cached_property
    def _groups(self) -> dict[GroupId, Group]:
        return {group.group_id: group for group in self.groups}

    @cached_property
    def _specs(self) -> dict[GroupId, GroupSpec]:
        return {spec.group_id: spec for spec in self.group_specs}

    @cached_property
    def _fields(self) -> dict[FieldId, Field]:
        return {field.field_id: field for field in self.fields}

    @cached_property
    def _planes(self) -> dict[str, Plane]:
        return {plane.plane_id: plane for plane in self.planes}

    @cached_property
    def _partitions(self) -> dict[FieldId, Partition]:
        return dict(self.partitions)

    def group(self, group_id: GroupId) -> Group:
        return _known(self._groups, group_id, "group")

    def spec(self, group_id: GroupId) -> GroupSpec:
        return _known(self._specs, group_id, "group")

    def field(self, field_id: FieldId) -> Field:
        return _known(self._fields, field_id, "field")

    def plane(self, plane_id: str) -> Plane:
        return _known(self._planes, plane_id, "plane")

    def partition(self, field_id: FieldId) -> Partition | None:
        """How the field is split over ranks; None when every rank holds all of it."""
        return self._partitions.get(field_id)

    def fields_of(self, group_id: GroupId) -> tuple[Field, ...]:
        """The group's fields in string order of their ids, which is the order of every transfer."""
        return self._fields_by_group.get(group_id, ())

    @cached_property
    def _fields_by_group(self) -> dict[GroupId, tuple[Field, ...]]:
        found: dict[GroupId, list[Field]] = {}
        for field in sorted(self.fields, key=lambda field: field.field_id):
            found.setdefault(field.group_id, []).append(field)
        return {group_id: tuple(fields) for group_id, fields in found.items()}

    @cached_property
    def steps(self) -> tuple[tuple[FieldId, ...], ...]:
        """Field ids by the layer number in `layer.<n>.<suffix>`, ascending; ids without one form the last step."""
        numbered: dict[int, list[FieldId]] = {}
        rest: list[FieldId] = []
        for spec in self.group_specs:
            for field in self.fields_of(spec.group_id):
                layer = _LAYER.match(field.field_id)
                (numbered.setdefault(int(layer[1]), []) if layer else rest).append(field.field_id)
        return tuple(tuple(numbered[number]) for number in sorted(numbered)) + ((tuple(rest),) if rest else ())

    def page_offsets(self, field_id: FieldId, block_ids: U64) -> U64:
        """Byte offset in the arena of the field's page of each block, shape (n,).

        Ids are trusted: validate a peer's manifest first.
        """
        field = self.field(field_id)
        plane = self.plane(field.plane_id)
        first = plane.arena_offset_bytes + plane.bytes_per_lcm_block + field.field_offset_bytes
        # The null block 0 lies one page before the first; wrapping arithmetic gives that too.
        return (block_ids - np.uint64(1)) * np.uint64(field.page_stride_bytes) + np.uint64(first)


def _known(table: Mapping[_K, _V], key: _K, what: str) -> _V:
    if key not in table:
        raise LocalProtocolError(f"the layout has no {what} {key!r}")
    return table[key]
