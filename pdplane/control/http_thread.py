"""One thread with an asyncio loop for all HTTP of a process, servers and clients alike."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import aiohttp
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.log import server_logger

from pdplane.control.http_connections import ConnectionBounds, HttpConnections, default_places
from pdplane.errors import InternalError, LocalProtocolError
from pdplane.ids import Endpoint
from pdplane.net import IDLE_TURN_S, NAMES, Pulse, listen
from pdplane.security import Tls

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GRACE_S = 0.25  # time that running requests have when the server closes, before they are cancelled
_BACKLOG = 512
_LOG_INTERVAL_S = 30.0
_HANDSHAKE_S = 10.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log of a server: what is no HTTP/1.1 (a probe for HTTP/2, TLS) is one line of DEBUG, and no error."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:  # noqa: ANN401  (logging's own)
        error = kwargs.get("exc_info")
        if isinstance(error, HttpProcessingError):
            level, msg, args, kwargs = logging.DEBUG, "no HTTP/1.1 request: %s", (_one_line(error),), {}
        super().log(level, msg, *args, **kwargs)


def _one_line(error: HttpProcessingError) -> str:
    return " ".join(f"{type(error).__name__}: {error.message}".split())[:200]


class _Resolver(AbstractResolver):
    """Looks names up where neither the loop's work nor the process's end waits for a silent name server."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.wrap_future(NAMES.begin(host, port))
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol,
                flags=int(socket.AI_NUMERICHOST),
            )
            for kind, _, protocol, _, address in found
            if family in (socket.AF_UNSPEC, kind)
        ]  # fmt: skip

    async def close(self) -> None:
        """Keep nothing that could be closed."""


class HttpThread:
    """Runs aiohttp servers and clients on one thread of its own; everything else posts to it.

    The connections of each server are bounded. The constructor opens nothing. `close` is idempotent, bounded and
    joins.
    """

    def __init__(
        self, name: str = "pdplane-http", *, places: int | None = None, head_s: float = 15.0, idle_s: float = 75.0
    ) -> None:
        """Set up; each server has `places` connections (None: by the file descriptors that the process may have).

        A request's head may take `head_s`, the time between two requests `idle_s`.
        """
        self._name = name
        self._bounds = ConnectionBounds(default_places() if places is None else places, head_s, idle_s)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._pulse = Pulse(name)
        # Owned by the loop's thread:
        self._runners: list[web.AppRunner] = []
        self._listeners: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._connections: list[HttpConnections] = []
        self._said_exhausted_s = -math.inf
        self._session: aiohttp.ClientSession | None = None

    def start(self) -> None:
        """Start the thread; harmless when it runs. Raises LocalProtocolError after `close`."""
        with self._lock:
            if self._closed:
                raise LocalProtocolError(f"{self._name} was closed and cannot start again")
            if self._thread is not None:
                return
            self._loop = asyncio.new_event_loop()
            # A daemon thread: an owner that forgets `close` does not hang the interpreter's exit.
            self._thread = threading.Thread(target=_run, args=(self._loop, self._name), name=self._name, daemon=True)
            self._thread.start()
            self._loop.call_soon_threadsafe(self._beat)

    def _beat(self) -> None:
        self._pulse.beat()
        for connections in self._connections:
            connections.sweep()
        asyncio.get_running_loop().call_later(IDLE_TURN_S, self._beat)

    def counts(self) -> dict[str, int]:
        """Return how many connections all servers have, and what was refused and dropped."""
        total = Counter[str]()
        for connections in list(self._connections):
            total.update(connections.counts())
        return dict(total)

    def trouble(self) -> str | None:
        """Return why nothing is answered any more, None while the thread goes on, and before and after its life."""
        thread = self._thread
        return None if thread is None or self._closed else self._pulse.trouble(runs=thread.is_alive())

    @property
    def alive(self) -> bool:
        """The thread runs and takes work."""
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._closed

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; any thread. Raises LocalProtocolError when the thread does not run."""
        with self._lock:
            if self._loop is None or self._closed:
                coroutine.close()
                raise LocalProtocolError(f"{self._name} is not running")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def serve(self, app: web.Application, host: str, port: int, tls: Tls | None = None) -> Endpoint:
        """Serve an application, with `tls` over HTTPS, and return where it listens; port 0 takes a free one.

        Blocks, so not for the loop's thread. A request whose client went away is cancelled. Raises ConfigError, which
        names the address, when it cannot be bound.
        """
        return self.run(self._serve(app, host, port, tls)).result()

    def session(self) -> aiohttp.ClientSession:
        """Return the one client session; for coroutines on this loop only."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=256, limit_per_host=64, resolver=_Resolver())
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop listening, cancel what runs, join the thread."""
        with self._lock:
            first, self._closed = not self._closed, True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if first:
            closing = asyncio.run_coroutine_threadsafe(self._shut_down(), loop)
            closing.add_done_callback(lambda _done: loop.call_soon_threadsafe(loop.stop))
        thread.join(timeout_s)
        if thread.is_alive():
            raise InternalError(f"{self._name} did not end within {timeout_s:g} s")

    async def _serve(self, app: web.Application, host: str, port: int, tls: Tls | None) -> Endpoint:
        context = None if tls is None else tls.api()
        # Listening here makes the loser of a race for a port get the same error as a latecomer; a name may take a
        # while, so not on the loop's thread.
        listener = await asyncio.get_running_loop().run_in_executor(None, listen, Endpoint(host, port))
        connections = HttpConnections(self._bounds)
        app.middlewares.insert(0, connections.watched)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_GRACE_S, logger=_ServerLog(server_logger)
        )
        await runner.setup()
        assert runner.server is not None, "it was set up"
        connections.open(runner.server)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._failed)
        self._servers.append(
            await loop.create_server(connections, sock=listener, backlog=_BACKLOG, **_handshake(context))
        )
        self._connections.append(connections)
        self._runners.append(runner)
        self._listeners.append(listener)
        bound = listener.getsockname()
        return Endpoint(bound[0], bound[1])

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log what asyncio reports; a lack of descriptors in one line an interval, whatever wants to connect."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _EXHAUSTED):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said_exhausted_s >= _LOG_INTERVAL_S:
            self._said_exhausted_s = time.monotonic()
            logger.error("no file descriptor is left for new HTTP connections: %s", error)

    async def _shut_down(self) -> None:
        runners, self._runners = self._runners, []
        # Accept no more, and let asyncio finish with what it has accepted just now: closing the server in between
        # makes it drop such a connection's socket unclosed.
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        await _let_the_loop_turn()
        for server in self._servers:
            server.close()
        await asyncio.gather(*(runner.cleanup() for runner in runners))
        await _end_tasks()  # before the session: a request that is cancelled gives its connection back
        if self._session is not None:
            await self._session.close()
        await _let_the_loop_turn()  # closed transports close their sockets in its next turns


def _run(loop: asyncio.AbstractEventLoop, name: str) -> None:
    # An executor of our own: name look-ups may hang in the resolver, and closing must not wait for them.
    executor = ThreadPoolExecutor(max_workers=4, thread_name_prefix=f"{name}-work")
    loop.set_default_executor(executor)
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        asyncio.set_event_loop(None)
        loop.close()


def _handshake(context: ssl.SSLContext | None) -> dict[str, Any]:
    return {} if context is None else {"ssl": context, "ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": 1}


async def _let_the_loop_turn() -> None:
    for _round in range(3):
        await asyncio.sleep(0)


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        _done, pending = await asyncio.wait(tasks, timeout=1.0)
        for task in pending:
            logger.error("task %s did not end when it was cancelled", task.get_name())
