"""The receiving process of `pdplane bench transport`: every kind of receiver over one arena."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import attrs
import numpy as np
import zmq

from pdplane.bench.load import Decoding, spinning
from pdplane.ids import Endpoint, Generation, Room, new_life
from pdplane.kv.arena import Arena
from pdplane.net import JsonLines
from pdplane.security import Tls
from pdplane.transport.fence import Fence
from pdplane.transport.registry import Receiver, open_receiver
from pdplane.transport.reports import Report, TransportOptions
from pdplane.transport.vector import take_turns_often

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
    """A ROUTER that takes messages of `more` or `last`, a table of offsets, and one frame a block."""

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


# ---- The process
#
# It exchanges JSON lines over its standard streams: the first line out says where everything listens, then each command
# gets one answer. It ends with its standard input.


HOST = "127.0.0.1"


@attrs.frozen
class FarOptions:
    """What the receiving process is started with; JSON between the processes."""

    nbytes: int
    mlx_arena: bool
    decodes: bool
    spins: bool
    peers: tuple[str, ...]
    transport: dict[str, Any]
    tls: tuple[str, ...] | None

    @classmethod
    def read(cls, text: str) -> FarOptions:
        fields = json.loads(text)
        return cls(**{**fields, "peers": tuple(fields["peers"])})


class FarEnd:
    """The arena, its receivers, and the counts that the sending process asks for."""

    def __init__(self, options: FarOptions, stack: ExitStack) -> None:
        decoding = stack.enter_context(Decoding(options.nbytes)) if options.mlx_arena or options.decodes else None
        self._arena = decoding.arena if decoding else Arena.zeros(options.nbytes)
        if decoding and options.decodes:
            decoding.begin()
        if options.spins:
            stack.enter_context(spinning())
        self._fence = Fence(self._arena)
        settings = TransportOptions(**options.transport)
        self.addresses: dict[str, Any] = {"pdplane": self._receive("auto", settings, stack), "base": self._arena.base}
        if options.tls is not None:
            encrypted = attrs.evolve(settings, tls=Tls(*options.tls))
            self.addresses["tls"] = self._receive("tcp", encrypted, stack)
        if "mooncake" in options.peers:
            self.addresses["mooncake"] = self._receive("mooncake", settings, stack)
        for name in RAW_BUFFERS.keys() & options.peers:
            self.addresses[name] = stack.enter_context(RawSink(self._arena, RAW_BUFFERS[name])).port
        if "zmq" in options.peers:
            self.addresses["zmq"] = stack.enter_context(ZmqSink(self._arena)).port

    def _receive(self, scheme: str, settings: TransportOptions, stack: ExitStack) -> str:
        receiver: Receiver = open_receiver(
            scheme,
            listen=Endpoint(HOST, 0),
            decode_life=new_life(),
            fence=self._fence,
            report=_ignore,
            options=settings,
        )
        stack.callback(receiver.close)
        return receiver.start()

    def answer(self, command: dict[str, Any]) -> Any:  # noqa: ANN401 - whatever JSON carries
        return _COMMANDS[command["do"]](self, command)

    def open(self, command: dict[str, Any]) -> None:
        """Open the whole arena to a room."""
        start, length = np.zeros(1, np.uint64), np.array([self._arena.nbytes], np.uint64)
        self._fence.open(Room(command["room"]), Generation(1), start, length, None)

    def close(self, command: dict[str, Any]) -> None:
        self._fence.close(Room(command["room"]), Generation(1))

    def cpu(self, _command: dict[str, Any]) -> float:
        """Return processor seconds of this process until now."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def clear(self, _command: dict[str, Any]) -> None:
        self._arena.bytes[:] = 0

    def differing(self, command: dict[str, Any]) -> int:
        """Return how many of the arena's first bytes differ from what a full push leaves there."""
        block, count = command["block"], command["nbytes"] // command["block"]
        step = 2 if command["sparse"] else 1
        wanted = pattern(count * step * block, block).reshape(-1, step, block)
        wanted[:, 1:] = 0  # between sparse blocks nothing lands
        return int((self._arena.bytes[: wanted.size] != wanted.ravel()).sum())


_COMMANDS: dict[str, Callable[[FarEnd, dict[str, Any]], Any]] = {
    "open": FarEnd.open,
    "close": FarEnd.close,
    "cpu": FarEnd.cpu,
    "clear": FarEnd.clear,
    "differing": FarEnd.differing,
}


def pattern(nbytes: int, block: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return what the destination holds after a full push: each block's bytes show its place, 1 to 251."""
    places = np.arange(nbytes // block, dtype=np.uint64) * np.uint64(7) % np.uint64(251) + np.uint64(1)
    return np.repeat(places.astype(np.uint8), block)


def _ignore(_report: Report) -> None:
    """Ignore a report: the sending side gets its acknowledgements, which is enough here."""


def main() -> int:
    """Serve one measurement."""
    take_turns_often()
    with ExitStack() as stack:
        far = FarEnd(FarOptions.read(sys.argv[1]), stack)
        lines = JsonLines(sys.stdin, sys.stdout)
        lines.send(far.addresses)
        with contextlib.suppress(EOFError):
            while True:
                command: Any = lines.receive()
                lines.send(far.answer(command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
