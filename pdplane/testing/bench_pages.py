"""Page contents that either side of a test bench can compute alone.

A page depends on (room, group, field, slot) and on the position in the whole tensor, so every rank of either
side knows what it must hold. Shared with the bench peers of other implementations.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import numpy.typing as npt
from numpy.random import default_rng

from pdplane.ids import FieldId
from pdplane.kv.layout import Layout

Octets = npt.NDArray[np.uint8]


def bench_page(layout: Layout, field_id: FieldId, room: int, slot: int, tp_size: int, tp_rank: int) -> Octets:
    """The bytes of one rank's page of a field for a slot of a room, one axis."""
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
    """The rows of the whole axis that a shard holds."""
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
