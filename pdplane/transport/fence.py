"""Who may write where in the arena, and the promise that a closed room stays untouched.

Decode opens the fence for each room: the runs of the arena that its manifest covers, one generation, and
the writers it expects. Receivers ask `Fence.admit` for each segment and get a `Grant`, or the reason of
the refusal. Everything that can store into the arena then goes through `Grant.store`, which holds the
room's lock shared for that one bounded call. `Fence.close` takes the same lock exclusively: no call
begins after it was called, and it returns when the last running one has ended. So after `close` nothing
lands any more and the blocks may be reused; other rooms are not affected.
"""

from __future__ import annotations

import bisect
import enum
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeAlias, TypeVar

import attrs
import numpy as np

from pdplane.errors import LocalProtocolError
from pdplane.ids import Generation, Life, Rank, Room
from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64, united_runs
from pdplane.kv.layout import FEW

T = TypeVar("T")

OnLanded: TypeAlias = Callable[[U64, U64], None]
"""Called with the offsets and lengths of each whole segment, by the thread that moved it; must not block or raise."""

MAX_SEGMENTS = 65_536
"""Segments counted for one rank in one room; 2 GiB in the smallest useful segments are 1,024."""


class Refusal(enum.Enum):
    """Why a write was refused; the value is its number on the wire."""

    CLOSED = 1
    GENERATION = 2
    WRITER = 3
    BOUNDS = 4
    CHECKSUM = 5


@attrs.frozen
class Writer:
    """A prefill rank in one life, as its greeting named it."""

    prefill_rank: Rank
    life: Life


@attrs.frozen(eq=False)
class Write:
    """The runs of the arena that one segment wants to write, and for which room; a rank's `segment` counts once."""

    writer: Writer
    room: Room
    generation: Generation
    segment: int
    offsets: U64
    lengths: U64
    nbytes: int


@attrs.frozen
class FenceSnapshot:
    """Counts since the start, but for `open_rooms`."""

    open_rooms: int
    refused_closed: int
    refused_generation: int
    refused_writer: int
    refused_bounds: int
    refused_checksum: int = 0


@attrs.define
class _Progress:
    """What one rank has landed in a room: whole segments, by number."""

    segments: dict[int, int] = attrs.Factory(dict)
    nbytes: int = 0


class _RoomRuns:
    """One room's runs. `_gate` guards the fields; running stores are counted and hold no lock."""

    def __init__(
        self,
        generation: Generation,
        starts: U64,
        ends: U64,
        writers: Mapping[Rank, Life] | None,
        on_landed: OnLanded | None,
    ) -> None:
        self.generation, self._on_landed = generation, on_landed
        self._starts = starts
        self._limits = np.append(np.zeros(1, np.uint64), ends)  # after n starts; after none: nowhere
        self._few = (starts.tolist(), self._limits.tolist()) if len(starts) <= FEW else None
        self._nbytes = int((ends - starts).sum())
        self._writers = None if writers is None else dict(writers)
        self._gate = threading.RLock()
        self._stored = threading.Condition(self._gate)  # its own `with` is Python and slower
        self._open = True
        self._storing = 0
        self._progress: dict[Rank, _Progress] = {}

    def refusal(self, write: Write) -> Refusal | None:
        if write.generation != self.generation:
            return Refusal.GENERATION
        if not self._open:
            return Refusal.CLOSED
        writer = write.writer
        if self._writers is not None and self._writers.get(writer.prefill_rank) != writer.life:
            return Refusal.WRITER
        if not self._covers(write.offsets, write.lengths) or not self._countable(write):
            return Refusal.BOUNDS
        return None

    def store(self, call: Callable[[], T]) -> T | None:
        with self._gate:
            if not self._open:
                return None
            self._storing += 1
        try:
            return call()
        finally:
            with self._gate:
                self._storing -= 1
                if not self._storing and not self._open:  # `shut` waits
                    self._stored.notify_all()

    def finish(self, write: Write) -> int | None:
        with self._gate:
            if not self._open:
                return None
            progress = self._progress.setdefault(write.writer.prefill_rank, _Progress())
            fresh = write.nbytes > 0 and write.segment not in progress.segments
            if fresh:
                progress.segments[write.segment] = write.nbytes
                progress.nbytes += write.nbytes
            landed = progress.nbytes
        if fresh and self._on_landed is not None:
            self._on_landed(write.offsets, write.lengths)
        return landed

    def shut(self) -> bool:
        with self._gate:
            was_open, self._open = self._open, False
            self._stored.wait_for(lambda: not self._storing)
            return was_open

    def repeats(self, write: Write) -> bool:
        with self._gate:
            progress = self._progress.get(write.writer.prefill_rank)
            return progress is not None and write.segment in progress.segments

    def _covers(self, offsets: U64, lengths: U64) -> bool:
        """Return whether every run lies inside one run of the room.

        Empty runs and sums that wrap around lie nowhere.
        """
        if self._few is not None and len(offsets) <= FEW:
            starts, few = self._few
            return all(
                length > 0 and offset + length <= few[bisect.bisect_right(starts, offset)]
                for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
            )
        ends = offsets + lengths
        limits = self._limits[np.searchsorted(self._starts, offsets, side="right")]
        return bool(((offsets < ends) & (ends <= limits)).all())

    def _countable(self, write: Write) -> bool:
        """Return whether the rank stays within the room's bytes and a repeated segment keeps its size."""
        with self._gate:
            progress = self._progress.get(write.writer.prefill_rank)
            if progress is None:
                return write.nbytes <= self._nbytes
            known = progress.segments.get(write.segment)
            if known is not None:
                return known == write.nbytes
            return len(progress.segments) < MAX_SEGMENTS and progress.nbytes + write.nbytes <= self._nbytes


