"""Receivers to compare with: plain TCP into one contiguous place, and ZeroMQ with a frame a block."""

from __future__ import annotations

import socket
import threading
from typing import Self

import numpy as np
import zmq

from pdplane.kv.arena import Arena

LOCAL_BUFFER_BYTES = 256 << 10
RAW_BUFFERS = {"raw": None, "tuned": LOCAL_BUFFER_BYTES}
"""Socket buffers of plain TCP: as the kernel chooses them, or as small as ours on one host, which is faster here."""

ACKNOWLEDGED = b"k"
LAST = b"last"
MORE = b"more"


class RawSink:
    """One connection: a length of 8 bytes, that many bytes into the arena's start, one byte back; again."""

    def __init__(self, arena: Arena, buffer_bytes: int | None) -> None:
        self._arena, self._buffer_bytes = arena, buffer_bytes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._connected: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="raw", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        if self._connected is not None:
            self._connected.close()

    def _run(self) -> None:
        connected, _ = self._listener.accept()
        self._connected = connected
        if self._buffer_bytes is not None:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        with connected:
            while head := connected.recv(8, socket.MSG_WAITALL):
                view = memoryview(self._arena.bytes.data)[: int.from_bytes(head, "little")]
                while len(view):
                    view = view[connected.recv_into(view, len(view), socket.MSG_WAITALL) :]
                connected.sendall(ACKNOWLEDGED)


class ZmqSink:
    """A ROUTER: messages of `more` or `last`, a table of offsets, and one frame a block."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.RCVHWM, 16)
        self._router.setsockopt(zmq.RCVBUF, LOCAL_BUFFER_BYTES)
        self.port: int = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._thread = threading.Thread(target=self._run, name="zmq", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._context.term()  # ends the thread's wait; returns when it has closed its socket
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                identity, flag, table, *blocks = self._router.recv_multipart(copy=False)
                self._store(np.frombuffer(table.buffer, np.uint64), blocks)
                if flag.bytes == LAST:
                    self._router.send_multipart([identity.bytes, ACKNOWLEDGED])
        except zmq.ContextTerminated:
            return
        finally:
            self._router.close(linger=0)

    def _store(self, offsets: np.ndarray, blocks: list[zmq.Frame]) -> None:
        target = memoryview(self._arena.bytes.data)
        for offset, block in zip(offsets.tolist(), blocks, strict=True):
            target[offset : offset + len(block)] = block.buffer
