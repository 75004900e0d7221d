"""The address-free geometry of a paged cache, what it must satisfy, and when two ranks' geometries fit.

Groups of blocks, planes of the arena, fields of a page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import NoReturn, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import LayoutMismatch, LocalProtocolError, WireError
from pdplane.ids import FieldId, GroupId

U64: TypeAlias = npt.NDArray[np.uint64]
"""One-dimensional unsigned 64-bit array; arithmetic wraps, so callers validate before they add."""

FEW = 64
"""Up to so many numbers Python's own lists are quicker than numpy."""


# ---- The address-free geometry of a paged cache: groups of blocks, planes of the arena, fields of a page
#
# An arena holds `num_lcm_blocks + 1` *parents* of `lcm_block_bytes`; the first one is the null parent.
# A parent holds `cache_blocks_per_lcm_block` blocks of one group, and each field of that group has one page a
# block. Block id 0 is the null block and is never transferred.


ELEMENT_BYTES: Mapping[str, int] = {
    "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "bfloat16": 2, "float16": 2, "int32": 4, "float32": 4, "int64": 8, "float64": 8,
}  # fmt: skip

FULL_HISTORY, SLIDING_WINDOW = "full_history", "sliding_window"
HISTORY, STATE = "history", "state"
FULL_SUFFIX, LATEST_SNAPSHOT = "full_suffix", "latest_snapshot"

_LAYER = re.compile(r"layer\.([0-9]{1,9})\.")


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

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of one page of this field, without padding."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


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
        """Tokens that a slot of the block table stands for."""
        if self.checkpoint_granularity is not None:
            return self.checkpoint_granularity
        return (self.rows_per_page or 0) * (self.entry_stride_tokens or 0)


@attrs.frozen
class Partition:
    """How a field is split over the tensor-parallel ranks."""

    axis: int
    global_extent: int
    global_parts: tuple[int, ...] = ()


@attrs.frozen(cache_hash=True)
class Layout:
    """The whole contract of one rank's cache.

    Group specs keep the order of their declaration, which manifests follow. `given_steps` are the caller's own words
    for `steps`; they never travel.
    """

    prefix_granularity: int
    lcm_block_bytes: int
    num_lcm_blocks: int
    groups: tuple[Group, ...]
    planes: tuple[Plane, ...]
    fields: tuple[Field, ...]
    group_specs: tuple[GroupSpec, ...]
    partitions: tuple[tuple[FieldId, Partition], ...] = ()
    given_steps: tuple[tuple[FieldId, ...], ...] = attrs.field(default=(), eq=False)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole arena, the null parent included."""
        return (self.num_lcm_blocks + 1) * self.lcm_block_bytes

    @property
    def end_bytes(self) -> int:
        """Where the last plane ends in the arena."""
        return max(
            plane.arena_offset_bytes + (self.num_lcm_blocks + 1) * plane.bytes_per_lcm_block for plane in self.planes
        )

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
        return self._groups.get(group_id) or _unknown("group", group_id)

    def spec(self, group_id: GroupId) -> GroupSpec:
        return self._specs.get(group_id) or _unknown("group", group_id)

    def field(self, field_id: FieldId) -> Field:
        return self._fields.get(field_id) or _unknown("field", field_id)

    def plane(self, plane_id: str) -> Plane:
        return self._planes.get(plane_id) or _unknown("plane", plane_id)

    def partition(self, field_id: FieldId) -> Partition | None:
        """Return how the field is split over ranks; None when every rank holds all of it."""
        return self._partitions.get(field_id)

    def fields_of(self, group_id: GroupId) -> tuple[Field, ...]:
        """Return the group's fields in string order of their ids, which is the order of every transfer."""
        return self._fields_by_group.get(group_id, ())

    @cached_property
    def _fields_by_group(self) -> dict[GroupId, tuple[Field, ...]]:
        found: dict[GroupId, list[Field]] = {}
        for field in sorted(self.fields, key=lambda field: field.field_id):
            found.setdefault(field.group_id, []).append(field)
        return {group_id: tuple(fields) for group_id, fields in found.items()}

    @cached_property
    def steps(self) -> tuple[tuple[FieldId, ...], ...]:
        """Field ids that become ready together, in order.

        They are those given or, by the layer number in `layer.<n>.<suffix>`, ascending; ids without one form the last.
        """
        if self.given_steps:
            return self.given_steps
        numbered: dict[int, list[FieldId]] = {}
        rest: list[FieldId] = []
        for spec in self.group_specs:
            for field in self.fields_of(spec.group_id):
                layer = _LAYER.match(field.field_id)
                (numbered.setdefault(int(layer[1]), []) if layer else rest).append(field.field_id)
        return tuple(tuple(numbered[number]) for number in sorted(numbered)) + ((tuple(rest),) if rest else ())

    def page_offsets(self, field_id: FieldId, block_ids: U64) -> U64:
        """Return the byte offsets in the arena of the field's page of each block, shape (n,).

        Ids are trusted: validate a peer's manifest first.
        """
        null_page, stride = self._pages.get(field_id) or _unknown("field", field_id)
        offsets: U64 = block_ids * stride + null_page
        return offsets

    def null_page(self, field: Field) -> int:
        """Return the offset of the field's page of block 0, modulo 2**64: it may lie before the arena."""
        plane = self.plane(field.plane_id)
        first = plane.arena_offset_bytes + plane.bytes_per_lcm_block + field.field_offset_bytes
        return (first - field.page_stride_bytes) % 2**64

    @cached_property
    def _pages(self) -> dict[FieldId, tuple[np.uint64, np.uint64]]:
        """The offset of block 0's page and the stride from page to page, by field."""
        return {
            field.field_id: (np.uint64(self.null_page(field)), np.uint64(field.page_stride_bytes))
            for field in self.fields
        }


