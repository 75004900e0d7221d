"""Rooms take turns by segments, what is on its way is bounded, and memory that is read is not given back early."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import attrs
import pytest

from pdplane.ids import Generation, Life, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.transport.framing import FrameKind, Header
from pdplane.transport.greeting import Accepted
from pdplane.transport.reports import Connected, Pushed, PushFailed, TransportOptions
from pdplane.transport.sender import PushSender
from tests.transport.ends import PATIENCE_S, Ends, Reports, push, random_arena, whole

SEGMENT = 1 << 12
OPTIONS = TransportOptions(segment_bytes=SEGMENT, call_bytes=SEGMENT)


def test_a_large_room_does_not_starve_small_ones(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    for room in range(4):
        decode.fence.open(Room(room), Generation(1), *_window(room), None)
    sizes = (4, 3, 1, 2)  # segments
    pushes = [push(room, _segments(room, count)) for room, count in enumerate(sizes)]
    _, reports = ends.sender(decode, source, options=OPTIONS, pushes=pushes)
    ended = reports.ends(4)
    assert [end.room for end in ended] == [2, 3, 1, 0]
    assert all(isinstance(end, Pushed) for end in ended)


def test_a_rooms_own_pushes_keep_their_order(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    for room in range(2):
        decode.fence.open(Room(room), Generation(1), *_window(room), None)
    pushes = [
        push(0, _segments(0, 3), 0),
        push(0, whole(64, 0, 3 * SEGMENT), 1),
        push(1, _segments(1, 2), 0),
        push(1, whole(64, 0, (1 << 14) + 2 * SEGMENT), 1),
    ]
    _, reports = ends.sender(decode, source, options=OPTIONS, pushes=pushes)
    ended = [(end.room, end.push) for end in reports.ends(4)]
    assert ended.index((0, 0)) < ended.index((0, 1))
    assert ended.index((1, 0)) < ended.index((1, 1))
    assert ended[0] == (1, 0)


def _window(room: int) -> tuple[object, object]:
    copies = whole(1 << 14, 0, room << 14)
    return copies.destination, copies.length


def _segments(room: int, count: int) -> Copies:
    return whole(count * SEGMENT, room << 14, room << 14)


class PaperLine:
    """A line on which nothing moves: it remembers what was sent, and the test answers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.sent: list[Header] = []
        self._answers: deque[Header] = deque()
        self._woken = self._shut = False

    def open(self) -> Accepted:
        return Accepted(1, Life("d"), "", "", "", "pull")

    def send_segment(self, header: Header, part: Copies) -> None:
        assert part.nbytes == header.nbytes
        self.send_header(attrs.evolve(header, kind=FrameKind.PULL))

    def send_header(self, header: Header) -> None:
        with self._changed:
            self.sent.append(header)
            self._changed.notify_all()

    def receive(self, timeout_s: float | None) -> list[Header]:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._woken or self._shut, timeout_s)
            if self._shut:
                raise ConnectionAbortedError("shut")
            self._woken = False
            found = list(self._answers)
            self._answers.clear()
            return found

    def answer(self, header: Header, kind: FrameKind) -> None:
        nbytes = 2 * SEGMENT if kind is FrameKind.ACK else 0
        with self._changed:
            self._answers.append(attrs.evolve(header, kind=kind, count=0, nbytes=nbytes, last=kind is FrameKind.ACK))
            self._changed.notify_all()

    def wait_sent(self, count: int) -> list[Header]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.sent) >= count, PATIENCE_S)
            return list(self.sent)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def shutdown(self) -> None:
        with self._changed:
            self._shut = True
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def pulling() -> Iterator[tuple[PushSender, PaperLine, Reports]]:
    line, reports = PaperLine(), Reports()
    options = attrs.evolve(OPTIONS, pull_window=2, resume_tries=0)
    sender = PushSender(lambda: line, SessionId("s"), random_arena(1 << 16), reports, options)
    sender.start()
    yield sender, line, reports
    sender.close()


def test_no_more_segments_wait_to_be_read_than_the_window_has(
    pulling: tuple[PushSender, PaperLine, Reports],
) -> None:
    sender, line, reports = pulling
    for room in range(3):
        sender.submit(push(room, whole(2 * SEGMENT)))
    sent = line.wait_sent(2)
    assert [header.room for header in sent] == [0, 1], "rooms take turns"
    sender.cancel(Room(9), Generation(1))  # a round of the loop that may send nothing
    line.answer(sent[0], FrameKind.TAKEN)
    sent = line.wait_sent(3)
    assert len(sent) == 3
    assert (sent[2].room, sent[2].last) == (2, False)
    line.answer(sent[1], FrameKind.TAKEN)
    line.answer(sent[2], FrameKind.TAKEN)
    sent = line.wait_sent(5)
    assert [(header.room, header.last) for header in sent[3:]] == [(0, True), (1, True)]
    line.answer(sent[3], FrameKind.ACK)
    assert reports.ends(1)[0] == Pushed(SessionId("s"), Room(0), Generation(1), 0, 2 * SEGMENT)
    assert reports.all[0] == Connected(SessionId("s"), Life("d"), "pull")


def test_a_cancelled_pull_has_not_ended_while_its_pages_may_be_read(
    pulling: tuple[PushSender, PaperLine, Reports],
) -> None:
    sender, line, reports = pulling
    sender.submit(push(7, whole(4 * SEGMENT)))
    first, _ = line.wait_sent(2)
    sender.cancel(Room(7), Generation(1))
    gone = line.wait_sent(3)[2]
    assert (gone.kind, gone.last) == (FrameKind.ABANDON, True)
    assert not reports.of(PushFailed)
    line.answer(first, FrameKind.TAKEN)
    line.answer(gone, FrameKind.ACK)
    ended = reports.ends(1)[0]
    assert isinstance(ended, PushFailed)
    assert ended.cause == "cancelled"
