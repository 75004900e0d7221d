"""The receiving half of a connection, whatever moves its bytes: pushes that land, and who may send them."""

from __future__ import annotations

import threading
from typing import Protocol

import attrs

from pdplane.errors import WireError
from pdplane.kv.copies import U64
from pdplane.transport.fence import Fence, Grant, Refusal, Write, Writer
from pdplane.transport.framing import Header, Kind
from pdplane.transport.pushes import Key
from pdplane.transport.reports import Landed, OnReport

MAX_OPEN_PUSHES = 4096


@attrs.define
class _OpenPush:
    refusal: Refusal | None = None
    nbytes: int = 0


class Landing:
    """The pushes of one writer's connection; used by that connection's thread only."""

    def __init__(self, fence: Fence, writer: Writer, report: OnReport) -> None:
        self._fence, self._writer, self._report = fence, writer, report
        self._open: dict[Key, _OpenPush] = {}
        self._grant: Grant | None = None

    def begin(self, header: Header, offsets: U64, lengths: U64) -> Grant | None:
        """Leave to store a segment's bytes; None when they must be drained: refused, or landed before."""
        push = self._push(header)
        write = Write(self._writer, header.room, header.generation, header.segment, offsets, lengths, header.nbytes)
        admission = self._fence.admit(write)
        if isinstance(admission, Refusal):
            self._grant = None
            push.refusal = push.refusal or admission
            return None
        self._grant = admission
        return None if admission.repeated else admission

    def end(self, header: Header) -> Header | None:
        """Count the segment whose bytes are all read; the acknowledgement to send after a push's last one."""
        push = self._push(header)
        landed = self._grant.finish() if self._grant else None
        if landed is not None:
            push.nbytes += header.nbytes
        elif push.refusal is None:
            push.refusal = Refusal.CLOSED
        self._grant = None
        if not header.last:
            return None
        del self._open[_key(header)]
        if landed is not None and push.refusal is None:
            self._report(Landed(header.room, header.generation, self._writer.prefill_rank, landed))
        status = push.refusal.value if push.refusal else 0
        return attrs.evolve(header, kind=Kind.ACK, count=status, nbytes=push.nbytes)

    def abandon(self, header: Header) -> None:
        """Forget a push that its sender gave up."""
        self._open.pop(_key(header), None)

    def _push(self, header: Header) -> _OpenPush:
        key = _key(header)
        if key not in self._open and len(self._open) >= MAX_OPEN_PUSHES:
            raise WireError("push", f"more than {MAX_OPEN_PUSHES} pushes are open on one connection")
        return self._open.setdefault(key, _OpenPush())


def _key(header: Header) -> Key:
    return header.room, header.generation, header.push


class Endable(Protocol):
    """A writer's connection as the table sees it."""

    def end(self, cause: str) -> None:
        """End the connection and return when nothing more lands through it. Raises TimeoutError."""


class Writers:
    """The connection of each writer. A new one of the same writer ends the old one before it may write."""

    def __init__(self) -> None:
        self._taking = threading.Lock()  # held while an old connection ends
        self._lock = threading.Lock()
        self._connections: dict[Writer, Endable] = {}

    def enter(self, writer: Writer, connection: Endable) -> None:
        """Make this the writer's one connection. Raises TimeoutError when the old one does not end."""
        with self._taking:
            with self._lock:
                old = self._connections.get(writer)
            if old is not None:
                old.end("replaced by a new connection of the same writer")
            with self._lock:
                self._connections[writer] = connection

    def leave(self, writer: Writer, connection: Endable) -> None:
        """Forget the connection unless another took its place."""
        with self._lock:
            if self._connections.get(writer) is connection:
                del self._connections[writer]
