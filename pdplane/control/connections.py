"""The TCP connections behind the ZeroMQ sockets of one reactor: how many there are, and what they sent that is unread.

libzmq bounds a frame and counts whole messages, so a message that never ends grows without a bound. Its monitor names
each connection's descriptor, and the kernel says how many bytes came through it: what was not received as a message
soon after must be a part of one. A connection with too much of that is shut down, and libzmq drops what it kept. Every
byte goes the way that it went before, so a message costs no time for this.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Never

import attrs
import zmq

from pdplane.net import Complaints, first_to_go, plain, recover_soon, share_of_descriptors

logger = logging.getLogger(__name__)

MAX_FRAMES = 9  # an identity, and the eight frames of a registration
MAX_PARTIAL_BYTES = 5 << 19  # of one connection; the longest message is an offer with a manifest of 2 MiB
MAX_PARTIAL_TOTAL = 8 << 20  # of all; empty frames take 32 times as much memory here as on the way
MAX_UNREAD_TOTAL = 128 << 20  # of all, whole messages too: these wait for a busy reactor
MAX_CONNECTIONS = 4096
_SHARE = 0.25  # of the descriptors; this listener is one of several
_SMALL = 64 << 10
_DISCARD = 1000  # frames of one message at one time
_FRAME_COST = 64  # more than what stands around a frame on the way, CURVE's bytes included
_TEND_S, _TEND_SOON_S = 0.1, 0.02  # the latter while something is unread
_TEND_EACH_S = 0.0002  # a look at a connection takes some microseconds
_BAN_S = 1.0  # libzmq asks new connections first, so a stream of such ones would keep all others waiting
_SRCFD, _NOW = int(zmq.SRCFD), int(zmq.NOBLOCK)  # numbers: pyzmq is slower with its own flags
_AT_ONCE = struct.pack("ii", 1, 0)  # closing resets the connection, so that the other end need not wait
_MADE = int(zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED)

# The socket option that tells a TCP connection's counts, its size, and where the number of received bytes stands.
_COUNTS = {"linux": (11, 136, 128), "darwin": (0x106, 96, 88)}.get(sys.platform)


@attrs.define(eq=False)
class _Link:
    """One connection. libzmq owns the descriptor and closes it."""

    descriptor: int
    peer: tuple[object, ...]
    address: str
    heard: float
    taken: int = 0  # bytes of the messages that were received from it
    unread: int = 0
    partial: int = 0  # of `unread`, what was no whole message at the look before
    mark: tuple[int, int, int] = (-1, 0, 0)  # at the look before: `taken`, `unread`, messages of the socket
    ended: bool = False


class Comings:
    """What libzmq tells of a socket's connections. A source of the reactor that causes no events."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._intake.monitor

    def receive(self) -> list[Never]:
        self._intake.hear_one()
        return []


