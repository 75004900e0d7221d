"""Named cache layouts for test benches, and page contents that either side can compute alone."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import GroupSpec, Layout, Partition
from pdplane.kv.planning import FieldSpec, plan_layout

_HALF = "bfloat16"
Splits = Sequence[tuple[FieldId, Partition]]


def bench_layout(name: str, tp_size: int, num_lcm_blocks: int) -> Layout:
    """Return one rank's layout by its name. Raises ConfigError, which lists the names, for another one."""
    try:
        make = LAYOUTS[name]
    except KeyError:
        raise ConfigError(f"no layout {name!r}; there are {', '.join(sorted(LAYOUTS))}") from None
    return make(tp_size, num_lcm_blocks)


def _local(extent: int, tp_size: int) -> int:
    return max(1, extent // tp_size)  # ranks beyond the extent repeat it


def _rows(group: str, rows: int, stride: int = 1, window: int | None = None) -> GroupSpec:
    return GroupSpec(
        GroupId(group),
        retention="full_history" if window is None else "sliding_window",
        rows_per_page=rows,
        entry_stride_tokens=stride,
        sliding_window_tokens=window,
        transfer_policy="full_suffix",
    )


def _plan(
    granularity: int,
    blocks: int,
    specs: Sequence[GroupSpec],
    fields: Sequence[FieldSpec],
    splits: Splits = (),
    packing: Mapping[GroupId, int] | None = None,
) -> Layout:
    return plan_layout(
        specs,
        fields,
        num_lcm_blocks=blocks,
        prefix_granularity=granularity,
        packing=packing,
        partitions=splits,
    )


def _field(group: str, name: str, plane: str, *shape: int, dtype: str = _HALF) -> FieldSpec:
    return FieldSpec(GroupId(group), FieldId(name), plane, shape, dtype)


def _split(name: str, axis: int, extent: int, *parts: int) -> tuple[FieldId, Partition]:
    return FieldId(name), Partition(axis, extent, parts)


def _dense(tp: int, blocks: int, *, heads: int, width: int, page: int, layers: int) -> Layout:
    local = _local(heads, tp)
    names = [(layer, kind) for layer in range(layers) for kind in "kv"]
    fields = [_field("full", f"layer.{n}.{kv}", f"unit.{n}.{kv}", page, local, width) for n, kv in names]
    splits = [_split(f"layer.{n}.{kv}", 1, heads) for n, kv in names]
    return _plan(page, blocks, [_rows("full", page)], fields, splits)


def _full_attention(tp: int, blocks: int) -> Layout:
    return _dense(tp, blocks, heads=8, width=4, page=4, layers=2)


def _gqa_small(tp: int, blocks: int) -> Layout:
    """Return a layout with fewer heads than some sides have ranks."""
    return _dense(tp, blocks, heads=2, width=4, page=4, layers=1)


def _big(tp: int, blocks: int) -> Layout:
    """Return a layout of 1 MiB a block at tp 1, in 16 fields: for timings."""
    return _dense(tp, blocks, heads=8, width=64, page=64, layers=8)


def _mla(_tp: int, blocks: int) -> Layout:
    """Return a layout of latents, which every rank has whole."""
    fields = [_field("full", f"layer.{n}.latent", f"unit.{n}.latent", 4, 12) for n in range(2)]
    return _plan(4, blocks, [_rows("full", 4)], fields)


def _swa_hybrid(tp: int, blocks: int) -> Layout:
    """Return a layout with a full and a sliding layer in the same planes."""
    heads, page = 4, 4
    names = [(layer, group, kind) for layer, group in ((0, "full"), (1, "swa")) for kind in "kv"]
    fields = [_field(g, f"layer.{n}.{kv}", f"unit.0.{kv}", page, _local(heads, tp), 4) for n, g, kv in names]
    splits = [_split(f"layer.{n}.{kv}", 1, heads) for n, _, kv in names]
    return _plan(page, blocks, [_rows("full", page), _rows("swa", page, window=6)], fields, splits)


def _state_hybrid(tp: int, blocks: int) -> Layout:
    """Return a layout of keys and values beside a recurrent state, whose convolution has three parts."""
    heads, page, key_width, value_width = 4, 8, 16, 16
    local = _local(heads, tp)
    conv = 2 * key_width + value_width
    fields = [
        _field("attn", "layer.1.k", "unit.0.k", page, local, 4),
        _field("attn", "layer.1.v", "unit.0.v", page, local, 4),
        _field("lin", "layer.0.conv", "unit.s.conv", conv // (heads // local), 3),
        _field("lin", "layer.0.ssm", "unit.s.ssm", local, 4, 4, dtype="float32"),
    ]
    splits = [
        _split("layer.1.k", 1, heads),
        _split("layer.1.v", 1, heads),
        _split("layer.0.conv", 0, conv, key_width, key_width, value_width),
        _split("layer.0.ssm", 0, heads),
    ]
    state = GroupSpec(
        GroupId("lin"),
        retention="full_history",
        family="state",
        transfer_policy="latest_snapshot",
        checkpoint_granularity=page,
    )
    return _plan(page, blocks, [_rows("attn", page), state], fields, splits, {GroupId("attn"): 2})


def _compressed(_tp: int, blocks: int) -> Layout:
    """Return a layout with rows of two tokens and two blocks a parent."""
    fields = [
        _field("comp", "layer.0.c", "unit.0.c", 4, 6, dtype="uint8"),
        _field("full", "layer.0.latent", "unit.0.k", 8, 3),
    ]
    return _plan(8, blocks, [_rows("comp", 4, 2), _rows("full", 8)], fields, (), {GroupId("comp"): 2})


LAYOUTS: Mapping[str, Callable[[int, int], Layout]] = {
    "big": _big,
    "compressed": _compressed,
    "full_attention": _full_attention,
    "gqa_small": _gqa_small,
    "mla": _mla,
    "state_hybrid": _state_hybrid,
    "swa_hybrid": _swa_hybrid,
}


# ---- Page contents that either side of a test bench can compute alone
#
# A page depends on (room, group, field, slot) and on the position in the whole tensor, so every rank of either
# side can compute it. Shared with the bench peers of other implementations.


Octets = npt.NDArray[np.uint8]


def bench_page(layout: Layout, field_id: FieldId, room: int, slot: int, tp_size: int, tp_rank: int) -> Octets:
    """Return the bytes of one rank's page of a field for a slot of a room, one axis."""
    field, partition = layout.field(field_id), layout.partition(field_id)
    element = field.element_bytes
    if partition is None:
        return _whole(room, field.group_id, field_id, slot, (*field.shape, element)).reshape(-1)
    axis, extent = partition.axis, partition.global_extent
    shape = (*field.shape[:axis], extent, *field.shape[axis + 1 :], element)
    page = _whole(room, field.group_id, field_id, slot, shape)
    shards = extent // field.shape[axis]
    mine = _mine(partition.global_parts or (extent,), shards, tp_rank // (tp_size // shards))
    return page.take(mine, axis).reshape(-1)


@functools.lru_cache
def _mine(parts: tuple[int, ...], shards: int, shard: int) -> npt.NDArray[np.intp]:
    """Return the rows of the whole axis that a shard holds."""
    found, start = [], 0
    for part in parts:
        width = part // shards
        found.append(np.arange(start + shard * width, start + (shard + 1) * width))
        start += part
    return np.concatenate(found)


def _whole(room: int, group_id: str, field_id: str, slot: int, shape: tuple[int, ...]) -> Octets:
    seed = hashlib.sha256(f"{room}/{group_id}/{field_id}/{slot}".encode()).digest()
    random = default_rng(int.from_bytes(seed[:8], "little"))
    return random.integers(0, 256, size=math.prod(shape), dtype=np.uint8).reshape(shape)
