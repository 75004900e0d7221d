"""TCP when the network or the other side misbehaves: cut, stalled, mute, silent."""

from __future__ import annotations

import socket
import threading

import pytest

from pdplane.ids import Endpoint, Generation, Life, Rank, Room
from pdplane.messages import Landed, WriterCut
from pdplane.security import Secret
from pdplane.transport.reports import (
    Connected,
    ConnectFailed,
    Disconnected,
    Pushed,
    PushFailed,
    Report,
    TransportOptions,
)
from tests.transport.ends import Ends, Reports, counted, push, random_arena, u64, whole
from tests.transport.proxy import Proxy

NBYTES = 1 << 20
SEGMENTS = TransportOptions(segment_bytes=1 << 16, call_bytes=1 << 14, resume_tries=0)
IMPATIENT = TransportOptions(
    segment_bytes=1 << 16, send_timeout_s=0.2, ack_timeout_s=0.2, receive_timeout_s=0.2, greeting_timeout_s=0.2
)
HELLO_BYTES = 180  # before this the greeting is surely not over, and after twice that it is


@pytest.mark.parametrize(
    "cut_after", [1, 100, HELLO_BYTES, 400, 450, 500, 1000, 70_000, 500_000, NBYTES, NBYTES + 1100]
)
def test_a_cut_fails_each_push_once_and_a_new_connection_finishes_them(tcp: Ends, cut_after: int) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    quarter = NBYTES // 4
    pushes = [push(7, whole(quarter, i * quarter, i * quarter), i) for i in range(4)]
    with Proxy(decode.receiver.endpoint, cut_after=cut_after) as proxy:
        _, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=SEGMENTS, pushes=pushes)
        ended = reports.ends(4)
        assert sorted(end.push for end in ended) == [0, 1, 2, 3]
        reports.until(lambda: isinstance(reports.all[-1], ConnectFailed | Disconnected), "the end of the connection")
        assert isinstance(reports.all[-1], Disconnected) == bool(reports.of(Connected))
        _, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=SEGMENTS, pushes=pushes)
        assert [type(end) for end in reports.ends(4)] == [Pushed] * 4
    assert (decode.arena.bytes == source.bytes).all()
    assert counted(decode.fence) == NBYTES
    assert decode.reports.of(Landed)[-1].nbytes == NBYTES


def test_a_stalled_sender_does_not_hold_the_window_and_lands_nothing_later(tcp: Ends) -> None:
    old, new, decode = random_arena(NBYTES, 1), random_arena(NBYTES, 2), tcp.decode(NBYTES)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, stall_after=300_000) as proxy:
        stalled, stalled_reports = tcp.sender(decode, old, peer=proxy.endpoint, options=SEGMENTS)
        stalled.submit(push(7, whole(NBYTES)))
        assert proxy.stalled.wait(30)
        assert decode.fence.close(Room(7), Generation(1))
        decode.open_all(8)
        other, reports = tcp.sender(decode, new, rank=1)
        other.submit(push(8, whole(NBYTES)))
        assert isinstance(reports.ends(1)[0], Pushed)
        proxy.release()
        assert isinstance(stalled_reports.ends(1)[0], PushFailed)
        assert (decode.arena.bytes == new.bytes).all()
        decode.fence.close(Room(8), Generation(1))
        decode.open_all(9)
        stalled.submit(push(9, whole(NBYTES)))
        assert isinstance(stalled_reports.ends(2)[1], Pushed), "the connection serves on"
    assert (decode.arena.bytes == old.bytes).all()


def test_cancel_in_mid_push_ends_it_at_a_border_and_keeps_the_connection(tcp: Ends) -> None:
    source, decode = random_arena(1 << 23), tcp.decode(1 << 23)
    decode.fence.open(Room(7), Generation(1), u64(0), u64(1 << 22), None)
    decode.fence.open(Room(8), Generation(1), u64(1 << 22), u64(1 << 22), None)
    with Proxy(decode.receiver.endpoint, stall_after=300_000) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=SEGMENTS)
        sender.submit(push(7, whole(1 << 21), 0))
        sender.submit(push(8, whole(1 << 22, 1 << 22, 1 << 22), 0))
        sender.submit(push(7, whole(1 << 21, 1 << 21, 1 << 21), 1))
        assert proxy.stalled.wait(30)
        sender.cancel(Room(7), Generation(1))
        proxy.release()
        ended = reports.ends(3)
        sender.submit(push(7, whole(1 << 21), 0))
        assert isinstance(reports.ends(4)[-1], Pushed), "the receiver forgot the part that it had counted"
    failed = [end for end in ended if isinstance(end, PushFailed)]
    assert sorted((end.room, end.push) for end in failed) == [(7, 0), (7, 1)]
    assert {end.cause for end in failed} == {"cancelled"}
    assert (decode.arena.bytes[1 << 22 :] == source.bytes[1 << 22 :]).all()


