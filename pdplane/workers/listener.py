"""Connected sockets with bounded waits, and the listening socket that accepts them."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Endpoint
from pdplane.net import NAMES, Acceptor, Complaints, first_to_go, listen, plain

_SCRATCH_BYTES = 1 << 18
_CHUNK_BYTES = 4 << 20  # one system call at most, so that the stall limit is a limit on progress
_ENDED = "the peer closed the connection"


def bytes_of(buffer: bytes | bytearray | memoryview) -> memoryview:
    """Return a buffer of any items as single bytes; memoryview refuses to cast an empty one."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


class BoundedSocket:
    """A stream socket; `peer` names the other end in messages."""

    def __init__(self, connected: socket.socket, peer: str, stall_s: float) -> None:
        self.peer = peer
        self.proved = False
        """Set by its owner once the peer has said what makes sense: the others make place first."""
        self.waits = False
        self.since = time.monotonic()  # the connection, or its last turn, began
        self._socket = connected
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._closed = False
        self._stopped = False
        self._deadline_s: float | None = None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @classmethod
    def connect(cls, peer: Endpoint, timeout_s: float, stall_s: float) -> BoundedSocket:
        """Connect within `timeout_s`. Raises OSError."""
        return cls(NAMES.connect(peer.host, peer.port, timeout_s), str(peer), stall_s)

    @contextlib.contextmanager
    def deadline(self, deadline_s: float) -> Iterator[None]:
        """Give everything inside one deadline, on the monotonic clock."""
        self._deadline_s = deadline_s
        try:
            yield
        finally:
            self._deadline_s = None

    def read(self, count: int) -> memoryview:
        """Return exactly `count` bytes.

        Memory is touched only as they arrive, so a declared length alone costs none.
        """
        buffer = np.empty(count, np.uint8).data
        done = 0
        while done < count:
            self._limit()
            done += len(self._received(buffer[done : done + _CHUNK_BYTES]))
        return buffer

    def await_first(self, count: int, within_s: float | None) -> memoryview:
        """Return `count` bytes; the first may take `within_s` (None: no limit), the others as long as in `read`."""
        self._socket.settimeout(within_s)
        self.since, self.waits = time.monotonic(), True
        first = self._received(memoryview(bytearray(1)))
        self.waits = False
        return memoryview(bytes(first) + bytes(self.read(count - 1)))

    def skip(self, count: int) -> None:
        """Read `count` bytes and drop them."""
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        while count:
            self._limit()
            count -= len(self._received(scratch[:count]))

    def has_left(self) -> bool:
        """Return whether the peer has closed its side and nothing of it is left to read; never waits."""
        with self._lock:
            if self._closed or self._stopped:
                return True
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            try:
                return bool(waiting.poll(0)) and not self._socket.recv(1, socket.MSG_PEEK)
            except TimeoutError:
                return False
            except OSError:
                return True

    def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send all the parts, none of which is copied."""
        for part in parts:
            view = bytes_of(part)
            while len(view):
                self._limit()
                sent = self._socket.send(view[:_CHUNK_BYTES])
                view = view[sent:]

    @property
    def address(self) -> str:
        """The other end's host."""
        return plain(self.peer.rpartition(":")[0])

    @property
    def ended(self) -> bool:
        """`stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """End every wait, now and later; from any thread."""
        with self._lock:
            self._stopped = True
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; idempotent."""
        with self._lock:
            self._closed = True
            self._socket.close()

    def _received(self, view: memoryview) -> memoryview:
        if self._stopped:  # bytes may still be queued behind a shutdown
            raise ConnectionAbortedError("stopped")
        count = self._socket.recv_into(view)
        if not count:
            raise ConnectionResetError(_ENDED)
        return view[:count]

    def _limit(self) -> None:
        if self._deadline_s is None:
            self._socket.settimeout(self._stall_s)
            return
        left = self._deadline_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._socket.settimeout(min(left, self._stall_s))


# ---- A listening socket for a worker: one thread that accepts, and one for each connection, all of them bounded


Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_log = logging.getLogger(__name__)


