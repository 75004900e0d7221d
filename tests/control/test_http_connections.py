"""Connections that ask nothing, or are too many: they end, and others get in."""

from __future__ import annotations

import logging
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from aiohttp import web

from pdplane.control.http_connections import ConnectionBounds
from pdplane.control.http_thread import HttpThread
from pdplane.ids import Endpoint
from tests.http_client import ask
from tests.waiting import PATIENCE_S, until

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"
BODY = b"PUT / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n123"


def _app() -> web.Application:
    async def index(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(text="here")

    app = web.Application()
    app.router.add_route("*", "/", index)
    return app


@pytest.fixture
def http(request: pytest.FixtureRequest) -> Iterator[HttpThread]:
    thread = HttpThread("pdplane-http-connections", **request.param)
    thread.start()
    yield thread
    thread.close()


@pytest.fixture
def server(http: HttpThread) -> Endpoint:
    return http.serve(_app(), "127.0.0.1", 0)


def call(at: Endpoint, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    client = socket.create_connection((at.host, at.port), PATIENCE_S, source_address=(source, 0))
    client.sendall(data)
    return client


@pytest.mark.parametrize("http", [{"head_s": 0.2, "idle_s": 0.2}], indirect=True)
def test_who_asks_nothing_is_closed_and_who_is_being_answered_is_not(server: Endpoint, http: HttpThread) -> None:
    with ExitStack() as stack:
        asking = stack.enter_context(call(server, BODY))
        said = (b"", b"GET", HEAD, HEAD + b"\r\n")  # silent, a word, no end, idle after an answer
        for data, client in [(data, stack.enter_context(call(server, data))) for data in said]:
            heard = b""
            while piece := client.recv(4096):  # times out if it is not closed
                heard += piece
            assert (b"here" in heard) == data.endswith(b"\r\n\r\n"), data
        asking.sendall(b"4567890")
        assert b"here" in asking.recv(4096)
    until(lambda: http.counts()["connections"] == 0)


@pytest.mark.parametrize("http", [{"places": 6}], indirect=True)
def test_one_address_cannot_take_all_places(server: Endpoint, http: HttpThread) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(call(server, BODY)) for _ in range(4)]
        until(lambda: http.counts()["connections"] == 4)
        with call(server) as one_more:
            assert b" 503 " in one_more.recv(4096)
        with call(server, HEAD + b"\r\n", "127.0.0.2") as other:
            assert b"here" in other.recv(4096)
        busy[0].sendall(b"4567890")
        assert b"here" in busy[0].recv(4096), "and is idle now"
        with call(server, HEAD + b"\r\n") as newer:
            assert b"here" in newer.recv(4096)
        assert busy[0].recv(1) == b"", "it made room"
    assert http.counts()["refused_connections"] == 1
    assert http.counts()["dropped_idle"] == 1


@pytest.mark.parametrize("http", [{"places": 20}], indirect=True)
def test_a_flood_of_silent_ones_keeps_nobody_out(
    server: Endpoint, http: HttpThread, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack, caplog.at_level(logging.INFO):
        for _ in range(200):
            stack.enter_context(call(server))
        assert ask(server, "GET", "/").body == "here"
        assert http.counts()["connections"] <= 20
        until(lambda: len(caplog.records) > 0)
    assert len(caplog.records) == 1
    assert "idle ones dropped for others" in caplog.records[0].getMessage()


def test_the_last_descriptor_costs_one_line() -> None:
    program = """if True:
        import logging, os, resource, socket, threading
        from pdplane.control.http_thread import HttpThread
        from tests.control.test_http_connections import _app, call, HEAD
        heard = threading.Event()
        class Heard(logging.StreamHandler):
            def emit(self, record):
                super().emit(record)
                heard.set()
        logging.basicConfig(level=logging.INFO, handlers=[Heard()])
        http = HttpThread("few", places=1000)
        http.start()
        server = http.serve(_app(), "127.0.0.1", 0)
        clients = [call(server) for _ in range(10)]
        hogs = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        waiting = [socket.socket() for _ in range(5)]
        try:
            while True:
                hogs.append(os.dup(0))
        except OSError:
            pass
        for each in waiting:
            each.settimeout(20)
            each.connect((server.host, server.port))
            each.sendall(HEAD + bytes((13, 10)))
        assert heard.wait(20)
        for hog in hogs:
            os.close(hog)
        for each in waiting:
            assert b"here" in each.recv(4096)
        for each in (*waiting, *clients):
            each.close()
        http.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no file descriptor is left") == 1
    assert "Traceback" not in done.stderr


def test_the_default_is_below_the_limit_of_descriptors() -> None:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == resource.RLIM_INFINITY or 2 * ConnectionBounds().places < soft
