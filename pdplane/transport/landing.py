"""The receiving half of a connection, whatever moves its bytes: pushes that land, and who may send them."""

from __future__ import annotations

import threading
from typing import Protocol

import attrs

from pdplane.errors import WireError
from pdplane.kv.copies import U64
from pdplane.transport.checksum import can_check, checksum_of
from pdplane.transport.fence import Admission, Fence, Grant, Refusal, Write, Writer
from pdplane.transport.framing import Header, Kind
from pdplane.transport.greeting import Bundle
from pdplane.transport.pushes import Key
from pdplane.transport.reports import Landed, OnReport

MAX_OPEN_PUSHES = 4096


@attrs.define
class _OpenPush:
    refusal: Refusal | None = None
    nbytes: int = 0


class Landing:
    """The pushes of one writer's connection; used by that connection's thread only."""

    def __init__(self, fence: Fence, writer: Writer, report: OnReport, *, checksums: bool = False) -> None:
        """With `checksums` a segment without one is refused."""
        self._fence, self._writer, self._report = fence, writer, report
        self._demands_checksums = checksums
        self._open: dict[Key, _OpenPush] = {}
        self._grant: Grant | None = None
        self._runs: tuple[U64, U64] | None = None  # of the segment that is being stored

    def begin(self, header: Header, offsets: U64, lengths: U64) -> Grant | None:
        """Leave to store a segment's bytes; None when they must be drained: refused, or landed before."""
        push = self._push(header)
        self._grant = self._runs = None
        write = Write(self._writer, header.room, header.generation, header.segment, offsets, lengths, header.nbytes)
        admission = self._admit(header, write)
        if isinstance(admission, Refusal):
            push.refusal = push.refusal or admission
            return None
        self._grant = admission
        if admission.repeated:
            return None
        self._runs = offsets, lengths
        return admission

    def end(self, header: Header) -> Header | None:
        """Count the segment whose bytes are all read; the answer to send, if it asks for one."""
        push = self._push(header)
        landed = self._finish(header, push)
        if not header.last:
            return _answer(header, Kind.TAKEN) if header.kind is Kind.PULL else None
        del self._open[_key(header)]
        if landed is not None and push.refusal is None:
            self._report(Landed(header.room, header.generation, self._writer.prefill_rank, landed))
        return _answer(header, Kind.ACK, push.refusal.value if push.refusal else 0, push.nbytes)

    def _admit(self, header: Header, write: Write) -> Admission:
        wanted = self._demands_checksums and header.nbytes > 0
        if (wanted and header.checksum is None) or (header.checksum is not None and not can_check()):
            self._fence.count(Refusal.CHECKSUM)
            return Refusal.CHECKSUM
        return self._fence.admit(write)

    def _finish(self, header: Header, push: _OpenPush) -> int | None:
        """What the rank has landed with this segment; None when it does not count."""
        grant, runs = self._grant, self._runs
        self._grant = self._runs = None
        if grant is None:
            push.refusal = push.refusal or Refusal.CLOSED
            return None
        if header.checksum is not None and runs and checksum_of(self._fence.arena, *runs) != header.checksum:
            self._fence.count(Refusal.CHECKSUM)
            push.refusal = push.refusal or Refusal.CHECKSUM
            return None
        landed = grant.finish()
        if landed is None:
            push.refusal = push.refusal or Refusal.CLOSED
        else:
            push.nbytes += header.nbytes
        return landed

    def abandon(self, header: Header) -> Header | None:
        """Forget a push that its sender gave up; the answer to send, if it asks for one."""
        push = self._open.pop(_key(header), _OpenPush())
        return _answer(header, Kind.ACK, 0, push.nbytes) if header.last else None

    def _push(self, header: Header) -> _OpenPush:
        key = _key(header)
        if key not in self._open and len(self._open) >= MAX_OPEN_PUSHES:
            raise WireError("push", f"more than {MAX_OPEN_PUSHES} pushes are open on one connection")
        return self._open.setdefault(key, _OpenPush())


def _answer(header: Header, kind: Kind, status: int = 0, nbytes: int = 0) -> Header:
    return attrs.evolve(header, kind=kind, count=status, nbytes=nbytes, checksum=None)


def _key(header: Header) -> Key:
    return header.room, header.generation, header.push


class Endable(Protocol):
    """A writer's connection as the table sees it."""

    def end(self, cause: str) -> None:
        """End the connection and return when nothing more lands through it. Raises TimeoutError."""


class Writers:
    """The connections of each writer. One of another bundle, or of the same stream, ends the old ones first."""

    def __init__(self) -> None:
        self._taking = threading.Lock()  # held while an old connection ends
        self._lock = threading.Lock()
        self._connections: dict[Writer, dict[Bundle, Endable]] = {}

    def enter(self, writer: Writer, bundle: Bundle, connection: Endable) -> None:
        """Make this the connection of the bundle's stream. Raises TimeoutError when an old one does not end."""
        with self._taking:
            with self._lock:
                known = dict(self._connections.get(writer, {}))
            for other, old in known.items():
                if other.id != bundle.id or other == bundle:
                    old.end("replaced by a new connection of the same writer")
            with self._lock:
                self._connections.setdefault(writer, {})[bundle] = connection

    def leave(self, writer: Writer, bundle: Bundle, connection: Endable) -> None:
        """Forget the connection unless another took its place."""
        with self._lock:
            known = self._connections.get(writer, {})
            if known.get(bundle) is connection:
                del known[bundle]
            if not known:
                self._connections.pop(writer, None)
