"""A sender's line over a stream socket, and the connected socket with bounded waits that both halves use."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs
import numpy as np

from pdplane.errors import WireError
from pdplane.ids import Endpoint
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.net import HELD_UP_S, Names, Wakeup, recover_soon
from pdplane.transport import vector as iovec
from pdplane.transport.framing import (
    FROM_RECEIVER,
    HEADER_BYTES,
    FrameKind,
    Header,
    decode_header,
    encode_header,
    encode_segment,
)
from pdplane.transport.greeting import (
    PREFIX_BYTES,
    PULL,
    UNIX,
    Accepted,
    Attach,
    GreetingKind,
    SenderGreeting,
    decode_attached,
    decode_body,
    decode_prefix,
    is_reachable,
)
from pdplane.transport.pull import Nonce, allow_tracer, can_pull, peer_credentials
from pdplane.transport.reports import TransportOptions
from pdplane.transport.unix_socket import address_of

_names = Names()

_Address: TypeAlias = tuple[Any, ...] | str  # of an internet socket, of a Unix socket


@attrs.frozen(eq=False)
class Dial:
    """How one line connects; `is_down` returns True once its owner gave it up."""

    wakeup: Wakeup
    is_down: Callable[[], bool]
    timeout_s: float

    def tcp(self, peer: Endpoint) -> socket.socket:
        """Try each address of the peer in turn, all within one deadline. Raises OSError."""
        deadline_s = time.monotonic() + self.timeout_s
        failure: OSError = OSError(f"{peer.host} has no address")
        found = _names.find(peer.host, peer.port, self.timeout_s, is_over=self.is_down)
        for family, kind, protocol, _, address in found:
            try:
                return self._connect(socket.socket(family, kind, protocol), address, str(peer), deadline_s)
            except OSError as error:
                failure = error
        raise failure

    def unix(self, path: str) -> socket.socket:
        """Connect to a receiver's Unix socket. Raises OSError."""
        candidate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return self._connect(candidate, address_of(path), path, time.monotonic() + self.timeout_s)

    def probe(self, peer: Endpoint, within_s: float) -> tuple[str, Endpoint]:
        """Connect and close again to see that somebody accepts there; return our address and its. Raises OSError."""
        with self.tcp(peer) as connected:
            here, there = connected.getsockname(), connected.getpeername()
            connected.shutdown(socket.SHUT_WR)
            if code := self._wait(connected, select.POLLIN, time.monotonic() + within_s):
                raise OSError(code, f"{peer} accepts and stays silent: {os.strerror(code)}")
            return str(here[0]), Endpoint(str(there[0]), int(there[1]))

    def _connect(self, candidate: socket.socket, address: _Address, name: str, deadline_s: float) -> socket.socket:
        try:
            candidate.settimeout(0)
            code = candidate.connect_ex(address)
            if code == errno.EINPROGRESS:
                code = self._wait(candidate, select.POLLOUT, deadline_s)
                code = code or candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        except OSError:
            candidate.close()
            raise
        if code:
            candidate.close()
            raise OSError(code, f"cannot connect to {name}: {os.strerror(code)}")
        return candidate

    def _wait(self, candidate: socket.socket, event: int, deadline_s: float) -> int:
        """Return 0 once the event came, or the number of the error that came first."""
        poll = select.poll()
        poll.register(candidate.fileno(), event)
        poll.register(self.wakeup.descriptor, select.POLLIN)
        while not self.is_down():
            left_s = deadline_s - time.monotonic()
            ready = dict(poll.poll(max(left_s, 0) * 1000))
            if candidate.fileno() in ready:
                return 0
            if left_s <= 0:
                return errno.ETIMEDOUT
            self.wakeup.clear()  # a submitted push; it waits in its queue
        return errno.ECONNABORTED


# ---- Connected stream sockets, TCP or Unix, with bounded waits
#
# Sockets block, but no call on them takes long: SO_RCVTIMEO and SO_SNDTIMEO bound each call, and longer waits
# are a `poll`, under which no lock is held. Another thread ends a wait by shutting the socket down; only the
# thread that uses a socket closes it, so a descriptor's number is never reused under a running call.


RECEIVE_SLICE_S = 0.02  # the longest that a receive may hold a room's lock while its sender stalls
SEND_SLICE_S = 0.25
LOCAL_BUFFER_BYTES = 256 << 10  # on one host larger ones leave the processor's cache and were measured slower
_SCRATCH_BYTES = 256 << 10
_DONT_WAIT = socket.MSG_DONTWAIT
ENDED = "the peer closed the connection"