def _unknown(what: str, name: str) -> NoReturn:
    raise LocalProtocolError(f"the layout has no {what} {name!r}")


# ---- What a layout must satisfy before anyone computes an address from it
#
# The legacy receiver leaves most of this unchecked (block counts, planes, offsets); a peer's layout decides where
# bytes land, so everything is checked here once and trusted afterwards. The field at fault is named by its path.


MAX_WHOLE = 2**63 - 1
MAX_DIMENSIONS = 16
MAX_PARTS = 16
MAX_ID = 256


def validate_layout(layout: Layout) -> None:
    """Raise WireError unless every address that the layout can produce is inside its arena and unambiguous."""
    _whole(layout.prefix_granularity, 1, "plan.prefix_granularity")
    _whole(layout.lcm_block_bytes, 1, "plan.lcm_block_bytes")
    _whole(layout.num_lcm_blocks, 1, "plan.num_lcm_blocks")
    _whole(layout.arena_bytes, 1, "plan.lcm_block_bytes")
    _unique((group.group_id for group in layout.groups), "plan.groups")
    _unique((plane.plane_id for plane in layout.planes), "plan.planes")
    _unique((field.field_id for field in layout.fields), "plan.fields")
    _unique((spec.group_id for spec in layout.group_specs), "group_specs")
    _unique((field_id for field_id, _ in layout.partitions), "transfer_schema.fields")
    for group in layout.groups:
        _check_group(group, layout)
    _check_planes(layout)
    if sorted(spec.group_id for spec in layout.group_specs) != sorted(group.group_id for group in layout.groups):
        raise _error("group_specs", "does not name exactly the plan's groups")
    for spec in layout.group_specs:
        _check_spec(spec, layout.prefix_granularity)
    _check_fields(layout)
    known = {field.field_id: field for field in layout.fields}
    for field_id, partition in layout.partitions:
        path = f"transfer_schema.fields[{field_id!r}]"
        if field_id not in known:
            raise _error(path, "is no field of the plan")
        _check_partition(partition, known[field_id], f"{path}.partition")


