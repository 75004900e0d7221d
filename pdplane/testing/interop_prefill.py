"""The prefill rank of the interop peer: synthetic pages instead of a model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from pdplane.errors import ConfigError
from pdplane.ids import GroupId, Room
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.copies import dp_group
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import blocks_behind, blocks_needed, chunk_positions, logical_slots
from pdplane.plane.prefill import PrefillPlane
from pdplane.plane.rooms import RoomWindow
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
    drive,
    finish,
    join_ranks,
    prefill_plane,
    reason_of,
    tables,
)

_LOOK_S = 0.01


def run_prefill(options: InteropOptions, events: EventLog) -> bool:
    """Play the rank; return whether every room of its group ended as expected. Raises ConfigError."""
    layout = options.make_layout()
    arena = Arena.zeros(layout.arena_bytes)
    with prefill_plane(options, layout, arena) as plane:
        if options.serve_bootstrap:
            events("bootstrap", url=plane.rendezvous.url("http"))
        _wait_ready(plane, options)
        control = plane.legacy_control or plane.control
        events(
            "ready",
            role="prefill",
            session=None,
            zmq=control.url("tcp"),
            arena_ptr=arena.base,
            arena_bytes=arena.nbytes,
            tp_rank=options.tp_rank,
            dp_rank=options.dp_rank,
        )
        reduce = join_ranks(options.reduce_at, options.tp_size, options.tp_rank)
        try:
            alarm, pool = Alarm(), Pool(layout)
            ours = [room for room in options.rooms if dp_group(room, options.dp_size) == options.dp_rank]
            runs = [_PrefillRun(plane, layout, arena, pool, options, events, alarm, room) for room in ours]
            drive(runs, reduce, alarm, options.timeout)
            time.sleep(options.linger)
        finally:
            reduce.close()
        return finish(events, "prefill", runs, options.expect)


def _wait_ready(plane: PrefillPlane, options: InteropOptions) -> None:
    deadline = time.monotonic() + options.wait_bootstrap
    while not plane.ready:
        if time.monotonic() > deadline:
            raise ConfigError(f"the rendezvous at {plane.rendezvous} did not take this rank")
        time.sleep(_LOOK_S)


class _PrefillRun:
    """One room: wait for the window, write the pages, push them, say success."""

    outcome: str | None

    def __init__(
        self,
        plane: PrefillPlane,
        layout: Layout,
        arena: Arena,
        pool: Pool,
        options: InteropOptions,
        events: EventLog,
        alarm: Alarm,
        room: Room,
    ) -> None:
        self.room, self.outcome = room, None
        self._layout, self._arena, self._pool = layout, arena, pool
        self._options, self._events = options, events
        self._begun = False
        self._handle = plane.open(room, prompt_len=options.prompt_len)
        alarm.watch(self._handle.window, self._handle.done)
        events("registered", room=room, status=NAMES[BOOTSTRAPPING], reason="")

    @property
    def state(self) -> int:
        for future, reached in ((self._handle.done, SUCCESS), (self._handle.window, BOOTSTRAPPED)):
            if future.done():
                return FAILED if future.exception() else reached
        return BOOTSTRAPPING

    def advance(self, agreed: int) -> None:
        if agreed == FAILED:
            self._fail()
        elif agreed >= BOOTSTRAPPED and not self._begun:
            self._begun = True
            self._events("BootstrappedEvent", room=self.room)
            self._forward(self._handle.window.result())
        if agreed == SUCCESS:
            self.outcome = "success"
            self._events("SucceededEvent", room=self.room)

    def _fail(self) -> None:
        self.outcome = "failed"
        failed = self._handle.done if self._handle.done.done() else self._handle.window
        reason = reason_of(failed)
        self._handle.cancel(reason)
        self._events("FailedEvent", room=self.room, reason=reason)

    def _forward(self, window: RoomWindow) -> None:
        layout, prompt_len = self._layout, self._options.prompt_len
        blocks = self._pool.allocate(blocks_needed(layout, prompt_len))
        self._handle.released.add_done_callback(lambda _done: self._pool.release(blocks))
        self._events("preallocated", room=self.room, tables=tables(layout, blocks, 0, prompt_len))
        sessions = [str(destination.session) for destination in window.destinations]
        self._events("manifests", room=self.room, sessions=sessions)
        if self.room == self._options.abort:
            self._handle.cancel("aborted by the bench")
            return
        started = time.monotonic()
        offered = blocks_behind(layout, blocks, window.prefix_len, prompt_len)
        for chunk in _chunks(self._options, window):
            for steps in _intervals(layout, self._options):
                self._write_pages(offered, window, steps, chunk)
                self._handle.push(offered, steps, chunk)
        self._events("forward_done", room=self.room, seconds=round(time.monotonic() - started, 6))
        self._handle.finish(self._options.token, None, self._options.spec)

    def _write_pages(
        self, offered: Mapping[GroupId, Sequence[int]], window: RoomWindow, steps: range, chunk: range
    ) -> None:
        """Write only the pages that the chunk completes, so that one sent too early arrives empty and is noticed."""
        layout, options = self._layout, self._options
        for field_id in (name for step in steps for name in layout.steps[step]):
            spec = layout.spec(layout.field(field_id).group_id)
            slots = logical_slots(spec, window.prefix_len, window.prompt_len)
            part = chunk_positions(spec, window.prefix_len, window.prompt_len, chunk)
            ids = np.asarray(offered[spec.group_id][part.start : part.stop], np.uint64)
            offsets = layout.page_offsets(field_id, ids)
            for slot, offset in zip(slots[part.start : part.stop], offsets.tolist(), strict=True):
                page = bench_page(layout, field_id, self.room, slot, options.tp_size, options.tp_rank)
                self._arena.bytes[offset : offset + len(page)] = page


def _chunks(options: InteropOptions, window: RoomWindow) -> Iterator[range]:
    """Yield the prompt's chunks that are pushed one by one; tokens that our cache held already belong to the first.

    An idle rank has none, since it gets no offer with lengths.
    """
    if not window.destinations:
        return
    size = options.chunk if options.layerwise_interval > 0 else 0
    starts = list(range(options.chunk_start, window.prompt_len, size or window.prompt_len)) or [0]
    for start, end in itertools.pairwise([min(starts[0], window.prefix_len), *starts[1:], window.prompt_len]):
        yield range(start, end)


def _intervals(layout: Layout, options: InteropOptions) -> Iterator[range]:
    """Yield the layout's steps in the order of their pushes: some layers at a time, a draft model's as one."""
    count = len(layout.steps)
    if options.layerwise_interval <= 0:
        yield range(count)
        return
    target = min(options.target_layers or count, count)
    for start in range(0, target, options.layerwise_interval):
        yield range(start, min(start + options.layerwise_interval, target))
    if target < count:
        yield range(target, count)