class DataSocket:
    """A connected stream socket; used by one thread, stopped by any."""

    way = "tcp"

    def __init__(self, connected: socket.socket, buffer_bytes: int | None) -> None:
        self._socket = connected
        self._lock = threading.Lock()
        self._stopped: str | None = None
        self._closed = False
        self._poll = select.poll()
        self.descriptor = connected.fileno()
        self.credentials = peer_credentials(connected) if connected.family == socket.AF_UNIX else None
        _tune(connected, buffer_bytes)

    def handshake(self, deadline_s: float) -> None:
        """Do what comes before the greeting: nothing on a plain socket. Raises WireError or OSError."""

    @property
    def has_buffered(self) -> bool:
        """Whether bytes were taken from the socket that nobody has read, so that no `poll` shows them."""
        return False

    def check(self) -> None:
        """Raise ConnectionAbortedError once the link was stopped: bytes may still be queued behind a shutdown."""
        if self._stopped is not None:
            raise ConnectionAbortedError(self._stopped)

    def wait(self, event: int, deadline_s: float | None) -> None:
        """Wait for POLLIN or POLLOUT, or for an end, which the next call reports. Raises TimeoutError.

        A thread that is held up beyond the deadline waits as long again: the pause was its own, not the peer's.
        """
        self.check()
        self._poll.register(self.descriptor, event)
        if deadline_s is None:
            self._poll.poll()
        elif not self._poll.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            late_s = time.monotonic() - deadline_s
            if late_s < HELD_UP_S or not self._poll.poll(late_s * 1000):
                raise TimeoutError("the peer stalled")
        self.check()

    def read(self, view: memoryview, deadline_s: float) -> None:
        """Fill the view. Raises TimeoutError or ConnectionError."""
        while len(view):
            try:
                count = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            except BlockingIOError:
                self.wait(select.POLLIN, deadline_s)
                continue
            self.check()
            if not count:
                raise ConnectionResetError(ENDED)
            view = view[count:]
            if len(view) and time.monotonic() > deadline_s:  # byte by byte is no progress
                raise TimeoutError("the peer stalled")

    def read_bytes(self, count: int, deadline_s: float) -> bytearray:
        data = bytearray(count)
        self.read(memoryview(data), deadline_s)
        return data

    def read_greeting(self, deadline_s: float) -> tuple[GreetingKind, tuple[str, ...]]:
        """Read one greeting message. Raises WireError, TimeoutError or ConnectionError."""
        kind, length = decode_prefix(self.read_bytes(PREFIX_BYTES, deadline_s))
        return kind, decode_body(kind, self.read_bytes(length, deadline_s))

    def drain(self, count: int, within_s: float) -> None:
        """Read bytes and drop them; `within_s` bounds the time without progress."""
        scratch = memoryview(bytearray(min(count, _SCRATCH_BYTES)))
        while count:
            view = scratch[:count]
            self.read(view, time.monotonic() + within_s)
            count -= len(view)

    def read_available(self) -> bytes:
        """Return the bytes that are there now, at least one. Raises ConnectionError at the end of the stream."""
        try:
            data = self._socket.recv(4096, _DONT_WAIT)
        except BlockingIOError:
            return b""
        if not data:
            self.check()
            raise ConnectionResetError(ENDED)
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
        """Make one bounded call into the arena; return whether it was filled, False when nothing came in time."""
        try:
            moved, full = cursor.advance(iovec.receive_all, self.descriptor)
        except BlockingIOError:
            return False
        if not moved:
            self.check()
            raise ConnectionResetError(ENDED)
        return full

    def stop(self, cause: str) -> None:
        """End every wait and call on the link, now and later; from any thread."""
        with self._lock:
            if self._stopped is None:
                self._stopped = cause
            if not self._closed:
                with contextlib.suppress(OSError):
                    self._shut_down()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._socket.close()

    def _shut_down(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)


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
    recover_soon(connected)
    # A host that vanished is noticed within half a minute of rest; the options' names differ by system.
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPALIVE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _is_loopback(connected: socket.socket) -> bool:
    host = str(connected.getpeername()[0])
    return host.startswith(("127.", "::ffff:127.")) or host == "::1"


# ---- A sender's line over a stream socket: TCP first, and a shorter way when both ends share a host


logger = logging.getLogger(__name__)


Encrypt: TypeAlias = Callable[[socket.socket, int | None], DataSocket]
"""Makes the link over a connected socket and the size of its buffers. Raises OSError."""


