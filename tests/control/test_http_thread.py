"""The HTTP thread: ports, errors that name them, cancellation, closing."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from pdplane.control.http_thread import HttpThread
from pdplane.errors import ConfigError, LocalProtocolError
from tests.http_client import ask


@pytest.fixture
def http() -> Iterator[HttpThread]:
    thread = HttpThread("pdplane-http-test")
    thread.start()
    yield thread
    thread.close()


def _hello_app() -> web.Application:
    async def hello(_request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/", hello)
    return app


def test_serves_on_a_free_port_and_tells_which(http: HttpThread) -> None:
    endpoint = http.serve(_hello_app(), "127.0.0.1", 0)
    assert endpoint.host == "127.0.0.1"
    assert ask(endpoint, "GET", "/").body == "hello"


def test_serves_ipv6(http: HttpThread) -> None:
    endpoint = http.serve(_hello_app(), "::1", 0)
    assert ask(endpoint, "GET", "/").body == "hello"


def test_a_busy_port_is_named(http: HttpThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hog:
        port = hog.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is taken"):
            http.serve(_hello_app(), "127.0.0.1", port)


@pytest.mark.parametrize(("host", "words"), [("", "every interface"), ("203.0.113.1", "cannot listen on 203.0.113.1")])
def test_a_host_that_cannot_be_bound_is_named(http: HttpThread, host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        http.serve(_hello_app(), host, 0)


def test_closing_ends_what_runs_and_what_is_served() -> None:
    http = HttpThread()
    http.start()
    entered, cancelled = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    running = http.run(wait_for_ever())
    endpoint = http.serve(_hello_app(), "127.0.0.1", 0)
    assert entered.wait(5)
    http.close()
    http.close()
    assert cancelled.is_set()
    assert running.cancelled()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((endpoint.host, endpoint.port), timeout=5)


def test_takes_no_work_before_start_and_after_close() -> None:
    async def nothing() -> None:
        return None

    http = HttpThread()
    assert not http.alive
    with pytest.raises(LocalProtocolError, match="is not running"):
        http.run(nothing())
    http.start()
    assert http.alive
    http.close()
    with pytest.raises(LocalProtocolError, match="is not running"):
        http.run(nothing())
    with pytest.raises(LocalProtocolError, match="cannot start again"):
        http.start()


def test_a_client_that_leaves_cancels_its_request(http: HttpThread) -> None:
    entered, cancelled = threading.Event(), threading.Event()

    async def slow(_request: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return web.Response()

    app = web.Application()
    app.router.add_get("/slow", slow)
    endpoint = http.serve(app, "127.0.0.1", 0)
    with socket.create_connection((endpoint.host, endpoint.port)) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        assert entered.wait(5)
    assert cancelled.wait(5)
