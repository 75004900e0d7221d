"""A TCP receiver among strangers: garbage, floods, idle connections. Each costs its own connection only."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys
import threading
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdplane.ids import Endpoint, Generation, Rank, Room
from pdplane.messages import WriterCut
from pdplane.transport.framing import HEADER_BYTES, FrameKind, Header, decode_header, encode_header, encode_segment
from pdplane.transport.greeting import GreetingKind, encode
from pdplane.transport.reports import Connected, ConnectFailed, Pushed, TransportOptions
from tests.sockets import name_two_addresses, sends_at_once
from tests.transport.ends import DECODE_LIFE, PATIENCE_S, Decode, Ends, push, random_arena, u64, whole
from tests.transport.stranger import stranger

SEGMENT = Header(FrameKind.SEGMENT, 0, Room(7), Generation(1), 0, count=2, nbytes=32, last=True)


def serves_on(tcp: Ends, decode: Decode) -> bool:
    sender, reports = tcp.sender(decode, random_arena(64))
    decode.open_all(1)
    sender.submit(push(1, whole(64)))
    return isinstance(reports.ends(1)[0], Pushed)


def _almost_a_hello(body: bytes) -> bytes:
    return b"PDPG\x01\x01" + body + bytes(2060)


@pytest.mark.hypothesis
def test_garbage_instead_of_a_greeting(tcp: Ends) -> None:
    decode = tcp.decode(64, options=TransportOptions(greeting_timeout_s=0.5))

    @given(st.one_of(st.binary(min_size=8), st.binary(max_size=40).map(_almost_a_hello)))
    def send(data: bytes) -> None:
        with stranger(decode) as client:
            client.send(data)
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_WR)
            assert client.is_closed_by_peer()

    send()
    assert decode.receiver.snapshot().refused_greetings >= settings.default.max_examples
    assert serves_on(tcp, decode)


@pytest.mark.hypothesis
def test_garbage_after_the_greeting_touches_nothing(tcp: Ends) -> None:
    decode = tcp.decode(64)
    decode.fence.open(Room(7), Generation(1), u64(0), u64(64), {Rank(0): DECODE_LIFE})

    @given(st.binary(min_size=HEADER_BYTES, max_size=300), st.booleans())
    def send(data: bytes, framed: bool) -> None:
        with stranger(decode) as client:
            number = client.greet()
            if framed:  # a good header with whatever for its tables and bytes
                data = encode_header(attrs.evolve(SEGMENT, session_number=number)) + data
            client.send(data)
            with contextlib.suppress(OSError):
                client.socket.shutdown(socket.SHUT_WR)
            assert client.is_closed_by_peer()

    send()
    assert not decode.arena.bytes.any()
    assert decode.receiver.snapshot().malformed_frames
    assert serves_on(tcp, decode)


@pytest.mark.parametrize(
    "changed",
    [
        {"session_number": 1},
        {"count": 2**32 - 1},
        {"nbytes": 2**64 - 1},
        {"nbytes": 31},
        {"kind": FrameKind.ACK, "count": 0},
        {"room": 2**64 - 1},
    ],
    ids=str,
)
def test_frames_that_cannot_be_believed_end_their_connection(tcp: Ends, changed: dict[str, int]) -> None:
    changes = dict(changed)
    decode = tcp.decode(64)
    decode.open_all(7)
    with stranger(decode) as client:
        number = client.greet() ^ changes.pop("session_number", 0)
        header = attrs.evolve(SEGMENT, session_number=number, **changes)
        client.send(encode_segment(header, u64(0, 16), u64(16, 16)) + b"x" * 32)
        assert client.is_closed_by_peer()
        assert "malformed frame" in decode.reports.wait(WriterCut)[0].text
    assert not decode.arena.bytes.any()
    assert decode.receiver.snapshot().malformed_frames == 1


def test_a_refused_segment_is_drained_and_acknowledged_with_its_reason(tcp: Ends) -> None:
    decode = tcp.decode(64)
    decode.fence.open(Room(7), Generation(1), u64(0), u64(16), None)
    with stranger(decode) as client:
        number = client.greet()
        header = attrs.evolve(SEGMENT, session_number=number)
        client.send(encode_segment(header, u64(0, 16), u64(16, 16)) + b"x" * 32)
        ack = decode_header(client.read(HEADER_BYTES), number, (FrameKind.ACK,))
        assert (ack.count, ack.nbytes, ack.room, ack.generation, ack.segment) == (4, 0, 7, 1, 0)
        good = attrs.evolve(header, count=1, nbytes=16, segment=1 << 32)
        client.send(encode_segment(good, u64(0), u64(16)) + b"y" * 16)
        ack = decode_header(client.read(HEADER_BYTES), number, (FrameKind.ACK,))
        assert (ack.count, ack.nbytes, ack.segment) == (0, 16, 1 << 32)
    assert decode.arena.bytes.tobytes() == b"y" * 16 + bytes(48)


def test_pushes_that_never_end_are_bounded(tcp: Ends) -> None:
    decode = tcp.decode(64)
    with stranger(decode) as client:
        header = attrs.evolve(SEGMENT, session_number=client.greet(), count=1, nbytes=1, last=False)
        for number in range(4200):
            client.send(encode_segment(attrs.evolve(header, segment=number << 32), u64(0), u64(1)) + b"x")
        assert client.is_closed_by_peer()
    assert decode.fence.snapshot().refused_closed == 4096


def test_idle_connections_are_dropped_and_bounded(tcp: Ends) -> None:
    decode = tcp.decode(64, options=TransportOptions(max_half_open=3, greeting_timeout_s=0.3))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(stranger(decode)) for _ in range(8)]
        for client in idle:
            assert client.is_closed_by_peer()
        snapshot = decode.receiver.snapshot()
        assert (snapshot.refused_connections, snapshot.refused_greetings) == (5, 8)  # five made place for others
        assert serves_on(tcp, decode)


def test_silent_connections_keep_nobody_out(tcp: Ends) -> None:
    decode = tcp.decode(64, options=TransportOptions(max_half_open=3, greeting_timeout_s=60))
    with contextlib.ExitStack() as stack:
        for _silent in range(12):
            stack.enter_context(stranger(decode))
        assert serves_on(tcp, decode)


def test_a_greeting_byte_by_byte_has_one_deadline(tcp: Ends) -> None:
    decode = tcp.decode(64, options=TransportOptions(greeting_timeout_s=0.3))
    with stranger(decode) as client:
        poll = select.poll()
        poll.register(client.socket.fileno(), select.POLLIN)
        for byte in encode(GreetingKind.HELLO, "x" * 500)[:-1]:
            client.send(bytes([byte]))
            if poll.poll(5):
                break
        else:
            pytest.fail("each byte bought more time")
        assert client.is_closed_by_peer()
    assert decode.receiver.snapshot().refused_greetings == 1


def test_connections_are_bounded(tcp: Ends) -> None:
    decode = tcp.decode(64, options=TransportOptions(max_connections=2))
    for rank in range(2):
        tcp.sender(decode, random_arena(64), rank=rank)[1].wait(Connected)
    _, reports = tcp.sender(decode, random_arena(64), rank=2)
    reports.wait(ConnectFailed)
    assert decode.receiver.snapshot().connections == 2


def test_a_receiver_out_of_descriptors_serves_on_when_there_are_some(tcp: Ends) -> None:
    resource = pytest.importorskip("resource")
    decode = tcp.decode(64)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    clients = [socket.socket() for _ in range(2)]
    spare = os.dup(0)
    os.close(spare)  # the lowest free number, so no file can be opened below the limit
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        for client in clients:
            client.connect((decode.receiver.endpoint.host, decode.receiver.endpoint.port))
        while not decode.receiver.snapshot().out_of_descriptors:
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for client in clients:
            client.close()
    assert serves_on(tcp, decode)


def test_a_reset_is_only_a_cut(tcp: Ends) -> None:
    decode = tcp.decode(64)
    with stranger(decode) as client:
        client.greet()
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert decode.reports.wait(WriterCut)[0].prefill_rank == 9
    assert serves_on(tcp, decode)


def test_a_sender_tries_every_address_of_a_name(tcp: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = tcp.decode(64)
    name_two_addresses(monkeypatch, "two.test")
    peer = Endpoint("two.test", decode.receiver.endpoint.port)
    tcp.sender(decode, random_arena(64), peer=peer)[1].wait(Connected)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_frames_are_not_held_back(tcp: Ends) -> None:
    decode = tcp.decode(64)
    tcp.sender(decode, random_arena(64))[1].wait(Connected)
    assert sends_at_once(decode.receiver.endpoint.port) == [True, True]


def test_no_socket_outlives_an_exec(tcp: Ends) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc")
    before = _sockets()
    decode = tcp.decode(64)
    tcp.sender(decode, random_arena(64))[1].wait(Connected)
    opened = _sockets() - before
    assert len(opened) == 7, "a listener, a wake-up pair and a connection; a connection and a wake-up pair"
    assert not any(os.get_inheritable(number) for number in opened)


def _sockets() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_a_connection_for_which_there_is_no_thread_is_closed_and_forgotten(scheme: str) -> None:
    ends = Ends(scheme)
    decode = ends.decode(64)
    before = threading.stack_size(1 << 46)  # more than any address space has, so that no thread can start
    try:
        with socket.create_connection(("127.0.0.1", decode.receiver.endpoint.port), PATIENCE_S) as client:
            assert client.recv(1) == b""
    finally:
        threading.stack_size(before)
    assert decode.receiver.snapshot().half_open == 0
    assert decode.receiver.trouble() is None
    assert ends.sender(decode, random_arena(64))[1].wait(Connected)
    ends.close()
