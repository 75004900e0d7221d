"""A listening socket for a worker: one thread that accepts, and one for each connection, all of them bounded."""

from __future__ import annotations

import ipaddress
import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Endpoint
from pdplane.transport.stream import Wakeup
from pdplane.workers.line import Line

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_BACKLOG = 128
_PAUSE_MS = 200  # out of descriptors: the connection stays in the backlog, and `poll` would spin
_log = logging.getLogger(__name__)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Addresses or CIDR ranges, IPv4 or IPv6. Raises ConfigError naming the text."""
    try:
        return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts)
    except ValueError as error:
        raise ConfigError(f"no address or CIDR range: {error}") from None


def is_inside(address: str, networks: Sequence[Network]) -> bool:
    """Whether an address lies in one of the ranges; an IPv4 address written as IPv6 counts as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    plain = getattr(found, "ipv4_mapped", None) or found
    return any(plain in network for network in networks if network.version == plain.version)


class Listener:
    """Accepts connections and runs `serve(line, address)` for each on a thread of its own.

    `serve` owns its line until it returns; an OSError from it ends the connection quietly. `allow` empty admits every
    address. Connections above `max_connections` are closed at once. The constructor opens nothing.
    """

    def __init__(
        self,
        listen: Endpoint,
        serve: Callable[[Line, str], None],
        *,
        name: str,
        max_connections: int,
        stall_s: float,
        allow: Sequence[Network] = (),
    ) -> None:
        self._listen, self._serve, self._name = listen, serve, name
        self._max_connections, self._stall_s, self._allow = max_connections, stall_s, tuple(allow)
        self._lock = threading.Lock()
        self._lines: dict[threading.Thread, Line] = {}
        self._listener: socket.socket | None = None
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self.accepted = 0
        self.refused = 0

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens; the port is the real one after `start`."""
        return self._listen

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._lines)

    def start(self) -> Endpoint:
        """Bind and accept. Raises ConfigError naming the address."""
        if self._listener is not None or self._closing:
            raise LocalProtocolError("a listener starts once")
        self._listener = _listening(self._listen)
        self._listen = Endpoint(self._listen.host, self._listener.getsockname()[1])
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._accept, args=(self._listener, self._wakeup), name=f"{self._name} {self._listen}", daemon=True
        )
        self._thread.start()
        return self._listen

    def stop(self) -> None:
        """Accept no more; returns at once, and any thread may call it."""
        self._closing = True
        if self._wakeup is not None:
            self._wakeup.wake()

    def close(self) -> None:
        """Stop, end every connection and join every thread; idempotent. Not for a thread that serves a connection."""
        self.stop()
        if self._wakeup is not None and self._thread is not None:
            self._thread.join()
            self._wakeup.close()
        with self._lock:
            running = dict(self._lines)
        for line in running.values():
            line.stop()
        for thread in running:
            thread.join()

    def _accept(self, listener: socket.socket, wakeup: Wakeup) -> None:
        with listener:
            self._accept_until_stopped(listener, wakeup)

    def _accept_until_stopped(self, listener: socket.socket, wakeup: Wakeup) -> None:
        poll, pause = select.poll(), select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        poll.register(wakeup.descriptor, select.POLLIN)
        pause.register(wakeup.descriptor, select.POLLIN)
        while not self._closing:
            poll.poll()
            try:
                connected, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError:
                pause.poll(_PAUSE_MS)
                continue
            self._admit(connected, str(address[0]), int(address[1]))

    def _admit(self, connected: socket.socket, host: str, port: int) -> None:
        full = self.connections >= self._max_connections
        if full or self._closing or (self._allow and not is_inside(host, self._allow)):
            self.refused += 1
            connected.close()
            return
        try:
            line = Line(connected, str(Endpoint(host, port)), self._stall_s)
        except OSError:  # gone again already
            connected.close()
            return
        thread = threading.Thread(target=self._run, args=(line, host), name=f"{self._name} {line.peer}", daemon=True)
        self.accepted += 1
        with self._lock:
            self._lines[thread] = line
        thread.start()

    def _run(self, line: Line, host: str) -> None:
        try:
            self._serve(line, host)
        except OSError as error:
            _log.debug("%s: %s closed: %s", self._name, line.peer, error)
        finally:
            line.close()
            with self._lock:
                self._lines.pop(threading.current_thread(), None)


def _listening(listen: Endpoint) -> socket.socket:
    family = socket.AF_INET6 if listen.is_ipv6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host, listen.port))
        listener.listen(_BACKLOG)
        listener.settimeout(0)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {listen}: {error.strerror or error}") from error
    return listener
