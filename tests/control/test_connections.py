"""Every ZeroMQ socket of ours against peers that send what never becomes a message, or too much of it."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import pytest
import zmq

from pdplane.control import connections
from pdplane.control.channels import bind_socket, open_context
from pdplane.control.connections import Connections, Intake
from pdplane.ids import Endpoint
from tests.waiting import until
from tests.zmtp import MORE, Speaker, frame

LOOPBACK = Endpoint("127.0.0.1", 0)
KINDS = {zmq.ROUTER: b"DEALER", zmq.PULL: b"PUSH", zmq.DEALER: b"ROUTER", zmq.PUSH: b"PULL"}


@attrs.define
class Watched:
    """Watched sockets and what came out of them."""

    context: zmq.Context[zmq.Socket[bytes]] = attrs.field(factory=open_context)
    rejected: Counter[str] = attrs.field(factory=Counter)
    heard: list[list[bytes]] = attrs.field(factory=list)
    intakes: list[Intake] = attrs.field(factory=list)
    table: Connections = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.table = Connections(self.rejected)

    def open(self, kind: int) -> Intake:
        self.intakes.append(self.table.watch("port", self.context.socket(kind)))
        return self.intakes[-1]

    def bind(self, kind: int) -> Endpoint:
        return bind_socket(self.open(kind).socket, LOOPBACK, "port")

    def meet(self, kind: int) -> Speaker:
        """Return a peer of a new socket of this kind; the socket binds or connects as ours do."""
        if kind in (zmq.ROUTER, zmq.PULL):
            return Speaker.connect(self.bind(kind), KINDS[kind])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(10)
            self.open(kind).socket.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
            return Speaker(listener.accept()[0], KINDS[kind])

    def turn(self, calls: int = 256) -> None:
        """Do what a reactor does in one turn."""
        for intake in self.intakes:
            try:
                for _ in range(calls if intake.socket.type != zmq.PUSH else 0):
                    self.heard.append(intake.receive())
            except zmq.Again:
                pass
        self.table.tend(time.monotonic())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        def turned() -> bool:
            self.turn()
            return condition()

        until(turned, what)


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    for intake in watched.intakes:
        intake.close()
    watched.context.term()


def whole(*frames: bytes) -> bytes:
    return b"".join(frame(one, MORE) for one in frames[:-1]) + frame(frames[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nbytes", [0, 200, 1 << 20])
def test_a_message_that_never_ends_ends_its_connection(watched: Watched, kind: int, nbytes: int) -> None:
    with watched.meet(kind) as endless:
        endless.pour(frame(bytes(nbytes), MORE))
        watched.until(lambda: endless.ended, "the end of the connection")
    assert not watched.heard
    assert watched.rejected["connections_ended"] == 1
    assert endless.sent < 256 << 20


def test_a_frame_that_never_ends_takes_no_more_than_others(watched: Watched) -> None:
    endpoint = watched.bind(zmq.ROUTER)
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            peer = stack.enter_context(Speaker.connect(endpoint))
            peer.send(bytes([2]) + (4 << 20).to_bytes(8, "big") + bytes(2 << 20))
        watched.until(lambda: watched.rejected["connections_ended"] >= 8, "the end of those that are too much together")


def test_whole_messages_of_a_busy_peer_end_nothing(watched: Watched) -> None:
    """Also while messages of others wait, and when nothing was received for a while."""
    with watched.meet(zmq.PULL) as busy:
        message = whole(b"1", bytes(200_000))
        for _ in range(100):
            busy.send(message)
            watched.table.tend(time.monotonic())
        watched.until(lambda: len(watched.heard) == 100, "every message")
    assert not watched.rejected


@pytest.mark.parametrize("kind", [zmq.ROUTER, zmq.PULL, zmq.DEALER])
def test_what_has_too_many_frames_is_dropped_and_what_follows_is_heard(watched: Watched, kind: int) -> None:
    with watched.meet(kind) as peer:
        peer.send(whole(*[b"x"] * 10) + whole(*[b""] * 900) + whole(b"good", b"one"))
        watched.until(lambda: [b"good", b"one"] in [heard[-2:] for heard in watched.heard], "the message behind")
    assert watched.rejected == {"too_many_frames": 2}


def test_a_message_of_very_many_frames_holds_nobody_up(watched: Watched) -> None:
    """Its frames are dropped some at a time, and its connection is ended."""
    endpoint = watched.bind(zmq.ROUTER)
    with Speaker.connect(endpoint) as many, Speaker.connect(endpoint) as good:
        good.send(whole(b"first"))
        watched.until(lambda: len(watched.heard) == 1, "the first message")
        many.send(whole(*[b""] * 50_000))
        watched.until(lambda: many.ended, "the end of the connection")
        good.send(whole(b"good"))
        turns = 0
        while [b"good"] not in [heard[1:] for heard in watched.heard]:
            watched.turn(calls=1)
            turns += 1
            assert turns < 10_000
    assert watched.rejected == {"too_many_frames": 1, "connections_ended": 1}


def test_an_address_that_did_that_makes_no_new_connection_for_a_moment(watched: Watched) -> None:
    endpoint = watched.bind(zmq.ROUTER)
    with Speaker.connect(endpoint) as many, socket.socket() as new:
        many.send(whole(*[b""] * 5000))
        watched.until(lambda: many.ended, "the end of the connection")
        new.settimeout(0.01)
        new.connect((endpoint.host, endpoint.port))

        def ended() -> bool:
            try:
                return not new.recv(100)
            except TimeoutError:
                return False
            except ConnectionResetError:
                return True

        watched.until(ended, "the end of the new one")


def test_the_silent_make_place_for_the_others(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 20)
    watched.table = Connections(watched.rejected)
    endpoint = watched.bind(zmq.ROUTER)
    with contextlib.ExitStack() as stack:
        good = stack.enter_context(Speaker.connect(endpoint))
        good.send(whole(b"first"))
        watched.until(lambda: bool(watched.heard), "the first message")
        silent = [stack.enter_context(Speaker.connect(endpoint)) for _ in range(40)]
        watched.until(lambda: sum(peer.ended for peer in silent) == 21, "the end of the oldest")
        good.send(whole(b"second"))
        watched.until(lambda: [b"second"] in [heard[1:] for heard in watched.heard], "the second message")
