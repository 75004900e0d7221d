"""The connections of one HTTP server: how many there may be, and which of them wait in vain.

asyncio accepts without a bound, and aiohttp waits an hour for a request's head. Here a connection that sends none is
closed, an idle one makes room when all places are taken, and one address cannot take every place.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import attrs
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdplane.net import first_to_go, share_of_descriptors

logger = logging.getLogger(__name__)

_MOST = 1024
_ADDRESS_SHARE = 0.75
"""The part of the places that one address may have."""
_LOG_INTERVAL_S = 30.0
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"

Protocols: TypeAlias = Callable[[], asyncio.Protocol]


def default_places() -> int:
    """Return a third of the descriptors that the process may have: there are two servers, and data connections."""
    return share_of_descriptors(1 / 3, _MOST)


@attrs.frozen
class ConnectionBounds:
    """The bounds of one server."""

    places: int = attrs.Factory(default_places)
    head_s: float = 15.0
    """For the head of a request, from the connection's beginning or its first byte."""
    idle_s: float = 75.0
    """Between two requests."""


class _Caller(asyncio.Protocol):
    """One connection, in front of aiohttp's own protocol, which hears of it only when it is let in."""

    def __init__(self, connections: HttpConnections, inner: asyncio.Protocol) -> None:
        self._all, self.inner = connections, inner
        self.transport: asyncio.Transport | None = None
        self.address = ""
        self.busy = False
        """Whether a request of it is being answered."""
        self.has_asked = False
        self.since = time.monotonic()
        """When it began to be idle, or to send a head."""
        self._sends = True

    @property
    def in_vain(self) -> float:
        """For how long it may go on as it does now, in seconds since `since`."""
        options = self._all.options
        return options.head_s if self._sends else options.idle_s

    def begin(self) -> None:
        """Note that a request's head has come."""
        self.busy, self.has_asked = True, True

    def end(self) -> None:
        """Note that the request was answered."""
        self.busy, self._sends, self.since = False, False, time.monotonic()

    def drop(self) -> None:
        """Close it without a word."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), "a stream"
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        if self._all.admit(self):
            self.inner.connection_made(transport)
            return
        transport.write(_FULL)
        transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._all.leave(self):
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._all.holds(self):
            return
        if not (self.busy or self._sends):
            self._sends, self.since = True, time.monotonic()
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._all.holds(self) else None

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()


class HttpConnections:
    """Makes the protocols of one server's connections; everything but `counts` runs on the loop's thread."""

    def __init__(self, options: ConnectionBounds | None = None) -> None:
        self.options = options or ConnectionBounds()
        self._make: Protocols | None = None
        self._callers: dict[asyncio.BaseProtocol, _Caller] = {}
        self._totals = Counter[str]()
        self._told_at = -_LOG_INTERVAL_S
        self._told = Counter[str]()

    def open(self, make: Protocols) -> None:
        """Take the factory of aiohttp's protocols."""
        self._make = make

    def __call__(self) -> asyncio.Protocol:
        assert self._make is not None, "opened before it listens"
        return _Caller(self, self._make())

    @property
    def watched(self) -> Middleware:
        """Note which connection has a request under way; the first middleware of the application."""

        @web.middleware
        async def watch(request: web.Request, handler: Handler) -> web.StreamResponse:
            caller = self._callers.get(request.protocol)
            if caller is None:
                return await handler(request)
            caller.begin()
            try:
                return await handler(request)
            finally:
                caller.end()

        return watch

    def admit(self, caller: _Caller) -> bool:
        """Return whether a new connection may stay, for which an idle one may have to go."""
        held = list(self._callers.values())
        crowd = [each for each in held if each.address == caller.address]
        if len(crowd) < int(self.options.places * _ADDRESS_SHARE):
            crowd = held if len(held) >= self.options.places else []
        if crowd and not self._makes_room(crowd):
            self._count("refused")
            return False
        self._callers[caller.inner] = caller
        return True

    def leave(self, caller: _Caller) -> bool:
        """Forget a connection; return whether it was let in."""
        return self._callers.pop(caller.inner, None) is not None

    def holds(self, caller: _Caller) -> bool:
        """Return whether a connection was let in and not forgotten."""
        return caller.inner in self._callers

    def sweep(self) -> None:
        """Close what has waited in vain."""
        now = time.monotonic()
        for caller in list(self._callers.values()):
            if not caller.busy and now - caller.since > caller.in_vain:
                caller.drop()
                if not caller.has_asked:  # an idle one is closed as it should be
                    self._count("silent")
        self._tell(now)

    def counts(self) -> dict[str, int]:
        """Return how many connections there are; `refused_` and `dropped_` ones only grow."""
        totals = dict(self._totals)
        return {
            "connections": len(self._callers),
            "refused_connections": totals.get("refused", 0),
            "dropped_idle": totals.get("dropped", 0),
            "dropped_silent": totals.get("silent", 0),
        }

    def _makes_room(self, crowd: list[_Caller]) -> bool:
        """Drop the one of these that has been idle for longest, of the address with the most; False without any."""
        idle = [each for each in crowd if not each.busy]
        if not idle:
            return False
        oldest = first_to_go(idle, lambda each: each.address, lambda each: (each.since,))
        oldest.drop()
        self._callers.pop(oldest.inner, None)
        oldest.inner.connection_lost(None)
        self._count("dropped")
        return True

    def _count(self, what: str) -> None:
        self._totals[what] += 1

    def _tell(self, now: float) -> None:
        """Log what was refused since the last line, once an interval."""
        new = self._totals - self._told
        if new and now - self._told_at >= _LOG_INTERVAL_S:
            self._told_at, self._told = now, self._totals.copy()
            logger.warning(
                "HTTP connections: %d refused, %d idle ones dropped for others, %d closed that asked nothing",
                new["refused"], new["dropped"], new["silent"],
            )  # fmt: skip
