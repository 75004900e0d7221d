"""A TCP proxy that cuts or stalls a connection after an exact number of bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Self

from pdplane.ids import Endpoint

_CHUNK = 64 << 10


class Proxy:
    """Forwards connections one after another; faults count the bytes that the client has sent.

    `cut_after`: both sides are closed after that many forwarded bytes, in the first `cuts` connections; the next one
    leads to `then`. `stall_after`: nothing more is read from the client until `release`. `mute`: the server's bytes
    are not forwarded after its greeting. `flip_at`: that byte from the client arrives changed.
    """

    def __init__(
        self,
        target: Endpoint,
        *,
        cut_after: int | None = None,
        cuts: int = 1,
        then: Endpoint | None = None,
        stall_after: int | None = None,
        mute: bool = False,
        flip_at: int | None = None,
    ) -> None:
        self._target, self._then, self._cuts = target, then, cuts
        self._cut_after, self._stall_after, self._mute, self._flip_at = cut_after, stall_after, mute, flip_at
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._closing = False
        self._sent = self._answers = 0
        self.stalled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        self._wake_writer.send(b"x")
        self._thread.join()
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.close()

    def release(self) -> None:
        """Forward again what was held back."""
        self._stall_after = None
        self._wake_writer.send(b"x")

    def cut(self) -> None:
        """Close both sides now."""
        self._cutting = True
        self._wake_writer.send(b"x")

    def _run(self) -> None:
        while not self._closing:
            ready, _, _ = select.select([self._listener, self._wake_reader], [], [])
            if self._wake_reader in ready:
                self._wake_reader.recv(1)
                continue
            client, _ = self._listener.accept()
            target = (self._target.host, self._target.port)
            with client, contextlib.suppress(OSError), socket.create_connection(target) as server:
                self._forward(client, server)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Until one side ends, the cut is due or the proxy closes."""
        self._sent = self._answers = 0
        self._cutting = False
        going = True
        while going and not self._closing:
            sources = [server, self._wake_reader] if self._held() else [client, server, self._wake_reader]
            ready, _, _ = select.select(sources, [], [])
            if self._wake_reader in ready:
                self._wake_reader.recv(1)
                going = not self._cutting
            if going and client in ready:
                going = self._up(client, server)
            if going and server in ready:
                going = self._down(client, server)

    def _held(self) -> bool:
        held = self._stall_after is not None and self._sent >= self._stall_after
        if held:
            self.stalled.set()
        return held

    def _up(self, client: socket.socket, server: socket.socket) -> bool:
        limits = [limit - self._sent for limit in (self._cut_after, self._stall_after) if limit is not None]
        data = client.recv(min([_CHUNK, *limits]))
        server.sendall(self._flipped(data))
        self._sent += len(data)
        if self._sent == self._cut_after:
            self._cuts -= 1
            self._cut_after = self._cut_after if self._cuts else None
            self._target = self._then or self._target
            return False
        return bool(data)

    def _flipped(self, data: bytes) -> bytes:
        at = -1 if self._flip_at is None else self._flip_at - self._sent
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] if 0 <= at < len(data) else data

    def _down(self, client: socket.socket, server: socket.socket) -> bool:
        data = server.recv(_CHUNK)
        if not self._mute or self._answers < 2:
            client.sendall(data)
        self._answers += 1
        return bool(data)
