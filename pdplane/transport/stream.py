"""Connected stream sockets, TCP or Unix, with bounded waits.

Sockets block, but no call on them for long: SO_RCVTIMEO and SO_SNDTIMEO bound each call, and longer waits
are a `poll` that no lock is held over. Another thread ends a wait by shutting the socket down; only the
thread that uses a socket closes it, so a descriptor's number is never reused under a running call.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time

from pdplane.transport import iovec
from pdplane.transport.greeting import PREFIX_BYTES, GreetingKind, decode_body, decode_prefix
from pdplane.transport.pull import peer_credentials

RECEIVE_SLICE_S = 0.02  # the longest that a receive may hold a room's window while its sender stalls
SEND_SLICE_S = 0.25
LOCAL_BUFFER_BYTES = 256 << 10  # on one host larger ones leave the cache: measured slower
_SCRATCH_BYTES = 256 << 10
_DONT_WAIT = socket.MSG_DONTWAIT
_ENDED = "the peer closed the connection"


class Wakeup:
    """Ends another thread's `poll`: a pair of sockets, of which the poller registers `descriptor`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._lock = threading.Lock()
        self.descriptor = self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; safe at any time from any thread."""
        # A full buffer is awake already, and after `close` nobody waits.
        with self._lock, contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget wakes until now."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()


class Link:
    """A connected stream socket; used by one thread, stopped by any."""

    def __init__(self, connected: socket.socket, buffer_bytes: int | None) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._closed = False
        self._poll = select.poll()
        self.descriptor = connected.fileno()
        self.credentials = peer_credentials(connected) if connected.family == socket.AF_UNIX else None
        _tune(connected, buffer_bytes)

    def check(self) -> None:
        """Raise ConnectionAbortedError once the link was stopped: bytes may still be queued behind a shutdown."""
        if self._stopped is not None:
            raise ConnectionAbortedError(self._stopped)

    def wait(self, event: int, deadline_s: float | None) -> None:
        """Wait for POLLIN or POLLOUT (or an end, which the next call finds). Raises TimeoutError."""
        self.check()
        self._poll.register(self.descriptor, event)
        left = None if deadline_s is None else (deadline_s - time.monotonic()) * 1000
        if (left is not None and left <= 0) or not self._poll.poll(left):
            raise TimeoutError("the peer stalled")
        self.check()

    def read(self, view: memoryview, deadline_s: float) -> None:
        """Fill the view. Raises TimeoutError or ConnectionError."""
        while len(view):
            if time.monotonic() > deadline_s:
                raise TimeoutError("the peer stalled")
            try:
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except BlockingIOError:
                self.wait(select.POLLIN, deadline_s)
                continue
            self.check()
            if not count:
                raise ConnectionResetError(_ENDED)
            view = view[count:]

    def read_bytes(self, count: int, deadline_s: float) -> bytearray:
        data = bytearray(count)
        self.read(memoryview(data), deadline_s)
        return data

    def read_greeting(self, deadline_s: float) -> tuple[GreetingKind, tuple[str, ...]]:
        """One greeting message. Raises WireError, TimeoutError or ConnectionError."""
        kind, length = decode_prefix(self.read_bytes(PREFIX_BYTES, deadline_s))
        return kind, decode_body(kind, self.read_bytes(length, deadline_s))

    def drain(self, count: int, within_s: float) -> None:
        """Read bytes and forget them; `within_s` bounds the time without progress."""
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        while count:
            view = scratch[:count]
            self.read(view, time.monotonic() + within_s)
            count -= len(view)

    def read_available(self) -> bytes:
        """Bytes that are there now, at least one. Raises ConnectionError at the end of the stream."""
        try:
            data = self._socket.recv(4096, _DONT_WAIT)
        except BlockingIOError:
            return b""
        if not data:
            self.check()
            raise ConnectionResetError(_ENDED)
        return data

    def write(self, data: bytes, deadline_s: float) -> None:
        """Send bytes. Raises TimeoutError or ConnectionError."""
        view = memoryview(data)
        while len(view):
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline_s)

    def write_vector(self, cursor: iovec.Cursor, within_s: float) -> None:
        """Send an iovec array; `within_s` bounds the time without progress."""
        deadline_s = time.monotonic() + within_s
        while cursor.left:
            self.check()
            try:
                cursor.advance(iovec.send, self.descriptor)
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline_s)
            else:
                deadline_s = time.monotonic() + within_s

    def receive_vector(self, cursor: iovec.Cursor) -> bool:
        """One bounded call into the arena: whether it got all it asked for, False too when nothing came in time."""
        try:
            moved, full = cursor.advance(iovec.receive_all, self.descriptor)
        except BlockingIOError:
            return False
        if not moved:
            self.check()
            raise ConnectionResetError(_ENDED)
        return full

    def stop(self, cause: str) -> None:
        """End every wait and call on the link, now and later; from any thread."""
        with self._lock:
            if self._stopped is None:
                self._stopped = cause
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._socket.close()


def _tune(connected: socket.socket, buffer_bytes: int | None) -> None:
    connected.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, RECEIVE_SLICE_S), (socket.SO_SNDTIMEO, SEND_SLICE_S)):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(seconds * 1e6)))
    is_unix = connected.family == socket.AF_UNIX
    if not is_unix:
        _tune_tcp(connected)
    if buffer_bytes is None and (is_unix or _is_loopback(connected)):
        buffer_bytes = LOCAL_BUFFER_BYTES
    if buffer_bytes is not None:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def _tune_tcp(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanished without a word is noticed within half a minute of rest (the names differ by system).
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_loopback(connected: socket.socket) -> bool:
    host = str(connected.getpeername()[0])
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"
