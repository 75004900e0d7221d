"""Both ends of one loopback TCP connection."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from pdplane.workers.listener import BoundedSocket


@contextlib.contextmanager
def tcp_pair(stall_s: float = 5.0) -> Iterator[tuple[BoundedSocket, socket.socket]]:
    """A line and the raw socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname()[:2], 5)
        ours, _ = server.accept()
    line = BoundedSocket(ours, "peer", stall_s)
    with theirs:
        yield line, theirs
    line.close()
