"""What a layout must satisfy before anyone computes an address from it.

The legacy receiver leaves most of this unchecked (block counts, planes, offsets); a peer's layout decides where
bytes land, so everything is checked here once and trusted afterwards. The field at fault is named by its path.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from pdplane.errors import WireError
from pdplane.kv.layout import (
    ELEMENT_BYTES,
    FULL_HISTORY,
    FULL_SUFFIX,
    HISTORY,
    LATEST_SNAPSHOT,
    SLIDING_WINDOW,
    STATE,
    Field,
    Group,
    GroupSpec,
    Layout,
    Partition,
    Plane,
)

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
