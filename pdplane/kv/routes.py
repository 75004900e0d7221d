"""Who feeds whom: which prefill ranks hold the bytes that a decode rank needs, and which slices of a page they are.

Words: a *shard* is one of the `global_extent / local extent` slices of a partitioned field; when there are fewer
shards than ranks each shard has *replicas*, and only the first replica (the representative) sends it. A rank that
sends to nobody is a dummy rank. Rules: docs/legacy_wire.md section 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

import attrs

from pdplane.errors import WireError
from pdplane.ids import FieldId, GroupId, Rank, Room
from pdplane.kv.layout import Field, Layout, Partition, compare_layouts

MAX_TP = 1024

_Cut: TypeAlias = tuple[int, int] | None
"""Shards on prefill and on decode; None when every rank holds the whole. It alone decides who feeds whom."""


@attrs.frozen
class Fragment:
    """A slice of every page of a field: `rows` runs of `row_bytes`, at offsets and strides in bytes inside the page."""

    group_id: GroupId
    field_id: FieldId
    source_offset: int
    destination_offset: int
    source_stride: int
    destination_stride: int
    row_bytes: int
    rows: int


@attrs.frozen(cache_hash=True)
class RankRoute:
    """What one prefill rank sends to one decode rank.

    `decode_ranks` are all decode ranks that this prefill rank waits for in a room: those that it serves, or
    rank 0 alone when it serves nobody (`dummy`) and only takes part in the agreement.
    """

    prefill_tp: int
    prefill_rank: Rank
    decode_tp: int
    decode_rank: Rank
    fragments: tuple[Fragment, ...]
    decode_ranks: tuple[Rank, ...]
    dummy: bool = False


@attrs.frozen
class _Shape:
    """What decides a field's fragments; many fields share one."""

    source: tuple[int, ...]
    destination: tuple[int, ...]
    element_bytes: int
    partition: Partition | None

    @property
    def cut(self) -> _Cut:
        if self.partition is None:
            return None
        extent, axis = self.partition.global_extent, self.partition.axis
        return extent // self.source[axis], extent // self.destination[axis]


@attrs.frozen
class _Slice:
    """Fragment numbers without a field's name."""

    source_offset: int
    destination_offset: int
    source_stride: int
    destination_stride: int
    row_bytes: int
    rows: int


def dp_group(room: Room, dp_size: int) -> int:
    """Return the data-parallel group of prefill that serves a room."""
    return room % dp_size


def plan_route(
    prefill_layout: Layout,
    decode_layout: Layout,
    prefill_tp: int,
    prefill_rank: int,
    decode_tp: int,
    decode_rank: int,
) -> RankRoute:
    """Return what `prefill_rank` sends to `decode_rank`.

    With equal tp each rank sends whole pages to its namesake. Raises LayoutMismatch (ours is prefill's) or
    WireError: sizes out of range, shards that the ranks cannot hold, or a decode rank to which this prefill rank
    sends nothing.
    """
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    _check_rank(prefill_rank, prefill_tp, "prefill_rank")
    _check_rank(decode_rank, decode_tp, "decode_rank")
    served = _served(_cuts(prefill_layout, decode_layout), prefill_tp, prefill_rank, decode_tp)
    dummy = not served
    if decode_rank not in (served or (0,)):
        raise WireError("decode_rank", "CachePD Decode registration targets the wrong Prefill TP rank")
    fragments = tuple(
        Fragment(field.group_id, field.field_id, *attrs.astuple(piece))
        for field, shape in _shapes(prefill_layout, decode_layout)
        for piece in _slices(shape, prefill_tp, prefill_rank, decode_tp, decode_rank)
    )
    return RankRoute(
        prefill_tp,
        Rank(prefill_rank),
        decode_tp,
        Rank(decode_rank),
        fragments,
        served or (Rank(0),),
        dummy,
    )


def expected_prefill_ranks(
    prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int, decode_rank: int
) -> tuple[Rank, ...]:
    """Return the prefill ranks that send to `decode_rank`, ascending: those whose Success it waits for."""
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    _check_rank(decode_rank, decode_tp, "decode_rank")
    return _feeders(_cuts(prefill_layout, decode_layout), prefill_tp, decode_tp, decode_rank)


def decode_ranks_served(
    prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, prefill_rank: int, decode_tp: int
) -> tuple[Rank, ...]:
    """Return the decode ranks that `prefill_rank` sends to, ascending."""
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    return _served(_cuts(prefill_layout, decode_layout), prefill_tp, prefill_rank, decode_tp)


def dummy_ranks(prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int) -> tuple[Rank, ...]:
    """Return the prefill ranks that send to nobody, ascending; only decode rank 0 contacts them."""
    _check_pair(prefill_layout, decode_layout, prefill_tp, decode_tp)
    return _dummies(_cuts(prefill_layout, decode_layout), prefill_tp, decode_tp)


def contact_order(
    prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int, decode_rank: int
) -> tuple[Rank, ...]:
    """Return the prefill ranks that `decode_rank` registers with, ascending: its feeders, for rank 0 dummies too."""
    feeders = expected_prefill_ranks(prefill_layout, decode_layout, prefill_tp, decode_tp, decode_rank)
    if decode_rank != 0:
        return feeders
    return tuple(sorted({*feeders, *_dummies(_cuts(prefill_layout, decode_layout), prefill_tp, decode_tp)}))