def parse_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Return addresses or CIDR ranges, IPv4 or IPv6. Raises ConfigError naming the text."""
    try:
        return tuple(ipaddress.ip_network(text.strip(), strict=False) for text in texts)
    except ValueError as error:
        raise ConfigError(f"no address or CIDR range: {error}") from None


def is_inside(address: str, networks: Sequence[Network]) -> bool:
    """Return whether an address lies in one of the ranges; an IPv4 address written as IPv6 counts as IPv4."""
    found = ipaddress.ip_address(address.partition("%")[0])
    plain = getattr(found, "ipv4_mapped", None) or found
    return any(plain in network for network in networks if network.version == plain.version)


class Listener:
    """Accepts connections and runs `serve(line, address)` for each on a thread of its own.

    `serve` owns its line until it returns; an OSError from it ends the connection quietly. `allow` empty admits every
    address. When there are `max_connections`, one that has said nothing yet makes place, else one of another address
    that waits for its peer's next word, of the address with the most; without such a one the new connection is closed
    at once. `complaints` writes about peers. The constructor opens nothing.
    """

    def __init__(
        self,
        listen: Endpoint,
        serve: Callable[[BoundedSocket, str], None],
        *,
        name: str,
        max_connections: int,
        stall_s: float,
        allow: Sequence[Network] = (),
    ) -> None:
        self._listen, self._serve, self._name = listen, serve, name
        self._max_connections, self._stall_s, self._allow = max_connections, stall_s, tuple(allow)
        self._lock = threading.Lock()
        self._lines: dict[threading.Thread, BoundedSocket] = {}
        self._acceptor: Acceptor | None = None
        self._closing = False
        self.complaints = Complaints(_log)
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
        if self._acceptor is not None or self._closing:
            raise LocalProtocolError("a listener starts once")
        listener = listen(self._listen)
        self._listen = Endpoint(self._listen.host, listener.getsockname()[1])
        self._acceptor = Acceptor([listener], self._admit, name=f"{self._name} {self._listen}")
        self._acceptor.start()
        return self._listen

    def trouble(self) -> str | None:
        """Return why no connection is accepted, None when there is no reason."""
        return None if self._acceptor is None else self._acceptor.trouble()

    def stop(self) -> None:
        """Accept no more; return at once, from any thread."""
        self._closing = True
        if self._acceptor is not None:
            self._acceptor.stop()

    def close(self) -> None:
        """Stop, end every connection and join every thread; idempotent. Not for a thread that serves a connection."""
        self.stop()
        if self._acceptor is not None:
            self._acceptor.close()
        with self._lock:
            running = dict(self._lines)
        for line in running.values():
            line.stop()
        for thread in running:
            thread.join()

    def _admit(self, connected: socket.socket, address: object) -> None:
        assert isinstance(address, tuple), "an internet address"
        host, port = str(address[0]), int(address[1])
        allowed = not self._allow or is_inside(host, self._allow)
        if self._closing or not allowed or not self._make_place(plain(host)):
            self.refused += 1
            reason = "there are too many" if allowed else "the address is not allowed"
            self.complaints.tell((host, reason), "%s: a connection of %s is refused: %s", self._name, host, reason)
            connected.close()
            return
        try:
            line = BoundedSocket(connected, str(Endpoint(host, port)), self._stall_s)
        except OSError:  # it has ended already
            connected.close()
            return
        thread = threading.Thread(target=self._run, args=(line, host), name=f"{self._name} {line.peer}", daemon=True)
        self.accepted += 1
        with self._lock:
            self._lines[thread] = line
        try:
            thread.start()
        except RuntimeError:  # no thread is left
            with self._lock:
                del self._lines[thread]
            line.close()
            raise

    def _make_place(self, host: str) -> bool:
        """Return whether one more may connect, after ending one that makes place."""
        with self._lock:
            lines = [line for line in self._lines.values() if not line.ended]
        idle = [line for line in lines if line.waits or not line.proved]
        if len(lines) < self._max_connections:
            return True
        if not idle:
            return False
        goes = first_to_go(idle, lambda line: line.address, lambda line: (line.proved, line.since))
        if goes.proved and goes.address == host:
            return False
        self.complaints.tell((goes.address, "place"), "%s: %s makes place for others", self._name, goes.peer)
        goes.stop()
        return True

    def _run(self, line: BoundedSocket, host: str) -> None:
        try:
            self._serve(line, host)
        except OSError as error:
            _log.debug("%s: %s closed: %s", self._name, line.peer, error)
        finally:
            line.close()
            with self._lock:
                self._lines.pop(threading.current_thread(), None)
