"""A sender's line over a stream socket: TCP first, and a shorter way when both ends share a host."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time

import attrs
import numpy as np

from pdplane.errors import WireError
from pdplane.ids import Endpoint
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.transport import iovec
from pdplane.transport.dial import Dial
from pdplane.transport.framing import (
    FROM_RECEIVER,
    HEADER_BYTES,
    Header,
    Kind,
    decode_header,
    encode_header,
    encode_segment,
)
from pdplane.transport.greeting import Accepted, SenderGreeting
from pdplane.transport.options import TransportOptions
from pdplane.transport.pull import Nonce, allow_tracer, can_pull
from pdplane.transport.shortcut import PULL, UNIX, Attach, decode_attached, is_reachable
from pdplane.transport.stream import Link, Wakeup

logger = logging.getLogger(__name__)


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
    ) -> None:
        self._peer, self._greeting, self._arena, self._options = peer, greeting, arena, options
        self._ways = ways
        self._lock = threading.Lock()
        self._down = False
        self._wakeup: Wakeup | None = None
        self._link: Link | None = None
        self._poll = select.poll()
        self._session_number = 0
        self._pulled = False
        self._partial = bytearray()

    def open(self) -> Accepted:
        wakeup = Wakeup()
        with self._lock:
            self._wakeup = wakeup
        dial = Dial(wakeup, lambda: self._down, self._options.connect_timeout_s)
        link = self._use(dial.tcp(self._peer))
        accepted = self._greet(link)
        self._session_number = accepted.session_number
        if UNIX in self._ways and is_reachable(accepted):
            accepted = self._shorten(dial, link, accepted)
        self._poll.register(self._connected().descriptor, select.POLLIN)
        self._poll.register(wakeup.descriptor, select.POLLIN)
        return accepted

    def send_segment(self, header: Header, part: Copies) -> None:
        if self._pulled:
            header = attrs.evolve(header, kind=Kind.PULL)
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
        ready = dict(self._poll.poll(None if timeout_s is None else timeout_s * 1000))
        if ready.pop(link.descriptor, 0):
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

    def _connected(self) -> Link:
        if self._link is None:
            raise ConnectionAbortedError("the line is closed")
        return self._link

    def _use(self, connected: socket.socket) -> Link:
        """Make this the line's link, which `shutdown` stops; whoever replaced one closes it."""
        try:
            link = Link(connected, self._options.socket_buffer_bytes)
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

    def _greet(self, link: Link) -> Accepted:
        deadline_s = time.monotonic() + self._options.greeting_timeout_s
        link.write(self._greeting.hello(), deadline_s)
        link.write(self._greeting.welcome(*link.read_greeting(deadline_s)), deadline_s)
        return self._greeting.accepted(*link.read_greeting(deadline_s))

    def _shorten(self, dial: Dial, link: Link, accepted: Accepted) -> Accepted:
        """Go over to the Unix socket; whatever is in the way of that leaves us on TCP."""
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

    def _attach(self, link: Link, accepted: Accepted) -> str:
        deadline_s = time.monotonic() + self._options.greeting_timeout_s
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
