"""Small layouts and manifests that tests of several packages share."""

from __future__ import annotations

from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import FULL_HISTORY, FULL_SUFFIX, HISTORY, LATEST_SNAPSHOT, STATE, GroupSpec, Layout, Partition
from pdplane.kv.planning import FieldSpec, plan_layout

KV, SNAPSHOT = GroupId("kv"), GroupId("state")


def two_group_layout(*, heads: int = 4, total_heads: int = 4, num_lcm_blocks: int = 7) -> Layout:
    """A history group of two layers with two blocks a parent, and a snapshot group; 4 tokens a block."""
    specs = (
        GroupSpec(KV, FULL_HISTORY, 4, 1, None, HISTORY, FULL_SUFFIX),
        GroupSpec(SNAPSHOT, FULL_HISTORY, family=STATE, transfer_policy=LATEST_SNAPSHOT, checkpoint_granularity=4),
    )
    names = [FieldId(f"layer.{layer}.{suffix}") for layer in range(2) for suffix in "kv"]
    fields = [FieldSpec(KV, name, "kv", (4, heads, 2), "float16") for name in names]
    fields.append(FieldSpec(SNAPSHOT, FieldId("layer.2.ssm"), "ssm", (heads, 3), "float32"))
    partitions = [(name, Partition(1, total_heads)) for name in names]
    partitions.append((FieldId("layer.2.ssm"), Partition(0, total_heads)))
    return plan_layout(
        specs,
        fields,
        num_lcm_blocks=num_lcm_blocks,
        prefix_granularity=4,
        packing={KV: 2},
        partitions=partitions,
    )