def _check_group(group: Group, layout: Layout) -> None:
    path = f"plan.groups[{group.group_id!r}]"
    blocks = _whole(group.cache_blocks_per_lcm_block, 1, f"{path}.cache_blocks_per_lcm_block")
    if _whole(group.page_count, 1, f"{path}.page_count") != 1 + layout.num_lcm_blocks * blocks:
        raise _error(f"{path}.page_count", "is not 1 + num_lcm_blocks * cache_blocks_per_lcm_block")


def _check_planes(layout: Layout) -> None:
    parents = layout.num_lcm_blocks + 1
    end = 0
    for plane in layout.planes:
        path = f"plan.planes[{plane.plane_id!r}]"
        _whole(plane.bytes_per_lcm_block, 1, f"{path}.bytes_per_lcm_block")
        _whole(plane.arena_offset_bytes, 0, f"{path}.arena_offset_bytes")
    for plane in sorted(layout.planes, key=lambda plane: plane.arena_offset_bytes):
        path = f"plan.planes[{plane.plane_id!r}].arena_offset_bytes"
        if plane.arena_offset_bytes < end:
            raise _error(path, "overlaps another plane")
        end = plane.arena_offset_bytes + parents * plane.bytes_per_lcm_block
        if end > layout.arena_bytes:
            raise _error(path, "reaches past the arena")


def _check_spec(spec: GroupSpec, prefix_granularity: int) -> None:
    path = f"group_specs[{spec.group_id!r}]"
    _one_of(spec.retention, (FULL_HISTORY, SLIDING_WINDOW), f"{path}.retention")
    _one_of(spec.family, (HISTORY, STATE), f"{path}.family")
    _one_of(spec.transfer_policy, (FULL_SUFFIX, LATEST_SNAPSHOT), f"{path}.transfer_policy")
    if spec.checkpoint_granularity is None:
        _whole(spec.rows_per_page, 1, f"{path}.rows_per_page")
        _whole(spec.entry_stride_tokens, 1, f"{path}.entry_stride_tokens")
    else:
        _whole(spec.checkpoint_granularity, 1, f"{path}.checkpoint_granularity")
        if spec.rows_per_page is not None or spec.entry_stride_tokens is not None:
            raise _error(f"{path}.checkpoint_granularity", "excludes rows_per_page and entry_stride_tokens")
        if spec.family != STATE:
            raise _error(f"{path}.checkpoint_granularity", "is for the state family only")
    if spec.retention == SLIDING_WINDOW or spec.sliding_window_tokens is not None:
        _whole(spec.sliding_window_tokens, 1, f"{path}.sliding_window_tokens")
    if prefix_granularity % spec.block_granularity:
        raise _error(path, "has blocks whose tokens do not divide prefix_granularity")


def _check_fields(layout: Layout) -> None:
    groups = {group.group_id: group for group in layout.groups}
    planes = {plane.plane_id: plane for plane in layout.planes}
    pages: dict[tuple[str, str], list[Field]] = {}
    for field in layout.fields:
        path = f"plan.fields[{field.field_id!r}]"
        if field.group_id not in groups:
            raise _error(f"{path}.group_id", f"names the unknown group {field.group_id!r}")
        if field.plane_id not in planes:
            raise _error(f"{path}.plane_id", f"names the unknown plane {field.plane_id!r}")
        _check_shape(field, path)
        _check_page(field, groups[field.group_id], planes[field.plane_id], path)
        pages.setdefault((field.group_id, field.plane_id), []).append(field)
    for members in pages.values():
        members.sort(key=lambda field: field.field_offset_bytes)
        for before, after in pairwise(members):
            if before.field_offset_bytes + before.payload_bytes > after.field_offset_bytes:
                raise _error(f"plan.fields[{after.field_id!r}].field_offset_bytes", f"overlaps {before.field_id!r}")