class StreamLine:
    """A sender's line over TCP, or over the first of `ways` that the receiver agrees to."""

    def __init__(
        self,
        peer: Endpoint,
        greeting: SenderGreeting,
        arena: Arena,
        options: TransportOptions,
        *,
        ways: tuple[str, ...] = (),
        encrypt: Encrypt | None = None,
    ) -> None:
        """Set up; `encrypt` makes the socket of a TCP connection, whose bytes leave this host."""
        self._encrypt = encrypt
        self._peer, self._greeting, self._arena, self._options = peer, greeting, arena, options
        self._ways = ways
        self._lock = threading.Lock()
        self._down = False
        self._wakeup: Wakeup | None = None
        self._link: DataSocket | None = None
        self._poll = select.poll()
        self._session_number = 0
        self._pulled = False
        self._partial = bytearray()

    def open(self) -> Accepted:
        wakeup = Wakeup()
        with self._lock:
            self._wakeup = wakeup
        dial = Dial(wakeup, lambda: self._down, self._options.connect_timeout_s)
        link = self._use(dial.tcp(self._peer), self._encrypt)
        accepted = attrs.evolve(self._greet(link), way=link.way)
        self._session_number = accepted.session_number
        if UNIX in self._ways and is_reachable(accepted):
            accepted = self._shorten(dial, link, accepted)
        self._poll.register(self._connected().descriptor, select.POLLIN)
        self._poll.register(wakeup.descriptor, select.POLLIN)
        return accepted

    def send_segment(self, header: Header, part: Copies) -> None:
        if self._pulled:
            header = attrs.evolve(header, kind=FrameKind.PULL)
            frame = encode_segment(header, part.destination, part.length, part.source)
            self._connected().write(frame, time.monotonic() + self._options.send_timeout_s)
            return
        head = np.frombuffer(encode_segment(header, part.destination, part.length), np.uint8)
        base = np.uint64(self._arena.base)
        addresses = np.concatenate((np.array([head.ctypes.data], np.uint64), part.source + base))
        lengths = np.concatenate((np.array([head.nbytes], np.uint64), part.length))
        cursor = iovec.Cursor(addresses, lengths, self._options.call_bytes)
        self._connected().write_vector(cursor, self._options.send_timeout_s)

    def send_header(self, header: Header) -> None:
        self._connected().write(encode_header(header), time.monotonic() + self._options.send_timeout_s)

    def receive(self, timeout_s: float | None) -> list[Header]:
        link = self._connected()
        wait_ms = None if timeout_s is None else timeout_s * 1000
        ready = dict(self._poll.poll(0 if link.has_buffered else wait_ms))
        if ready.pop(link.descriptor, 0) or link.has_buffered:
            self._partial += link.read_available()
        if ready and self._wakeup is not None:
            self._wakeup.clear()
        frames = []
        while len(self._partial) >= HEADER_BYTES:
            frames.append(decode_header(self._partial[:HEADER_BYTES], self._session_number, FROM_RECEIVER))
            del self._partial[:HEADER_BYTES]
        return frames

    def wake(self) -> None:
        with self._lock:
            if self._wakeup is not None:
                self._wakeup.wake()

    def shutdown(self) -> None:
        with self._lock:
            self._down = True
            if self._wakeup is not None:
                self._wakeup.wake()
            if self._link is not None:
                self._link.stop("the sender was closed")

    def close(self) -> None:
        with self._lock:
            if self._link is not None:
                self._link.close()
            if self._wakeup is not None:
                self._wakeup.close()
            self._link = self._wakeup = None

    def _connected(self) -> DataSocket:
        if self._link is None:
            raise ConnectionAbortedError("the line is closed")
        return self._link

    def _use(self, connected: socket.socket, encrypt: Encrypt | None = None) -> DataSocket:
        """Make this the line's link, which `shutdown` stops; the caller closes the one that it replaced."""
        try:
            size = self._options.socket_buffer_bytes
            link = DataSocket(connected, size) if encrypt is None else encrypt(connected, size)
        except OSError:
            connected.close()
            raise
        with self._lock:
            before, self._link = self._link, link
            down = self._down
        if down:
            if before is not None:
                before.close()
            raise ConnectionAbortedError("the sender was closed")
        return link

    def _greet(self, link: DataSocket) -> Accepted:
        # As patient as for an acknowledgement: somebody accepted, and is busy if no answer comes.
        deadline_s = time.monotonic() + self._options.ack_timeout_s
        link.handshake(deadline_s)
        link.write(self._greeting.hello(), deadline_s)
        link.write(self._greeting.welcome(*link.read_greeting(deadline_s)), deadline_s)
        return self._greeting.accepted(*link.read_greeting(deadline_s))

    def _shorten(self, dial: Dial, link: DataSocket, accepted: Accepted) -> Accepted:
        """Change to the Unix socket, or stay on TCP if anything prevents it."""
        try:
            connected = dial.unix(accepted.unix_path)
        except OSError as error:
            logger.debug("no Unix socket to %s, staying on tcp: %s", self._peer, error)
            return accepted
        shorter = self._use(connected)
        try:
            way = self._attach(shorter, accepted)
        except (OSError, WireError) as error:
            logger.debug("no shorter way to %s, staying on tcp: %s", self._peer, error)
            shorter.close()
            with self._lock:
                self._link = link
                down = self._down
            if down:
                raise ConnectionAbortedError("the sender was closed") from None
            return accepted
        link.close()
        self._pulled = way == PULL
        return attrs.evolve(accepted, way=way)

    def _attach(self, link: DataSocket, accepted: Accepted) -> str:
        deadline_s = time.monotonic() + self._options.ack_timeout_s
        if link.credentials is not None and link.credentials.uid != os.getuid():
            raise PermissionError(f"the socket belongs to user {link.credentials.uid}")
        nonce = Nonce()
        wish = Attach(accepted.session_number, UNIX)
        if PULL in self._ways and can_pull() and link.credentials is not None:
            allow_tracer(link.credentials.pid)
            base, nbytes = self._arena.base, self._arena.nbytes
            wish = Attach(accepted.session_number, PULL, nonce.address, nonce.text, base, nbytes)
        link.write(wish.encode(), deadline_s)
        return decode_attached(*link.read_greeting(deadline_s), wish.way)
