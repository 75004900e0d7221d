"""Whether two ranks' caches hold the same thing, whatever their capacity, packing and sharding."""

from __future__ import annotations

import attrs

from pdplane.errors import LayoutMismatch
from pdplane.kv.layout import Field, GroupSpec, Layout


def compare_layouts(ours: Layout, theirs: Layout) -> None:
    """Raise LayoutMismatch that names the first differing field.

    Capacity, packing, planes, strides and offsets may differ. Source: legacy_peer.md section 4.4.
    """
    _same("prefix_granularity", ours.prefix_granularity, theirs.prefix_granularity)
    _same("group_order", [spec.group_id for spec in ours.group_specs], [spec.group_id for spec in theirs.group_specs])
    for our_spec, their_spec in zip(ours.group_specs, theirs.group_specs, strict=True):
        _compare_specs(our_spec, their_spec)
        our_fields, their_fields = ours.fields_of(our_spec.group_id), theirs.fields_of(our_spec.group_id)
        _same(
            f"field_order[{our_spec.group_id}]",
            [field.field_id for field in our_fields],
            [field.field_id for field in their_fields],
        )
        for our_field, their_field in zip(our_fields, their_fields, strict=True):
            _compare_fields(ours, our_field, theirs, their_field)


def _compare_specs(ours: GroupSpec, theirs: GroupSpec) -> None:
    for attribute in attrs.fields(GroupSpec):
        name = attribute.name
        _same(f"group[{ours.group_id}].{name}", getattr(ours, name), getattr(theirs, name))


def _compare_fields(ours: Layout, our_field: Field, theirs: Layout, their_field: Field) -> None:
    path = f"field[{our_field.field_id}]"
    _same(f"{path}.dtype", our_field.dtype, their_field.dtype)
    _same(f"{path}.partition", ours.partition(our_field.field_id), theirs.partition(their_field.field_id))
    _same(f"{path}.global_shape", global_shape(ours, our_field), global_shape(theirs, their_field))


def global_shape(layout: Layout, field: Field) -> tuple[int, ...]:
    """The field's shape over all ranks: the local one with the partition's axis replaced by its whole extent."""
    partition = layout.partition(field.field_id)
    if partition is None:
        return field.shape
    return (*field.shape[: partition.axis], partition.global_extent, *field.shape[partition.axis + 1 :])


def _same(name: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise LayoutMismatch(name, str(ours), str(theirs))