class Grant:
    """Permission to store one segment, for as long as the room stays open."""

    def __init__(self, fence: Fence, runs: _RoomRuns, write: Write) -> None:
        self._fence, self._runs, self._write = fence, runs, write

    @property
    def repeated(self) -> bool:
        """Whether this rank landed the segment before (a re-push after a cut): its bytes need not land again."""
        return self._runs.repeats(self._write)

    def store(self, call: Callable[[], T]) -> T | None:
        """Run a short call that stores into the arena and return its result; without a call return None once closed."""
        return self._runs.store(call)

    def finish(self) -> int | None:
        """Count the segment as landed; return all bytes that the rank has landed, None once the room is closed."""
        landed = self._runs.finish(self._write)
        if landed is None:
            self._fence.count(Refusal.CLOSED)
        return landed


Admission: TypeAlias = Grant | Refusal


class Fence:
    """The open rooms of one arena. Every method may be called from any thread."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._lock = threading.Lock()
        self._rooms: dict[Room, _RoomRuns] = {}
        self._refused: Counter[Refusal] = Counter()

    def open(
        self,
        room: Room,
        generation: Generation,
        offsets: U64,
        lengths: U64,
        writers: Mapping[Rank, Life] | None,
        on_landed: OnLanded | None = None,
    ) -> None:
        """Let `writers` (prefill rank -> life; None: whoever greets) write the runs of a room.

        `on_landed` is called for what has landed until the room closes, and perhaps once more at that moment. Runs
        may come in any order. Raises LocalProtocolError when the room is open already or a run is empty or leaves the
        arena.
        """
        starts, ends = _merged(offsets, lengths, self.arena.nbytes)
        runs = _RoomRuns(generation, starts, ends, writers, on_landed)
        with self._lock:
            if room in self._rooms:
                raise LocalProtocolError(f"room {room} is open already")
            self._rooms[room] = runs

    def close(self, room: Room, generation: Generation) -> bool:
        """Close a room; return, True if it was open, when nothing of this generation can land any more.

        Waits for running stores only, which are short. Closing twice is allowed: the second call returns False, with
        the same promise.
        """
        with self._lock:
            runs = self._rooms.get(room)
        if runs is None or runs.generation != generation:
            return False
        closed = runs.shut()
        with self._lock:
            if self._rooms.get(room) is runs:
                del self._rooms[room]
        return closed

    def admit(self, write: Write) -> Admission:
        """Return a grant for the segment, or why it is refused, which is counted."""
        with self._lock:
            runs = self._rooms.get(write.room)
        refusal = Refusal.CLOSED if runs is None else runs.refusal(write)
        if runs is None or refusal is not None:
            refused = refusal or Refusal.CLOSED
            self.count(refused)
            return refused
        return Grant(self, runs, write)

    def count(self, refusal: Refusal) -> None:
        """Count one refused segment."""
        with self._lock:
            self._refused[refusal] += 1

    def snapshot(self) -> FenceSnapshot:
        """Return all counts at one moment."""
        with self._lock:
            return FenceSnapshot(
                open_rooms=len(self._rooms),
                refused_closed=self._refused[Refusal.CLOSED],
                refused_generation=self._refused[Refusal.GENERATION],
                refused_writer=self._refused[Refusal.WRITER],
                refused_bounds=self._refused[Refusal.BOUNDS],
                refused_checksum=self._refused[Refusal.CHECKSUM],
            )


def _merged(offsets: U64, lengths: U64, nbytes: int) -> tuple[U64, U64]:
    """Return sorted starts and ends of the runs' union. Raises LocalProtocolError for a run outside `nbytes`."""
    offsets, lengths = np.asarray(offsets, np.uint64), np.asarray(lengths, np.uint64)
    size = np.uint64(nbytes)
    if len(offsets) != len(lengths) or not lengths.all():
        raise LocalProtocolError("a room has one length above zero for each offset")
    if (lengths > size).any() or (offsets > size - lengths).any():
        raise LocalProtocolError(f"a room's run leaves the arena of {nbytes} bytes")
    return united_runs(offsets, lengths)