def _check_pair(prefill_layout: Layout, decode_layout: Layout, prefill_tp: int, decode_tp: int) -> None:
    for name, size in (("prefill_tp_size", prefill_tp), ("decode_tp_size", decode_tp)):
        if not 1 <= size <= MAX_TP:
            raise WireError(name, f"{name} must be 1..{MAX_TP}, not {size}")
    compare_layouts(prefill_layout, decode_layout)
    for field, shape in _shapes(prefill_layout, decode_layout):
        if prefill_tp == decode_tp:
            if shape.source != shape.destination:
                raise WireError(
                    f"{field.field_id}.shape",
                    f"{field.field_id} has the shape {shape.source} on prefill and {shape.destination} on decode, "
                    f"at the same tp {prefill_tp}",
                )
        elif shape.partition is not None:
            _check_shards(field, shape.partition, shape.source, prefill_tp)
            _check_shards(field, shape.partition, shape.destination, decode_tp)


def _check_shards(field: Field, partition: Partition, shape: tuple[int, ...], tp: int) -> None:
    shards = partition.global_extent // shape[partition.axis]
    if shards > tp or tp % shards:
        raise WireError(
            f"{field.field_id}.partition",
            f"{field.field_id}: global extent {partition.global_extent} and local extent "
            f"{shape[partition.axis]} cannot be mapped to tp {tp}",
        )


def _check_rank(rank: int, tp: int, name: str) -> None:
    if not 0 <= rank < tp:
        raise WireError(name, f"{name} must be 0..{tp - 1}, not {rank}")


def _shapes(prefill_layout: Layout, decode_layout: Layout) -> Iterator[tuple[Field, _Shape]]:
    """Yield every field with what decides its slices; groups in spec order, their fields in string order."""
    for spec in prefill_layout.group_specs:
        for field in prefill_layout.fields_of(spec.group_id):
            destination = decode_layout.field(field.field_id).shape
            partition = prefill_layout.partition(field.field_id)
            yield field, _Shape(field.shape, destination, field.element_bytes, partition)


def _cuts(prefill_layout: Layout, decode_layout: Layout) -> frozenset[_Cut]:
    return frozenset(shape.cut for _, shape in _shapes(prefill_layout, decode_layout))


def _served(cuts: frozenset[_Cut], prefill_tp: int, prefill_rank: int, decode_tp: int) -> tuple[Rank, ...]:
    return tuple(Rank(rank) for rank in range(decode_tp) if prefill_rank in _feeders(cuts, prefill_tp, decode_tp, rank))


def _dummies(cuts: frozenset[_Cut], prefill_tp: int, decode_tp: int) -> tuple[Rank, ...]:
    busy = {rank for decode_rank in range(decode_tp) for rank in _feeders(cuts, prefill_tp, decode_tp, decode_rank)}
    return tuple(Rank(rank) for rank in range(prefill_tp) if rank not in busy)


@lru_cache(maxsize=4096)
def _feeders(cuts: frozenset[_Cut], prefill_tp: int, decode_tp: int, decode_rank: int) -> tuple[Rank, ...]:
    if prefill_tp == decode_tp:
        return (Rank(decode_rank),)
    found: set[int] = set()
    for cut in cuts:
        if cut is None:
            found.add(decode_rank * prefill_tp // decode_tp)
        else:
            found.update(_shard_feeders(*cut, prefill_tp, decode_tp, decode_rank))
    return tuple(Rank(rank) for rank in sorted(found))


def _shard_feeders(prefill_shards: int, decode_shards: int, prefill_tp: int, decode_tp: int, decode_rank: int) -> range:
    """Return the representatives of those prefill shards that overlap decode's shard.

    Every part is cut in the same ratio.
    """
    shard = decode_rank // (decode_tp // decode_shards)
    first = shard * prefill_shards // decode_shards
    stop = -(-(shard + 1) * prefill_shards // decode_shards)
    replicas = prefill_tp // prefill_shards
    return range(first * replicas, stop * replicas, replicas)


@lru_cache(maxsize=4096)
def _slices(shape: _Shape, prefill_tp: int, prefill_rank: int, decode_tp: int, decode_rank: int) -> tuple[_Slice, ...]:
    partition, cut = shape.partition, shape.cut
    if prefill_rank not in _feeders(frozenset((cut,)), prefill_tp, decode_tp, decode_rank):
        return ()
    if prefill_tp == decode_tp or partition is None or cut is None:
        whole = math.prod(shape.source) * shape.element_bytes
        return (_Slice(0, 0, whole, whole, whole, 1),)
    shards = (prefill_rank * cut[0] // prefill_tp, decode_rank * cut[1] // decode_tp)
    inner = math.prod(shape.source[partition.axis + 1 :]) * shape.element_bytes
    rows = math.prod(shape.source[: partition.axis])
    source_stride = shape.source[partition.axis] * inner
    destination_stride = shape.destination[partition.axis] * inner
    found = []
    for source_at, destination_at, width in _overlaps(partition, cut, shards):
        row_bytes, offsets = width * inner, (source_at * inner, destination_at * inner)
        if rows > 1 and source_stride == destination_stride == row_bytes:
            whole = rows * row_bytes  # the rows touch on both sides
            found.append(_Slice(*offsets, whole, whole, whole, 1))
        else:
            found.append(_Slice(*offsets, source_stride, destination_stride, row_bytes, rows))
    return tuple(found)


def _overlaps(partition: Partition, cut: tuple[int, int], shards: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield source start, destination start and width, in elements of the axis, of each part that both sides hold."""
    source_base = destination_base = 0
    for part in partition.global_parts or (partition.global_extent,):
        source_width, destination_width = part // cut[0], part // cut[1]
        source_start, destination_start = shards[0] * source_width, shards[1] * destination_width
        start = max(source_start, destination_start)
        width = min(source_start + source_width, destination_start + destination_width) - start
        if width > 0:
            yield source_base + start - source_start, destination_base + start - destination_start, width
        source_base += source_width
        destination_base += destination_width
