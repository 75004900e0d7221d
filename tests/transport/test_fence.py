"""The fence alone: what a window covers, what it counts, and what `close` waits for."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import LocalProtocolError
from pdplane.ids import Generation, Life, Rank, Room
from pdplane.kv.arena import Arena
from pdplane.transport.fence import MAX_SEGMENTS, Fence, Grant, Refusal, Write, Writer
from tests.transport.ends import counted, u64

WRITER = Writer(Rank(0), Life("a"))
ROOM = Room(7)
FIRST = Generation(1)


def write(*runs: tuple[int, int], room: int = 7, generation: int = 1, segment: int = 0, rank: int = 0) -> Write:
    offsets, lengths = [run[0] for run in runs], [run[1] for run in runs]
    return Write(
        attrs.evolve(WRITER, prefill_rank=Rank(rank)),
        Room(room),
        Generation(generation),
        segment,
        u64(*offsets),
        u64(*lengths),
        sum(lengths),
    )


def fence(*runs: tuple[int, int], nbytes: int = 1000) -> Fence:
    made = Fence(Arena.zeros(nbytes))
    made.open(ROOM, FIRST, u64(*[run[0] for run in runs]), u64(*[run[1] for run in runs]), None)
    return made


def grant(made: Fence, wanted: Write) -> Grant:
    admission = made.admit(wanted)
    assert isinstance(admission, Grant)
    return admission


def test_neighbouring_runs_count_as_one_in_any_order() -> None:
    made = fence((200, 100), (100, 100), (400, 50))
    grant(made, write((150, 100), (400, 50)))
    assert made.admit(write((299, 2))) is Refusal.BOUNDS
    assert made.admit(write((99, 2))) is Refusal.BOUNDS
    assert made.admit(write((300, 1))) is Refusal.BOUNDS


@pytest.mark.parametrize(
    "run", [(0, 0), (2**64 - 1, 2), (2**64 - 10, 20), (10, 2**64 - 5), (1000, 1), (999, 2), (0, 1001), (2**63, 2**63)]
)
def test_wrapping_empty_and_outer_runs_are_refused(run: tuple[int, int]) -> None:
    made = fence((0, 1000))
    assert made.admit(write((0, 1), run)) is Refusal.BOUNDS
    assert made.snapshot().refused_bounds == 1


def test_an_empty_window_admits_only_empty_writes() -> None:
    made = fence()
    grant(made, write())
    assert made.admit(write((0, 1))) is Refusal.BOUNDS


def test_windows_are_checked_when_they_open() -> None:
    made = Fence(Arena.zeros(100))
    for offset, length in ((0, 101), (100, 1), (2**64 - 1, 1), (1, 2**64 - 1), (0, 0)):
        with pytest.raises(LocalProtocolError):
            made.open(ROOM, FIRST, u64(offset), u64(length), None)
    made.open(ROOM, FIRST, u64(0), u64(100), None)
    with pytest.raises(LocalProtocolError):
        made.open(ROOM, Generation(2), u64(0), u64(100), None)
    assert made.close(ROOM, FIRST)
    made.open(ROOM, Generation(2), u64(0), u64(100), None)


def test_generation_writer_and_room_are_told_apart() -> None:
    made = Fence(Arena.zeros(100))
    made.open(ROOM, FIRST, u64(0), u64(100), {Rank(0): WRITER.life, Rank(1): Life("b")})
    assert made.admit(write((0, 1), generation=2)) is Refusal.GENERATION
    assert made.admit(write((0, 1), rank=1)) is Refusal.WRITER
    assert made.admit(write((0, 1), rank=2)) is Refusal.WRITER
    assert made.admit(write((0, 1), room=8)) is Refusal.CLOSED
    grant(made, write((0, 1)))
    assert attrs.astuple(made.snapshot()) == (1, 1, 1, 2, 0, 0)


def test_closing_an_older_generation_leaves_the_newer_open() -> None:
    made = fence((0, 10))
    assert not made.close(ROOM, Generation(0))
    assert not made.close(Room(8), FIRST)
    grant(made, write((0, 10)))
    assert made.close(ROOM, FIRST)
    assert not made.close(ROOM, FIRST)


def test_a_grant_ends_with_its_window_even_if_the_room_opens_again() -> None:
    made = fence((0, 10))
    old = grant(made, write((0, 10)))
    assert old.store(lambda: 10) == 10
    made.close(ROOM, FIRST)
    made.open(ROOM, Generation(2), u64(0), u64(10), None)
    assert old.store(lambda: pytest.fail("stored after close")) is None
    assert old.finish() is None
    assert counted(made, ROOM, 2) == 0


def test_segments_count_once_for_each_rank() -> None:
    made = fence((0, 100))
    for _ in range(2):
        assert grant(made, write((0, 30), segment=1)).finish() == 30
    assert grant(made, write((0, 30), segment=1)).repeated
    assert grant(made, write((0, 70), segment=2)).finish() == 100
    assert grant(made, write((0, 70), segment=2, rank=1)).finish() == 70
    assert [counted(made, ROOM, FIRST, rank) for rank in (0, 1)] == [100, 70]
    assert made.admit(write((0, 1), segment=3)) is Refusal.BOUNDS, "more than the window holds"
    assert made.admit(write((0, 31), segment=1)) is Refusal.BOUNDS, "another size than before"


def test_the_number_of_segments_is_bounded() -> None:
    made = fence((0, 100_000), nbytes=100_000)
    for segment in range(MAX_SEGMENTS):
        grant(made, write((0, 1), segment=segment)).finish()
    assert made.admit(write((0, 1), segment=MAX_SEGMENTS)) is Refusal.BOUNDS


def test_close_waits_for_a_running_store_and_no_other_window_does() -> None:
    made = fence((0, 10))
    made.open(Room(8), FIRST, u64(20), u64(10), None)
    inside, leave, order = threading.Event(), threading.Event(), []

    def slow() -> int:
        inside.set()
        leave.wait(30)
        order.append("stored")
        return 1

    def close() -> None:
        made.close(ROOM, FIRST)
        order.append("closed")

    running = grant(made, write((0, 10)))
    storing = threading.Thread(target=lambda: running.store(slow))
    storing.start()
    assert inside.wait(30)
    closers = [threading.Thread(target=close) for _ in range(2)]
    for closer in closers:
        closer.start()
    while not isinstance(made.admit(write((0, 1))), Refusal):
        pass  # until a closer has begun: from then on nothing is admitted, although the store still runs
    assert running.store(lambda: pytest.fail("stored after close began")) is None
    other = grant(made, write((20, 10), room=8))
    assert other.store(lambda: 10) == 10
    assert made.close(Room(8), FIRST)
    assert order == []
    leave.set()
    for thread in (storing, *closers):
        thread.join(30)
    assert order == ["stored", "closed", "closed"]


def test_a_store_that_raises_lets_the_window_close() -> None:
    made = fence((0, 10))
    with pytest.raises(BlockingIOError):
        grant(made, write((0, 10))).store(_blocks)
    assert made.close(ROOM, FIRST)


def _blocks() -> int:
    raise BlockingIOError


RUN = st.tuples(st.integers(0, 260), st.integers(1, 40))
ANY_RUN = st.tuples(
    st.one_of(st.integers(0, 300), st.integers(2**64 - 300, 2**64 - 1), st.integers(0, 2**64 - 1)),
    st.one_of(st.integers(0, 60), st.integers(2**64 - 300, 2**64 - 1), st.integers(0, 2**64 - 1)),
)


@given(st.lists(RUN, max_size=8), st.lists(ANY_RUN, min_size=1, max_size=4))
def test_a_write_is_admitted_exactly_when_every_byte_is_the_windows(
    window: list[tuple[int, int]], runs: list[tuple[int, int]]
) -> None:
    mine = np.zeros(300, bool)
    for offset, length in window:
        mine[offset : offset + length] = True
    made = fence(*window, nbytes=300)
    wanted = attrs.evolve(write(*runs), nbytes=0)  # the bytes' bound is another test's
    fits = all(length and offset + length <= 300 and mine[offset : offset + length].all() for offset, length in runs)
    assert isinstance(made.admit(wanted), Grant) == fits


def test_whole_segments_are_told_once_and_a_closed_window_tells_nothing() -> None:
    told: list[tuple[list[int], list[int]]] = []
    made = Fence(Arena.zeros(1000))
    made.open(ROOM, FIRST, u64(0), u64(1000), None, lambda at, lengths: told.append((at.tolist(), lengths.tolist())))
    for segment, offset in ((0, 0), (1, 500), (0, 0)):
        grant(made, write((offset, 100), segment=segment)).finish()
    late = grant(made, write((700, 100), segment=2))
    made.close(ROOM, FIRST)
    assert late.finish() is None
    assert told == [([0], [100]), ([500], [100])]