class Intake:
    """One ZeroMQ socket and its connections; for the thread that owns the socket."""

    def __init__(
        self, name: str, owned: zmq.Socket[bytes], table: Connections, told: Callable[[int, int], None] | None = None
    ) -> None:
        """Begin to watch, before the socket binds or connects; `told` gets the number and value of monitor events."""
        self.name, self.socket, self._table, self._told = name, owned, table, told
        self.links: dict[int, _Link] = {}
        self.messages = 0
        self.address = ""
        """Where the last message came from."""
        self._discarding = False
        self.monitor: zmq.Socket[bytes] = owned.get_monitor_socket(zmq.EVENT_ALL)

    def receive(self) -> list[bytes]:
        """Return the frames of the next message, none of one that has too many. Raises zmq.Again without a message."""
        frame = self.socket.recv(_NOW, copy=False)
        if self._discarding:
            self._discard(frame)
            self.hear()
            return []
        descriptor, frames = int(frame.get(_SRCFD)), [frame.bytes]
        nbytes = len(frames[0])
        while frame.more:
            frame = self.socket.recv(_NOW, copy=False)
            if len(frames) == MAX_FRAMES:
                self._table.rejected["too_many_frames"] += 1
                if self._discard(frame):
                    self._ban(plain(str(frame.get("Peer-Address"))), f"a message has more than {_DISCARD} frames")
                    self.end(descriptor, "its message has too many frames")
                return []
            frames.append(frame.bytes)
            nbytes += len(frames[-1])
        self._count(descriptor, nbytes + _FRAME_COST * len(frames))
        return frames

    def end(self, descriptor: int, why: str) -> None:
        """Shut a connection down, so that libzmq closes it and drops what it kept of it."""
        link = self._link(descriptor)
        if link is None or link.ended:
            return
        link.ended = True
        self._table.rejected["connections_ended"] += 1
        self._table.complaints.tell(
            (self.name, link.address), "%s: a connection of %s is ended: %s", self.name, link.address, why
        )
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
            if connection.getpeername() == link.peer:  # the number may be another connection's by now
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                connection.shutdown(socket.SHUT_RDWR)

    def hear(self) -> None:
        """Take what libzmq tells of the connections."""
        with contextlib.suppress(zmq.Again):
            while True:
                self.hear_one()

    def hear_one(self) -> None:
        """Take one event. Raises zmq.Again without one."""
        event, value = struct.unpack("=HI", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
        if event & _MADE:
            self._made(value, accepted=event == zmq.EVENT_ACCEPTED)
        elif event == zmq.EVENT_DISCONNECTED:
            self.links.pop(value, None)
        if self._told is not None:
            self._told(event, value)

    def look(self) -> None:
        """Measure what each connection has sent and nobody has received, and how much of that is no whole message."""
        self.hear()
        ready = self.socket.getsockopt(zmq.EVENTS)
        emptied = not (isinstance(ready, int) and ready & zmq.POLLIN)
        for link in self.links.values():
            link.unread = self._unread(link)
            taken, unread, messages = link.mark
            if link.unread < _SMALL:
                link.partial, link.mark = 0, (-1, 0, 0)
            elif taken != link.taken:
                link.partial, link.mark = 0, (link.taken, link.unread, self.messages)
            elif emptied or self.messages - messages > len(self.links):  # it had a turn and no whole message
                link.partial, link.mark = unread, (link.taken, link.unread, self.messages)

    def close(self) -> None:
        """Close the socket."""
        self._table.forget(self)
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()

    def _discard(self, frame: zmq.Frame) -> bool:
        """Drop a message's frames, but only so many at one time; return whether there are more."""
        left = _DISCARD
        while frame.more and left:
            frame = self.socket.recv(_NOW, copy=False)
            left -= 1
        self._discarding = bool(frame.more)
        return self._discarding

    def _ban(self, address: str, why: str) -> None:
        """Let an address make no new connection for a moment, and end those that said nothing yet."""
        self._table.banned[address] = time.monotonic() + _BAN_S
        for link in [link for link in self.links.values() if link.address == address and not link.taken]:
            self.end(link.descriptor, why)

    def _link(self, descriptor: int) -> _Link | None:
        if descriptor not in self.links:
            self.hear()
        return self.links.get(descriptor)

    def _count(self, descriptor: int, nbytes: int) -> None:
        self.messages += 1
        if (link := self._link(descriptor)) is not None:
            self.address = link.address
            link.taken += nbytes
            link.heard = time.monotonic()

    def _made(self, descriptor: int, *, accepted: bool) -> None:
        now = time.monotonic()
        with contextlib.suppress(OSError), _borrowed(descriptor) as connection:  # it may be over already
            peer = connection.getpeername()
            recover_soon(connection)
            link = self.links[descriptor] = _Link(descriptor, peer, plain(str(peer[0])), now)
            if accepted and self._table.banned.get(link.address, 0.0) > now:
                self.end(descriptor, "another one of this address was ended a moment ago")
            else:
                self._table.make_place(self)

    def _unread(self, link: _Link) -> int:
        try:
            with _borrowed(link.descriptor) as connection:
                received = _received(connection)
                unread = received - link.taken
                if unread < 0:  # what stands around the frames was taken for more than it is
                    link.taken = received
                return max(0, unread - _in_kernel(connection)) if unread >= _SMALL else 0
        except OSError:  # it is being closed
            return 0


class Connections:
    """Every watched socket of one reactor. `tend` is to be called several times a second."""

    def __init__(self, rejected: Counter[str]) -> None:
        self.rejected, self.complaints = rejected, Complaints(logger)
        self._intakes: list[Intake] = []
        self.banned: dict[str, float] = {}
        self._most = share_of_descriptors(_SHARE, MAX_CONNECTIONS)

    def watch(self, name: str, owned: zmq.Socket[bytes], told: Callable[[int, int], None] | None = None) -> Intake:
        """Return the intake of a socket that has neither bound nor connected yet."""
        intake = Intake(name, owned, self, told)
        self._intakes.append(intake)
        return intake

    def forget(self, intake: Intake) -> None:
        self._intakes.remove(intake)

    def tend(self, now: float) -> float:
        """End the connections that went too far; return when the next look is due."""
        self.banned = {address: until for address, until in self.banned.items() if until > now}
        for intake in self._intakes:
            intake.look()
        links = [(link, intake) for intake in self._intakes for link in intake.links.values() if not link.ended]
        self._bound(links, lambda link: link.partial, MAX_PARTIAL_BYTES, MAX_PARTIAL_TOTAL, "a message does not end")
        self._bound(links, lambda link: link.unread, MAX_UNREAD_TOTAL, MAX_UNREAD_TOTAL, "too much of it is unread")
        pause_s = _TEND_SOON_S if any(link.unread for link, _ in links) else _TEND_S
        return now + pause_s + _TEND_EACH_S * len(links)

    def make_place(self, intake: Intake) -> None:
        """End a connection if there are too many: of the address with the most, one that said nothing."""
        links = [link for link in intake.links.values() if not link.ended]
        if len(links) > self._most:
            goes = first_to_go(links, lambda link: link.address, lambda link: (link.taken > 0, link.heard))
            intake.end(goes.descriptor, f"more than {self._most} connections")

    @staticmethod
    def _bound(
        links: list[tuple[_Link, Intake]], nbytes: Callable[[_Link], int], most: int, total: int, why: str
    ) -> None:
        left = sum(nbytes(link) for link, _ in links)
        if left <= min(most, total):
            return
        for link, intake in sorted(links, key=lambda pair: nbytes(pair[0]), reverse=True):
            if nbytes(link) <= most and left <= total:
                return
            left -= nbytes(link)
            intake.end(link.descriptor, why)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Use a descriptor of libzmq's as a socket, without a look at it and without closing it."""
    borrowed = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _received(connection: socket.socket) -> int:
    """Return how many bytes a TCP connection has received; 0 where the system does not tell."""
    if _COUNTS is None:
        return 0
    option, nbytes, offset = _COUNTS
    counts = connection.getsockopt(socket.IPPROTO_TCP, option, nbytes)
    return int.from_bytes(counts[offset : offset + 8], sys.byteorder) if len(counts) >= offset + 8 else 0


def _in_kernel(connection: socket.socket) -> int:
    """Return how many received bytes nobody has read from the kernel yet."""
    count = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.FIONREAD, count)
    return count[0]