def test_a_stall_ends_both_sides_in_bounded_time(tcp: Ends) -> None:
    source, decode = random_arena(1 << 23), tcp.decode(1 << 23, options=IMPATIENT)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, stall_after=300_000) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=IMPATIENT)
        sender.submit(push(7, whole(1 << 23)))
        assert isinstance(reports.ends(1)[0], PushFailed)
        reports.wait(Disconnected)
        assert decode.reports.wait(WriterCut)[0].text == "the peer stalled"


def test_acknowledgements_that_do_not_come_end_the_connection(tcp: Ends) -> None:
    source, decode = random_arena(64), tcp.decode(64)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, mute=True) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=IMPATIENT)
        sender.submit(push(7, whole(64)))
        assert isinstance(reports.ends(1)[0], PushFailed)
        assert "acknowledgement" in reports.wait(Disconnected)[0].cause


def test_close_does_not_wait_for_a_stalled_receiver(tcp: Ends) -> None:
    source, decode = random_arena(1 << 23), tcp.decode(1 << 23)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, stall_after=300_000) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint)
        sender.submit(push(7, whole(1 << 23)))
        assert proxy.stalled.wait(30)
        sender.close()
        assert [type(end) for end in reports.ends(1)] == [PushFailed]
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("push")]
        decode.receiver.close()  # and neither does the receiver, whose sender says nothing


def test_close_ends_a_greeting_that_nobody_answers(tcp: Ends) -> None:
    decode = tcp.decode()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Endpoint("127.0.0.1", silent.getsockname()[1])
        sender, reports = tcp.sender(decode, random_arena(64), peer=peer)
        with silent.accept()[0] as accepted:
            assert accepted.recv(1)
            sender.submit(push(7, whole(64)))
            sender.close()
        assert [type(report) for report in reports.all] == [PushFailed]


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.0 400 Bad Request\r\n\r\n", b"PDPG\x01\x02\xff\xff", b"PDPG\x02\x02\0\0"]
)
def test_a_server_that_is_no_receiver_is_given_up(tcp: Ends, answer: bytes) -> None:
    decode = tcp.decode()
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        peer = Endpoint("127.0.0.1", stranger.getsockname()[1])
        _, reports = tcp.sender(decode, random_arena(64), peer=peer, options=IMPATIENT)
        with stranger.accept()[0] as accepted:
            accepted.sendall(answer)
            assert reports.wait(ConnectFailed)
    assert not reports.of(Connected)


def test_a_host_without_a_listener_or_a_name_is_a_failed_connection(tcp: Ends) -> None:
    decode = tcp.decode()
    for host in ("127.0.0.1", "no.such.host.invalid", "a..b", "a\0b", "x" * 300):
        _, reports = tcp.sender(decode, random_arena(64), peer=Endpoint(host, 1))
        assert reports.wait(ConnectFailed)[0].cause


def test_an_owner_may_close_from_inside_a_report(tcp: Ends) -> None:
    decode, seen, done = tcp.decode(), Reports(), threading.Event()
    decode.open_all(7)

    def close_when_pushed(report: Report) -> None:
        seen(report)
        if isinstance(report, Pushed):
            sender.close()
            done.set()

    sender, _ = tcp.sender(decode, random_arena(64), report=close_when_pushed)
    sender.submit(push(7, whole(64)))
    assert done.wait(30)
    decode.reports.wait(WriterCut)


def test_ipv6(tcp: Ends) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    source, decode = random_arena(64), tcp.decode(64, host="::1", secret=Secret(b"s" * 16))
    decode.open_all(7)
    assert decode.session == f"[::1]:{decode.receiver.endpoint.port}"
    sender, reports = tcp.sender(decode, source, secret=Secret(b"s" * 16))
    sender.submit(push(7, whole(64)))
    assert isinstance(reports.ends(1)[0], Pushed)


def test_a_restarted_writer_is_another_writer(tcp: Ends) -> None:
    source, decode = random_arena(64), tcp.decode(64)
    decode.fence.open(Room(7), Generation(1), u64(0), u64(64), {Rank(0): Life("b" * 32)})
    for life, kind in (("a" * 32, PushFailed), ("b" * 32, Pushed)):
        sender, reports = tcp.sender(decode, source, life=Life(life))
        sender.submit(push(7, whole(64)))
        assert isinstance(reports.ends(1)[0], kind)
