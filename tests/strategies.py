"""Hypothesis strategies: layouts of one model at any tp, and messages broken in every way we could think of."""

from __future__ import annotations

import json
from typing import Any

import attrs
from hypothesis import strategies as st

from pdplane import wire
from pdplane.errors import Cause, Why
from pdplane.ids import FieldId, Generation, GroupId, Life, Rank, Room, SessionId
from pdplane.kv.layout import FULL_HISTORY, FULL_SUFFIX, HISTORY, LATEST_SNAPSHOT, STATE, GroupSpec, Layout, Partition
from pdplane.kv.manifest import build_manifest
from pdplane.kv.planning import FieldSpec, plan_layout
from pdplane.messages import Cancel, Hello, Preallocation, Registration, Status, StatusCode, Window
from tests.samples import KV, SNAPSHOT, two_group_layout

MAX_SHARDS = 8


@attrs.frozen
class Tensor:
    """A field over all ranks: `shards` is how often its axis can be cut at most; axis None means replicated."""

    group_id: GroupId
    field_id: FieldId
    plane_id: str
    global_shape: tuple[int, ...]
    dtype: str
    axis: int | None
    shards: int
    parts: tuple[int, ...]

    def shard_count(self, tp: int) -> int:
        return 1 if self.axis is None else min(tp, self.shards)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        if self.axis is None:
            return self.global_shape
        extent = self.global_shape[self.axis] // self.shard_count(tp)
        return (*self.global_shape[: self.axis], extent, *self.global_shape[self.axis + 1 :])


@attrs.frozen
class Cache:
    """A model's whole cache, from which each side makes its own layout."""

    tensors: tuple[Tensor, ...]

    def layout(self, tp: int, *, packing: int = 1, num_lcm_blocks: int = 4) -> Layout:
        used = {tensor.group_id for tensor in self.tensors}
        specs = [
            GroupSpec(KV, FULL_HISTORY, 4, 1, None, HISTORY, FULL_SUFFIX),
            GroupSpec(SNAPSHOT, FULL_HISTORY, None, None, None, STATE, LATEST_SNAPSHOT, 4),
        ]
        fields = [FieldSpec(t.group_id, t.field_id, t.plane_id, t.local_shape(tp), t.dtype) for t in self.tensors]
        partitions = [
            (t.field_id, Partition(t.axis, t.global_shape[t.axis], t.parts)) for t in self.tensors if t.axis is not None
        ]
        return plan_layout(
            [spec for spec in specs if spec.group_id in used],
            fields,
            num_lcm_blocks=num_lcm_blocks,
            prefix_granularity=4,
            packing={KV: packing},
            partitions=partitions,
        )


@st.composite
def _tensors(draw: st.DrawFn, name: str) -> Tensor:
    axis = draw(st.sampled_from([None, 0, 1, 2]))
    shards = draw(st.sampled_from([1, 2, 4, 8]))
    shape = [draw(st.integers(1, 3)) for _ in range(3)]
    parts: list[int] = []
    if axis is not None:
        widths = draw(st.lists(st.integers(1, 2).map(lambda width: width * shards), min_size=1, max_size=3))
        shape[axis] = sum(widths)
        parts = widths if len(widths) > 1 else []
    return Tensor(
        draw(st.sampled_from([KV, SNAPSHOT])),
        FieldId(name),
        draw(st.sampled_from(["a", "b"])),
        tuple(shape),
        draw(st.sampled_from(["uint8", "float16", "float32", "int64"])),
        axis,
        shards,
        tuple(parts),
    )


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    """One to four fields in up to two groups and two planes (which the groups may share)."""
    count = draw(st.integers(1, 4))
    return Cache(tuple(draw(_tensors(f"layer.{index}.x")) for index in range(count)))


def _messages() -> list[list[bytes]]:
    layout = two_group_layout()
    manifest = wire.encode_manifest(build_manifest(layout, {KV: (1, 2), SNAPSHOT: (3,)}, 0, 8))
    session, life = SessionId("10.0.0.1:5000"), Life("a" * 32)
    status = Status(Room(7), StatusCode.SUCCESS, Rank(1), 42, (1, -2), 16, b"\0" * 8)
    return [
        wire.encode_registration(Registration("10.0.0.1", 4000, session, 4096, wire.encode_layout(layout), 2, 1)),
        wire.encode_preallocation(Preallocation(Room(7), session, manifest)),
        wire.encode_status(status),
        wire.encode_notice(Hello("1", life)),
        wire.encode_notice(Window(Room(7), Generation(3), "ab")),
        wire.encode_notice(Cancel(Room(7), Generation(3), Why(Cause.CANCELLED, "gone"))),
    ]


MESSAGES = _messages()

_json_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "", "kv", "layer.0.k", 0, 1, -1, 2**63, 10**18]),
)
_json = st.recursive(
    _json_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _edited_json(draw: st.DrawFn, data: bytes) -> bytes:
    """The JSON with one value somewhere replaced, removed or joined by another."""
    root: Any = json.loads(data)
    node: Any = root
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        inner = node[key]
        if isinstance(inner, dict | list) and inner and draw(st.booleans()):
            node = inner
            continue
        if draw(st.booleans()):
            node[key] = draw(_json)
        elif isinstance(node, dict) and draw(st.booleans()):
            node[draw(st.text(max_size=8))] = draw(_json)
        else:
            del node[key]
        break
    return json.dumps(root).encode(draw(st.sampled_from(["utf-8", "utf-16", "utf-32-be"])))


@st.composite
def _edited_bytes(draw: st.DrawFn, frame: bytes) -> bytes:
    start = draw(st.integers(0, len(frame)))
    stop = draw(st.integers(start, min(len(frame), start + 8)))
    return frame[:start] + draw(st.binary(max_size=8)) + frame[stop:]


_numbers = st.integers(-(2**70), 2**70).map(lambda number: str(number).encode())


@st.composite
def broken_messages(draw: st.DrawFn) -> list[bytes]:
    """Frames that are noise, or a valid message with one frame changed, doubled or lost."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.lists(st.binary(max_size=24), max_size=9))
    frames = list(draw(st.sampled_from(MESSAGES)))
    index = draw(st.integers(0, len(frames) - 1))
    change = draw(st.sampled_from(["json", "bytes", "number", "noise", "lost", "doubled", "nothing"]))
    if change == "lost":
        del frames[index]
    elif change == "doubled":
        frames.insert(index, frames[index])
    elif change == "number":
        frames[index] = draw(_numbers)
    elif change == "noise":
        frames[index] = draw(st.binary(max_size=64))
    elif change == "json":
        frames = [draw(_edited_json(frame)) if frame.startswith(b"{") else frame for frame in frames]
    elif change == "bytes":
        frames[index] = draw(_edited_bytes(frames[index]))
    return frames
