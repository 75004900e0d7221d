"""What is measured, on the sending side: each moves the same bytes and returns when they have arrived."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import zmq
from zmq.utils.garbage import gc

from pdplane.bench.far_end import ACKNOWLEDGED, LAST, LOCAL_BUFFER_BYTES, MORE, RAW_BUFFERS
from pdplane.errors import TransferError
from pdplane.ids import Endpoint, Generation, Rank, Room, SessionId, new_life
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.messages import Push
from pdplane.transport.registry import close_shared, open_sender
from pdplane.transport.reports import Connected, Pushed, PushFailed, Report, TransportOptions

PATIENCE_S = 120.0
_FRAMES = 1024  # blocks of one ZeroMQ message
_rooms = itertools.count(1)


class Contender(Protocol):
    """One way to move bytes. `prepare` and `settle` are not measured, `move` is."""

    def prepare(self) -> None: ...

    def move(self, copies: Copies) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


class PlaneContender:
    """A transport of pdplane: a push through the fence, acknowledged."""

    def __init__(
        self,
        scheme: str,
        session: str,
        arena: Arena,
        options: TransportOptions,
        ask: Callable[..., Any],
        target_base: int,
    ) -> None:
        self._ask, self._fenced = ask, scheme != "mooncake"
        self._close_shared = partial(close_shared, scheme, arena)
        self._session = session
        self._room = 0
        self._changed = threading.Condition()
        self._ends: list[Report] = []
        self.way = ""
        self._sender = open_sender(
            scheme,
            peer=Endpoint.parse(session),
            session=SessionId(session),
            prefill_rank=Rank(next(_rooms)),  # several contenders are open at one time, none may replace another
            prefill_life=new_life(),
            arena=arena,
            report=self._hear,
            options=options,
            target_base=target_base,
        )
        self._sender.start()

    def prepare(self) -> None:
        self._room = next(_rooms)
        if self._fenced:
            self._ask("open", room=self._room)

    def move(self, copies: Copies) -> None:
        self._sender.submit(Push(Room(self._room), Generation(1), 0, copies))
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ends), PATIENCE_S)
            ended = self._ends.pop() if self._ends else None
        if not isinstance(ended, Pushed):
            cause = ended.cause if isinstance(ended, PushFailed) else "no end came"
            raise TransferError(self._session, 0, copies.nbytes, cause)

    def settle(self) -> None:
        if self._fenced:
            self._ask("close", room=self._room)

    def close(self) -> None:
        self._sender.close()
        self._close_shared()

    def _hear(self, report: Report) -> None:
        if isinstance(report, Connected):
            self.way = report.way
        elif isinstance(report, Pushed | PushFailed):
            with self._changed:
                self._ends.append(report)
                self._changed.notify()


class Raw:
    """As many bytes from one contiguous place to another, by plain `sendall` and `recv_into`."""

    def __init__(self, port: int, arena: Arena, buffer_bytes: int | None) -> None:
        # Two buffers that begin at the same place in their pages are its slowest pair, so this one begins elsewhere.
        own = Arena.zeros(arena.nbytes + 64).bytes[16 : 16 + arena.nbytes]
        own[:] = arena.bytes
        self._view = memoryview(own.data)
        self._socket = socket.create_connection(("127.0.0.1", port))
        if buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Blocking, so that `sendall` is one call after another; a timeout would make it poll between them.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(PATIENCE_S), 0))

    def prepare(self) -> None:
        """Do nothing: there is nothing to open."""

    def move(self, copies: Copies) -> None:
        count = copies.nbytes
        self._socket.sendall(count.to_bytes(8, "little"))
        self._socket.sendall(self._view[:count])
        if self._socket.recv(1) != ACKNOWLEDGED:
            raise TransferError("raw", 0, count, "no acknowledgement")

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def close(self) -> None:
        self._socket.close()


class Zmq:
    """DEALER to ROUTER, a frame a block, sent and received without copies where libzmq can."""

    def __init__(self, port: int, arena: Arena) -> None:
        self._arena = arena
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.SNDHWM, 16)
        self._dealer.setsockopt(zmq.SNDBUF, LOCAL_BUFFER_BYTES)
        self._dealer.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self._dealer.connect(f"tcp://127.0.0.1:{port}")

    def prepare(self) -> None:
        """Do nothing: there is nothing to open."""

    def move(self, copies: Copies) -> None:
        view = memoryview(self._arena.bytes.data)
        starts, lengths = copies.source.tolist(), copies.length.tolist()
        for first in range(0, len(starts), _FRAMES):
            rows = slice(first, first + _FRAMES)
            blocks = [view[start : start + count] for start, count in zip(starts[rows], lengths[rows], strict=True)]
            flag = LAST if first + _FRAMES >= len(starts) else MORE
            self._dealer.send_multipart([flag, copies.destination[rows].tobytes(), *blocks], copy=False)
        self._dealer.recv_multipart()

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def close(self) -> None:
        self._context.destroy(linger=0)
        gc.stop()  # pyzmq's thread that waits for frames sent without a copy


class Memcpy:
    """One thread copies as many contiguous bytes inside this process."""

    def __init__(self, arena: Arena) -> None:
        self._source, self._target = arena.bytes, np.ones_like(arena.bytes)

    def prepare(self) -> None:
        """Do nothing: there is nothing to open."""

    def move(self, copies: Copies) -> None:
        count = copies.nbytes
        np.copyto(self._target[:count], self._source[:count])

    def settle(self) -> None:
        """Do nothing: there is nothing to wait for."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


def open_contenders(
    names: list[str],
    addresses: Mapping[str, Any],
    arena: Arena,
    options: Mapping[str, TransportOptions],
    ask: Callable[..., Any],
) -> dict[str, Contender]:
    """Return the contenders to measure, by name, in the order given."""
    made: dict[str, Contender] = {}
    for name in names:
        if name in RAW_BUFFERS:
            made[name] = Raw(addresses[name], arena, RAW_BUFFERS[name])
        elif name == "zmq":
            made[name] = Zmq(addresses["zmq"], arena)
        elif name == "memcpy":
            made[name] = Memcpy(arena)
        else:
            session = addresses[name if name in ("mooncake", "tls") else "pdplane"]
            scheme = "tcp" if name == "tls" else name
            made[name] = PlaneContender(scheme, session, arena, options[name], ask, addresses["base"])
    return made
