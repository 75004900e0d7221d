"""The link of a known rate: its arithmetic, and that a line behind it still moves every byte."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from pdplane.bench.slow_link import SlowLine, TokenBucket, slow_transport
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.messages import Push
from pdplane.transport import reports
from pdplane.transport.fence import Fence
from pdplane.transport.registry import TRANSPORTS, open_receiver, open_sender
from pdplane.transport.reports import TransportOptions
from tests.waiting import until


def test_bytes_queue_behind_each_other() -> None:
    bucket = TokenBucket(1000.0, burst_bytes=0)
    assert bucket.reserve(500, now=10.0) == 10.5
    assert bucket.reserve(500, now=10.1) == 11.0
    assert bucket.reserve(100, now=20.0) == 20.1


def test_a_rested_link_has_a_burst() -> None:
    bucket = TokenBucket(1000.0, burst_bytes=200)
    assert bucket.reserve(200, now=10.0) == 10.0
    assert bucket.reserve(200, now=10.0) == 10.2


def test_without_a_rate_nothing_waits() -> None:
    bucket = TokenBucket()
    assert bucket.reserve(1 << 40, now=1.0) == 1.0


def test_one_sided_transports_have_no_slow_link() -> None:
    with pytest.raises(ConfigError, match="no slow link over 'mooncake'"):
        slow_transport(TokenBucket(), "mooncake")


@pytest.mark.parametrize("over", ["tcp", "loopback"])
def test_a_push_arrives_whole(monkeypatch: pytest.MonkeyPatch, over: str) -> None:
    monkeypatch.setitem(TRANSPORTS, "slow", slow_transport(TokenBucket(50e6), over))
    told: list[reports.Report] = []
    source, target = Arena.zeros(1 << 20), Arena.zeros(1 << 20)
    source.bytes[:] = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    fence = Fence(target)
    whole = np.array([0], np.uint64), np.array([1 << 20], np.uint64)
    fence.open(Room(1), Generation(1), *whole, None)
    receiver = open_receiver(
        "slow", listen=Endpoint("127.0.0.1", 0), decode_life=Life("d"), fence=fence, report=told.append
    )
    session = receiver.start()
    sender = open_sender(
        "slow",
        peer=Endpoint.parse(session),
        session=SessionId(session),
        prefill_rank=Rank(0),
        prefill_life=Life("p"),
        arena=source,
        report=told.append,
        options=TransportOptions(segment_bytes=1 << 16),
    )
    try:
        sender.start()
        sender.submit(Push(Room(1), Generation(1), 1, Copies(whole[0], whole[0], whole[1])))
        until(lambda: any(isinstance(report, reports.Pushed) for report in told))
    finally:
        sender.close()
        receiver.close()
    assert (source.bytes == target.bytes).all()


def test_shutdown_ends_the_wait() -> None:
    class Nowhere(SlowLine):
        def __init__(self) -> None:
            self.sent = threading.Event()

        def send_segment(self, header: object, part: object) -> None:
            self.sent.set()

        def shutdown(self) -> None:
            """Nothing to end."""

    inner = Nowhere()
    line = SlowLine(inner, TokenBucket(1.0, burst_bytes=0))
    one = np.array([0], np.uint64), np.array([3600], np.uint64)
    thread = threading.Thread(target=lambda: line.send_segment(None, Copies(one[0], one[0], one[1])))  # type: ignore[arg-type]
    thread.start()
    line.shutdown()
    thread.join(10)
    assert inner.sent.is_set()
