"""A cut under a push: the same push over a new connection, whole segments counted once, a bounded number of times."""

from __future__ import annotations

import pytest

from pdplane.ids import Endpoint, Generation, Life, Room
from pdplane.kv.arena import Arena
from pdplane.messages import Landed, WriterCut
from pdplane.transport.fence import Fence
from pdplane.transport.registry import open_receiver
from pdplane.transport.reports import Connected, Disconnected, Pushed, PushFailed, Resumed, TransportOptions
from tests.transport.ends import Ends, Reports, counted, push, random_arena, whole
from tests.transport.proxy import Proxy

NBYTES = 1 << 20
OPTIONS = TransportOptions(segment_bytes=1 << 16, call_bytes=1 << 14, resume_pause_s=0.01)


@pytest.mark.parametrize("cut_after", [500, 1000, 70_000, 500_000, NBYTES, NBYTES + 1100])
def test_pushes_survive_a_cut(tcp: Ends, cut_after: int) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    quarter = NBYTES // 4
    pushes = [push(7, whole(quarter, i * quarter, i * quarter), i) for i in range(4)]
    with Proxy(decode.receiver.endpoint, cut_after=cut_after) as proxy:
        _, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=OPTIONS, pushes=pushes)
        assert [type(end) for end in reports.ends(4)] == [Pushed] * 4
        reports.wait(Resumed)
    assert [type(each) for each in reports.all if not isinstance(each, Pushed)][:3] == [Connected, Resumed, Connected]
    assert reports.of(Resumed)[0].pushes >= 1
    assert (decode.arena.bytes == source.bytes).all()
    assert counted(decode.fence) == NBYTES
    assert decode.reports.of(Landed)[-1].nbytes == NBYTES


def test_the_old_connection_is_closed_before_the_new_one_writes(tcp: Ends) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, cut_after=500_000) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=OPTIONS)
        sender.submit(push(7, whole(NBYTES)))
        assert isinstance(reports.ends(1)[0], Pushed)
    kinds = [type(report) for report in decode.reports.all]
    assert kinds.index(WriterCut) < kinds.index(Landed)


def test_tries_are_bounded(tcp: Ends) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, cut_after=300_000, cuts=99) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=OPTIONS)
        sender.submit(push(7, whole(NBYTES)))
        assert isinstance(reports.ends(1)[0], PushFailed)
        reports.wait(Disconnected)
    assert len(reports.of(Resumed)) == OPTIONS.resume_tries
    assert counted(decode.fence) < NBYTES


def test_a_cancelled_push_is_not_sent_again(tcp: Ends) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, stall_after=300_000) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=OPTIONS)
        sender.submit(push(7, whole(NBYTES)))
        assert proxy.stalled.wait(30)
        sender.cancel(Room(7), Generation(1))
        proxy.cut()
        ended = reports.ends(1)[0]
    assert isinstance(ended, PushFailed)
    assert ended.cause == "cancelled"
    assert not reports.of(Resumed)


def test_only_cuts_without_an_acknowledgement_between_them_are_paused_after(tcp: Ends) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    patient = TransportOptions(segment_bytes=1 << 16, resume_pause_s=1000)  # the second pause would never end
    quarter = NBYTES // 4
    with Proxy(decode.receiver.endpoint, cut_after=quarter + quarter // 2, cuts=2) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=patient)
        for number in range(3):  # the second and the third are cut
            sender.submit(push(7, whole(quarter, number * quarter, number * quarter), number))
            assert isinstance(reports.ends(number + 1)[-1], Pushed)
    assert len(reports.of(Resumed)) == 2


def test_another_life_at_the_address_gets_nothing(tcp: Ends) -> None:
    """The receiver restarted between cut and resumption: its owner hears of the new life, the pushes fail."""
    source, old = random_arena(NBYTES), tcp.decode(NBYTES)
    old.open_all(7)
    arena = Arena.zeros(NBYTES)
    fence, heard = Fence(arena), Reports()
    new = open_receiver(
        "tcp",
        listen=Endpoint("127.0.0.1", 0),
        decode_life=Life("e" * 32),
        fence=fence,
        report=heard,
        session=old.session,
    )
    new.start()
    try:
        with Proxy(old.receiver.endpoint, cut_after=300_000, then=new.endpoint) as proxy:
            sender, reports = tcp.sender(old, source, peer=proxy.endpoint, options=OPTIONS)
            sender.submit(push(7, whole(NBYTES)))
            ended = reports.ends(1)[0]
            assert isinstance(ended, PushFailed)
            assert "another decode" in ended.cause
            reports.wait(Disconnected)
        assert [report.decode_life for report in reports.of(Connected)] == ["d" * 32, "e" * 32]
        assert not arena.bytes.any()
    finally:
        new.close()


def test_close_ends_a_pause_between_tries(tcp: Ends) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    slow = TransportOptions(segment_bytes=1 << 16, resume_pause_s=1000, resume_tries=9)
    with Proxy(decode.receiver.endpoint, cut_after=300_000, cuts=99) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=slow)
        sender.submit(push(7, whole(NBYTES)))
        reports.wait(Resumed)
        sender.close()
        assert isinstance(reports.ends(1)[0], PushFailed)
    assert sender.ended


def test_a_push_that_comes_too_late_is_not_taken(ends: Ends) -> None:
    decode = ends.decode()
    sender, reports = ends.sender(decode, random_arena(64))
    reports.wait(Connected)
    decode.receiver.close()
    reports.wait(Disconnected)
    assert not sender.offer(push(7, whole(64)))
    sender.submit(push(7, whole(64), 1))
    assert [end.push for end in reports.ends(1)] == [1]


def test_an_offered_push_is_a_push(ends: Ends) -> None:
    source, decode = random_arena(64), ends.decode(64)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source)
    assert sender.offer(push(7, whole(64)))
    assert isinstance(reports.ends(1)[0], Pushed)
    sender.close()
    assert not sender.offer(push(7, whole(64), 1))
