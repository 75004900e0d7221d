"""A peer that speaks ZMTP by itself, so that it may send what no ZeroMQ library sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

from pdplane.ids import Endpoint
from tests.waiting import PATIENCE_S

MORE = 1


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return one frame of a message."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | 2]) + len(body).to_bytes(8, "big") + body


class Speaker:
    """One connection after its handshake; `with` closes it."""

    def __init__(self, connected: socket.socket, kind: bytes) -> None:
        self.socket = connected
        self.socket.settimeout(PATIENCE_S)
        self.sent = 0
        self._thread: threading.Thread | None = None
        greeting = b"\xff" + bytes(7) + b"\1\x7f" + b"\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\5READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        self.socket.sendall(greeting + frame(ready, 4))
        answer = b""
        while b"READY" not in answer:  # what comes before that is taken for a part of the handshake
            more = self.socket.recv(4096)
            if not more:
                raise ConnectionResetError("ended in the handshake")
            answer += more

    @classmethod
    def connect(cls, endpoint: Endpoint, kind: bytes = b"DEALER") -> Self:
        return cls(socket.create_connection((endpoint.host, endpoint.port)), kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)
        self.sent += len(data)

    def pour(self, one: bytes) -> None:
        """Send the same bytes again and again, on a thread, until the connection is ended."""
        block = one * max(1, (1 << 16) // len(one))

        def pouring() -> None:
            with contextlib.suppress(OSError):
                while True:
                    self.send(block)

        self._thread = threading.Thread(target=pouring)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """The other end has closed the connection; only while nothing is poured, or afterwards."""
        if self._thread is not None:
            return not self._thread.is_alive()
        self.socket.settimeout(0.01)
        try:
            while self.socket.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True
