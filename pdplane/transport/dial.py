"""Connecting without getting stuck: every wait ends by a deadline, a wake-up or the owner's close."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import attrs

from pdplane.ids import Endpoint
from pdplane.transport.door import address_of
from pdplane.transport.stream import Wakeup

_Address: TypeAlias = tuple[Any, ...] | str  # of an internet socket, of a Unix socket


@attrs.frozen(eq=False)
class Dial:
    """How one line connects; `is_down` says that its owner gave it up."""

    wakeup: Wakeup
    is_down: Callable[[], bool]
    timeout_s: float

    def tcp(self, peer: Endpoint) -> socket.socket:
        """Try each address of the peer in turn, all within one deadline. Raises OSError."""
        deadline_s = time.monotonic() + self.timeout_s
        failure: OSError = OSError(f"{peer.host} has no address")
        for family, kind, protocol, _, address in _addresses(peer):
            try:
                return self._connect(socket.socket(family, kind, protocol), address, str(peer), deadline_s)
            except OSError as error:
                failure = error
        raise failure

    def unix(self, path: str) -> socket.socket:
        """Connect to a receiver's Unix socket. Raises OSError."""
        candidate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        return self._connect(candidate, address_of(path), path, time.monotonic() + self.timeout_s)

    def knock(self, peer: Endpoint, within_s: float) -> str:
        """Begin a conversation, end it, wait until they do: somebody serves the address. Gives ours. Raises OSError."""
        with self.tcp(peer) as connected:
            connected.shutdown(socket.SHUT_WR)
            if code := self._wait(connected, select.POLLIN, time.monotonic() + within_s):
                raise OSError(code, f"{peer} accepts and stays silent: {os.strerror(code)}")
            return str(connected.getsockname()[0])

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
        """0 once the event came, or the number of the error that came first."""
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
            self.wakeup.clear()  # a push was submitted meanwhile; it waits in its queue
        return errno.ECONNABORTED


def _addresses(peer: Endpoint) -> list[tuple[Any, ...]]:
    try:
        return list(socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM))
    except ValueError:  # a text that no name can be, such as an empty label
        raise OSError(f"{peer.host!r} is no host name") from None
