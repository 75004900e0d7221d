"""One connected socket with bounded waits, for the workers' two protocols and their clients.

Used by one thread, stopped by any. Every wait has an end: the stall limit without a byte of progress inside a frame,
or a deadline over a whole exchange. Errors are OSErrors (TimeoutError and ConnectionError among them).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np

from pdplane.ids import Endpoint

_CHUNK_BYTES = 4 << 20  # one system call at most, so that the stall limit is a limit on progress
_ENDED = "the peer closed the connection"


def bytes_of(buffer: bytes | bytearray | memoryview) -> memoryview:
    """A buffer as single bytes, whatever its items are; memoryview refuses to cast an empty one."""
    view = memoryview(buffer)
    return view.cast("B") if view.nbytes else memoryview(b"")


class Line:
    """A stream socket; `peer` names the other end in messages."""

    def __init__(self, connected: socket.socket, peer: str, stall_s: float) -> None:
        self.peer = peer
        self._socket = connected
        self._stall_s = stall_s
        self._lock = threading.Lock()
        self._closed = False
        self._stopped = False
        self._deadline_s: float | None = None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @classmethod
    def connect(cls, peer: Endpoint, timeout_s: float, stall_s: float) -> Line:
        """Connect within `timeout_s`. Raises OSError."""
        try:
            return cls(socket.create_connection((peer.host, peer.port), timeout_s), str(peer), stall_s)
        except UnicodeError:
            raise OSError(f"{peer.host!r} is no host name") from None

    @contextlib.contextmanager
    def deadline(self, deadline_s: float) -> Iterator[None]:
        """Bound everything inside by one moment of the monotonic clock."""
        self._deadline_s = deadline_s
        try:
            yield
        finally:
            self._deadline_s = None

    def read(self, count: int) -> memoryview:
        """Exactly `count` bytes; memory is touched only as they arrive, so a declared length alone costs none."""
        buffer = np.empty(count, np.uint8).data
        done = 0
        while done < count:
            self._limit()
            done += len(self._received(buffer[done : done + _CHUNK_BYTES]))
        return buffer

    def await_first(self, count: int, within_s: float | None) -> memoryview:
        """`count` bytes whose first may take `within_s` (None: for ever) and the others no longer than any."""
        self._socket.settimeout(within_s)
        first = self._received(memoryview(bytearray(1)))
        return memoryview(bytes(first) + bytes(self.read(count - 1)))

    def write(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send all the parts, none of which is copied."""
        for part in parts:
            view = bytes_of(part)
            while len(view):
                self._limit()
                sent = self._socket.send(view[:_CHUNK_BYTES])
                view = view[sent:]

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