def _check_shape(field: Field, path: str) -> None:
    _one_of(field.dtype, tuple(ELEMENT_BYTES), f"{path}.dtype")
    if not 1 <= len(field.shape) <= MAX_DIMENSIONS:
        raise _error(f"{path}.shape", f"must have 1..{MAX_DIMENSIONS} dimensions")
    for extent in field.shape:
        _whole(extent, 1, f"{path}.shape")


def _check_page(field: Field, group: Group, plane: Plane, path: str) -> None:
    _whole(field.field_offset_bytes, 0, f"{path}.field_offset_bytes")
    stride = _whole(field.page_stride_bytes, 1, f"{path}.page_stride_bytes")
    if field.field_offset_bytes + field.payload_bytes > stride:
        raise _error(f"{path}.page_stride_bytes", "is smaller than the page: pages would overlap")
    # Otherwise a block would lie in another parent than the one whose group owns it.
    if stride * group.cache_blocks_per_lcm_block != plane.bytes_per_lcm_block:
        raise _error(f"{path}.page_stride_bytes", "does not divide the plane's parent into the group's blocks")


def _check_partition(partition: Partition, field: Field, path: str) -> None:
    if _whole(partition.axis, 0, f"{path}.axis") >= len(field.shape):
        raise _error(f"{path}.axis", "is outside the field's shape")
    local = field.shape[partition.axis]
    extent = _whole(partition.global_extent, 1, f"{path}.global_extent")
    if extent < local or extent % local:
        raise _error(f"{path}.global_extent", f"{extent} is no multiple of the local extent {local}")
    parts = partition.global_parts
    if not parts:
        return
    for part in parts:
        _whole(part, 1, f"{path}.global_parts")
    if not 2 <= len(parts) <= MAX_PARTS or sum(parts) != extent:
        raise _error(f"{path}.global_parts", f"must be 2..{MAX_PARTS} widths that sum to the global extent")
    if any(part % (extent // local) for part in parts):
        raise _error(f"{path}.global_parts", "are not divisible by the number of shards")


def _whole(value: object, low: int, path: str) -> int:
    if type(value) is not int or not low <= value <= MAX_WHOLE:
        raise _error(path, f"must be a whole number of {low}..{MAX_WHOLE}")
    return value


def _one_of(value: object, allowed: tuple[str, ...], path: str) -> None:
    if value not in allowed:
        raise _error(path, f"must be one of {', '.join(allowed)}")


def _unique(ids: Iterable[str], path: str) -> None:
    seen: set[str] = set()
    for name in ids:
        if not 1 <= len(name) <= MAX_ID:
            raise _error(path, f"has an id that is not 1..{MAX_ID} characters long")
        if name in seen:
            raise _error(path, f"has {name!r} twice")
        seen.add(name)


def _error(path: str, reason: str) -> WireError:
    return WireError(f"layout.{path}", f"layout.{path} {reason}")


# ---- Whether two ranks' caches hold the same thing, whatever their capacity, packing and sharding


def compare_layouts(ours: Layout, theirs: Layout) -> None:
    """Raise LayoutMismatch that names the first differing field.

    Capacity, packing, planes, strides and offsets may differ. Rules: docs/legacy_wire.md section 4.4.
    """
    for mismatch in differences(ours, theirs):
        raise mismatch


def differences(ours: Layout, theirs: Layout) -> Iterator[LayoutMismatch]:
    """Yield everything that must agree and does not, with what would change it; the order is that of `_compared`."""
    for name, here, there in _compared(ours, theirs):
        if here != there:
            yield LayoutMismatch(name, str(here), str(there), _advice(name, ours, theirs))


def _compared(ours: Layout, theirs: Layout) -> Iterator[tuple[str, object, object]]:
    """Yield name and both values of what must agree; groups and fields that one side lacks stand in the lists alone."""
    yield "prefix_granularity", ours.prefix_granularity, theirs.prefix_granularity
    yield "group_order", [spec.group_id for spec in ours.group_specs], [spec.group_id for spec in theirs.group_specs]
    specs = {spec.group_id: spec for spec in theirs.group_specs}
    for spec in ours.group_specs:
        if (other := specs.get(spec.group_id)) is None:
            continue
        for attribute in attrs.fields(GroupSpec):
            name = attribute.name
            yield f"group[{spec.group_id}].{name}", getattr(spec, name), getattr(other, name)
        sides = [{field.field_id: field for field in side.fields_of(spec.group_id)} for side in (ours, theirs)]
        yield f"field_order[{spec.group_id}]", list(sides[0]), list(sides[1])
        for field_id in (field_id for field_id in sides[0] if field_id in sides[1]):
            here, there = sides[0][field_id], sides[1][field_id]
            path = f"field[{field_id}]"
            yield f"{path}.dtype", here.dtype, there.dtype
            yield f"{path}.partition", ours.partition(field_id), theirs.partition(field_id)
            yield f"{path}.global_shape", global_shape(ours, here), global_shape(theirs, there)


_NATIVE_GROUPS = {"kv", "state"}
_LAYER = re.compile(r"layer\.(\d+)\.")
_NARROW = ("uint8", "int8", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")


def _advice(name: str, ours: Layout, theirs: Layout) -> str:
    """Return what makes a value equal: a flag of this side, or what the other side must do without."""
    numbers = {"prefix_granularity", *(f"group[{spec.group_id}].rows_per_page" for spec in ours.group_specs)}
    numbers |= {f"group[{spec.group_id}].checkpoint_granularity" for spec in ours.group_specs}
    if name in numbers:
        return f"--block-tokens {theirs.prefix_granularity}"
    if name == "group_order" or name.startswith("field_order"):
        return _advice_on_names(ours, theirs)
    if name.endswith((".dtype", ".global_shape")):
        field_id = FieldId(name.partition("[")[2].partition("]")[0])
        here, there = ours.field(field_id), theirs.field(field_id)
        tokens = ours.prefix_granularity, theirs.prefix_granularity
        unequal = {pair for pair in zip(here.shape, there.shape, strict=False) if pair[0] != pair[1]}
        if unequal == {tokens}:
            return f"--block-tokens {tokens[1]}"
        if there.dtype in _NARROW and here.dtype not in _NARROW:
            return "the peer keeps its KV cache in 8 bits, which mlx-lm does not: start it with an unquantised KV cache"
    if name.endswith(".dtype"):
        return "the weights' dtype: another --model"
    return "another --model"


def _advice_on_names(ours: Layout, theirs: Layout) -> str:
    groups = [{spec.group_id for spec in side.group_specs} for side in (ours, theirs)]
    native = [bool(found & _NATIVE_GROUPS) for found in groups]
    if native[0] != native[1]:
        return "--page-layout nhd" if native[0] else "--page-layout hnd, as a peer of our own generation has it"
    fields = [{field.field_id for field in side.fields} for side in (ours, theirs)]
    layers = [{int(found[1]) for name in side if (found := _LAYER.match(name))} for side in fields]
    more = sorted(fields[1] - fields[0])
    if more and layers[1] - layers[0] and min(layers[1] - layers[0]) > max(layers[0], default=-1):
        return f"the peer has layers of a draft model ({more[0]}), which mlx-lm has not: start it without one"
    if more and layers[1] == layers[0]:
        return f"the peer keeps {more[0]}, which mlx-lm does not: a form of attention or of KV cache that is its own"
    return "another --model"


def global_shape(layout: Layout, field: Field) -> tuple[int, ...]:
    """Return the field's shape over all ranks: the local one with the partition's axis replaced by its whole extent."""
    partition = layout.partition(field.field_id)
    if partition is None:
        return field.shape
    return (*field.shape[: partition.axis], partition.global_extent, *field.shape[partition.axis + 1 :])
