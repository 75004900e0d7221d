"""Listening, waking, JSON lines; the strict reading of JSON is tested with the frames that use it."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from pdplane.errors import ConfigError, WireError
from pdplane.ids import Endpoint
from pdplane.net import Acceptor, JsonLines, Pulse, Wakeup, json_line, listen

PATIENCE_S = 15.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize(
    ("host", "words"),
    [("", "every interface"), ("203.0.113.1", "cannot listen on 203.0.113.1"), ("no such host", "cannot listen on")],
)
def test_an_address_that_is_not_ours_is_named(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        listen(Endpoint(host, 0))


def test_a_taken_port_is_named() -> None:
    with listen(Endpoint("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken by another process"):
            listen(Endpoint("127.0.0.1", port))


def test_an_acceptor_serves_all_its_listeners_and_frees_their_ports() -> None:
    listeners = [listen(Endpoint("127.0.0.1", 0)) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    accepted: list[socket.socket] = []
    two = threading.Event()

    def admit(connected: socket.socket, _address: object) -> None:
        accepted.append(connected)
        if len(accepted) == 2:
            two.set()

    acceptor = Acceptor(listeners, admit, name="accept")
    acceptor.start()
    clients = [socket.create_connection(("127.0.0.1", port)) for port in ports]
    assert two.wait(PATIENCE_S)
    acceptor.close()
    acceptor.close()
    for each in (*clients, *accepted):
        each.close()
    for port in ports:
        listen(Endpoint("127.0.0.1", port)).close()


def test_wakes_count_once_until_they_are_cleared() -> None:
    with closing(Wakeup()) as wakeup:
        for _ in range(2):
            wakeup.wake()
            wakeup.wake()
            assert select.select([wakeup.descriptor], [], [], PATIENCE_S)[0]
            wakeup.clear()
            assert not select.select([wakeup.descriptor], [], [], 0)[0]
    wakeup.wake()


def test_lines_arrive_whole_and_in_order(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    lines = JsonLines(ours, ours)
    theirs.sendall(b'{"a": 1}\n[2')
    assert lines.receive(PATIENCE_S) == {"a": 1}
    with pytest.raises(TimeoutError):
        lines.receive(0)
    theirs.sendall(b"]\n" + json_line(None))
    assert [lines.receive(PATIENCE_S), lines.receive(PATIENCE_S)] == [[2], None]
    lines.send("é")
    assert JsonLines(theirs).receive(PATIENCE_S) == "é"


@pytest.mark.parametrize(
    ("sent", "error"),
    [(b"", EOFError), (b"[1", EOFError), (b"[1\n", WireError), (b"[" * 9, WireError), (b"\xff\n", WireError)],
)  # fmt: skip
def test_what_is_no_line_is_an_error(
    ends: tuple[socket.socket, socket.socket], sent: bytes, error: type[Exception]
) -> None:
    ours, theirs = ends
    theirs.sendall(sent)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(error):
        JsonLines(ours, max_line=8).receive(PATIENCE_S)


def test_an_acceptor_outlives_a_lack_of_threads() -> None:
    taken, tries = threading.Event(), list[int]()

    def admit(connected: socket.socket, _address: object) -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("can't start new thread")
        connected.close()
        taken.set()

    acceptor = Acceptor([listener := listen(Endpoint("127.0.0.1", 0))], admit, name="accept")
    acceptor.start()
    address = listener.getsockname()
    with socket.create_connection(address, PATIENCE_S) as first:
        assert first.recv(1) == b"", "closed, and not kept waiting"
    with socket.create_connection(address, PATIENCE_S):
        assert taken.wait(PATIENCE_S)
    assert acceptor.trouble() is None
    acceptor.close()


def test_a_pulse_names_a_thread_that_hangs_or_has_ended() -> None:
    hung, lively = Pulse("one", allowed_s=-1.0), Pulse("two")
    assert "the thread one hangs" in str(hung.trouble(runs=True))
    assert "the thread one has ended" in str(hung.trouble(runs=False))
    assert lively.trouble(runs=True) is None
