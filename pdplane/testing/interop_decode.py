"""The decode rank of the interop peer: it checks every byte that must come, and that no other byte changes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from pdplane.ids import GroupId, Room
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.copies import window_runs
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, blocks_needed, build_manifest, logical_slots
from pdplane.messages import NO_TOKEN
from pdplane.plane.decode import DecodePlane
from pdplane.plane.rooms import RoomOffered
from pdplane.testing.bench_layouts import bench_page
from pdplane.testing.interop_run import (
    BOOTSTRAPPED,
    BOOTSTRAPPING,
    FAILED,
    NAMES,
    SUCCESS,
    Alarm,
    EventLog,
    InteropOptions,
    decode_plane,
    drive,
    finish,
    join_ranks,
    reason_of,
    tables,
)

UNTOUCHED = 0xEE


def run_decode(options: InteropOptions, events: EventLog) -> bool:
    """Play the rank; return whether every room ended as expected and no byte is wrong. Raises ConfigError."""
    layout = options.make_layout()
    arena = Arena(np.full(layout.arena_bytes, UNTOUCHED, np.uint8))
    with decode_plane(options, layout, arena) as plane:
        events(
            "ready",
            role="decode",
            session=plane.session,
            zmq=plane.legacy_status.url("tcp") if plane.legacy_status else None,
            arena_ptr=arena.base,
            arena_bytes=arena.nbytes,
            tp_rank=options.tp_rank,
            dp_rank=options.dp_rank,
        )
        reduce = join_ranks(options.reduce_at, options.tp_size, options.tp_rank)
        try:
            side = _Side(plane, layout, arena, Pool(layout), options, events, Alarm())
            runs = [_DecodeRun(side, room) for room in options.rooms]
            drive(runs, reduce, side.alarm, options.timeout, poll=lambda: _note_offers(plane, runs))
            time.sleep(options.linger)  # bytes that land now are stray
        finally:
            reduce.close()
        stray = _stray_bytes(arena, layout, [run.manifest for run in runs])
        ended = finish(events, "decode", runs, options.expect, stray_bytes=stray)
        return ended and not stray and not any(run.bad_bytes for run in runs)


@attrs.frozen
class _Side:
    """What the rooms of the rank share."""

    plane: DecodePlane
    layout: Layout
    arena: Arena
    pool: Pool
    options: InteropOptions
    events: EventLog
    alarm: Alarm


class _DecodeRun:
    """One room: offer blocks, wait, compare every byte. Its blocks are not used again, so that strays show.

    Its `seconds` run from the offer to the delivery: what a room takes once both sides know each other.
    """

    outcome: str | None

    def __init__(self, side: _Side, room: Room) -> None:
        self.room, self.outcome = room, None
        self.offered = False
        self.bad_bytes = 0
        self._side, self._offered_s = side, 0.0
        self._told = False
        layout, options = side.layout, side.options
        self._blocks = side.pool.allocate(blocks_needed(layout, options.prompt_len, options.prefix_len))
        self.manifest = build_manifest(layout, self._blocks, options.prefix_len, options.prompt_len)
        self._handle = side.plane.open(room, prefill=options.rendezvous, manifest=self.manifest)
        side.alarm.watch(self._handle.done)

    def note_offer(self) -> None:
        self.offered, self._offered_s = True, time.monotonic()

    @property
    def state(self) -> int:
        done = self._handle.done
        if done.done():
            return FAILED if done.exception() else SUCCESS
        return BOOTSTRAPPED if self.offered else BOOTSTRAPPING

    def advance(self, agreed: int) -> None:
        if agreed == BOOTSTRAPPING:
            return
        if not self._told:
            self._tell_bootstrapped(agreed)
        if agreed == FAILED:
            self._fail()
        elif agreed == SUCCESS:
            self._succeed()

    def _tell_bootstrapped(self, agreed: int) -> None:
        self._told = True
        events, options = self._side.events, self._side.options
        if agreed == FAILED and not self.offered:
            events("registered", room=self.room, status=NAMES[FAILED], reason=reason_of(self._handle.done))
            return
        events("registered", room=self.room, status=NAMES[BOOTSTRAPPED], reason="")
        events("BootstrappedEvent", room=self.room)
        found = tables(self._side.layout, self._blocks, options.prefix_len, options.prompt_len)
        events("preallocated", room=self.room, tables=found)

    def _fail(self) -> None:
        self.outcome = "failed"
        reason = reason_of(self._handle.done)
        self._handle.cancel(reason)
        self._side.events("FailedEvent", room=self.room, reason=reason)

    def _succeed(self) -> None:
        self.outcome = "success"
        delivered = self._handle.done.result()
        seconds = time.monotonic() - self._offered_s
        good, self.bad_bytes = _compare(self._side, self._blocks, self.room)
        self._side.events(
            "RemotePrefillDoneEvent",
            room=self.room,
            token=NO_TOKEN if delivered.first_token is None else delivered.first_token,
            spec=list(delivered.candidates or ()),
            seconds=round(seconds, 6),
            verified_bytes=good,
            bad_bytes=self.bad_bytes,
        )


def _note_offers(plane: DecodePlane, runs: Sequence[_DecodeRun]) -> None:
    offered = {event.room for event in plane.poll() if isinstance(event, RoomOffered)}
    for run in runs:
        if run.room in offered:
            run.note_offer()


def _compare(side: _Side, blocks: Mapping[GroupId, Sequence[int]], room: Room) -> tuple[int, int]:
    """Return how many bytes of the room's pages are right, and how many are not."""
    layout, options, good, bad = side.layout, side.options, 0, 0
    for field in layout.fields:
        ids = np.asarray(blocks[field.group_id], np.uint64)
        slots = logical_slots(layout.spec(field.group_id), options.prefix_len, options.prompt_len)
        for slot, offset in zip(slots, layout.page_offsets(field.field_id, ids).tolist(), strict=True):
            page = bench_page(layout, field.field_id, room, slot, options.tp_size, options.tp_rank)
            right = int(np.count_nonzero(side.arena.bytes[offset : offset + len(page)] == page))
            good, bad = good + right, bad + len(page) - right
    return good, bad


def _stray_bytes(arena: Arena, layout: Layout, manifests: Sequence[Manifest]) -> int:
    """Return how many bytes outside the rooms' pages have changed."""
    outside = np.ones(arena.nbytes, np.bool_)
    for manifest in manifests:
        for start, length in zip(*(column.tolist() for column in window_runs(layout, manifest)), strict=True):
            outside[start : start + length] = False
    return int(np.count_nonzero(arena.bytes[outside] != UNTOUCHED))
