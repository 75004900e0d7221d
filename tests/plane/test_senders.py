"""The data connections of a prefill rank, driven as the reactor drives them."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import attrs
import pytest

from pdplane.bench.slow_link import SlowLine, TokenBucket
from pdplane.ids import Generation, Room
from pdplane.kv.copies import Copies
from pdplane.machine import events
from pdplane.machine.actions import OpenData, StartPush
from pdplane.messages import Push
from pdplane.plane.config import PrefillConfig
from pdplane.plane.senders import Senders
from pdplane.transport.framing import Header
from pdplane.transport.registry import TRANSPORTS, Transport
from pdplane.transport.sender import Line, PushSender
from tests.transport.ends import DECODE_LIFE, PREFILL_LIFE, Decode, random_arena, whole
from tests.waiting import PATIENCE_S, until

NBYTES, PUSHES = 1 << 16, 16
Posted = SimpleQueue[events.PrefillEvent]


class HeldLine(SlowLine):
    """A line that sends no segment before it may."""

    def __init__(self, inner: Line, go_on: threading.Event) -> None:
        super().__init__(inner, TokenBucket())
        self._go_on = go_on

    def send_segment(self, header: Header, part: Copies) -> None:
        assert self._go_on.wait(PATIENCE_S)
        super().send_segment(header, part)


@pytest.fixture
def decode() -> Iterator[Decode]:
    found = Decode("tcp", NBYTES)
    yield found
    found.receiver.close()


@contextmanager
def prefill(posted: Posted, transport: str = "tcp", woken: list[bool] | None = None) -> Iterator[Senders]:
    def post(event: events.PrefillEvent, *, wake: bool = True) -> None:
        if woken is not None and isinstance(event, events.PushEnded):
            woken.append(wake)
        posted.put(event)

    senders = Senders(PrefillConfig(transport=transport), random_arena(NBYTES), PREFILL_LIFE, post)
    yield senders
    senders.close_all()


def connect(senders: Senders, decode: Decode, posted: Posted) -> None:
    """Open a connection, in the place of the one before."""
    assert senders.open(OpenData(decode.session, DECODE_LIFE)) == []
    assert isinstance(posted.get(timeout=PATIENCE_S), events.DataConnected)


def test_pushes_share_their_time_and_the_last_one_wakes(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    posted, go_on, inner = Posted(), threading.Event(), TRANSPORTS["tcp"]
    assert isinstance(inner, Transport)
    held = attrs.evolve(inner, line=lambda *args, line=inner.line: HeldLine(line(*args), go_on))
    monkeypatch.setitem(TRANSPORTS, "held", held)
    woken: list[bool] = []
    decode.open_all(7)
    with prefill(posted, "held", woken) as senders:
        connect(senders, decode, posted)
        began = time.monotonic()
        for number in range(PUSHES):
            part = whole(NBYTES // PUSHES, 0, number * NBYTES // PUSHES)
            push = Push(Room(7), Generation(1), number, part)
            assert senders.push(StartPush(decode.session, DECODE_LIFE, push)) == []
        go_on.set()
        ends = [posted.get(timeout=PATIENCE_S) for _ in range(PUSHES)]
        passed = time.monotonic() - began
        totals = senders.counts()["totals"]
    assert all(isinstance(end, events.PushEnded) and end.text is None for end in ends)
    assert woken == [False] * (PUSHES - 1) + [True]
    assert totals["pushed_bytes"] == NBYTES
    assert 0 < totals["push_seconds"] <= passed


def test_senders_that_have_ended_are_forgotten(decode: Decode) -> None:
    posted, before = Posted(), len(living_senders())
    with prefill(posted) as senders:
        for _ in range(8):
            connect(senders, decode, posted)
        until(lambda: sum(not sender.ended for sender in living_senders()) == 1, "the end of those that were replaced")
        connect(senders, decode, posted)
        assert len(living_senders()) - before <= 2, "the new one, and the one that it has replaced"


def living_senders() -> list[PushSender]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is PushSender]
