"""The parts of every receiver: identity, fence, writers, and one thread for each accepted connection."""

from __future__ import annotations

import contextlib
import functools
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import attrs
import numpy as np

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.kv.copies import U64, Copies
from pdplane.messages import Landed, PushKey, WriterCut
from pdplane.security import Secret
from pdplane.transport.fence import Admission, Fence, Grant, Refusal, Write, Writer
from pdplane.transport.framing import (
    FROM_PULLED_SENDER,
    FROM_SENDER,
    HEADER_BYTES,
    FrameKind,
    Header,
    can_check,
    checksum_of,
    decode_header,
    decode_sources,
    decode_tables,
    encode_header,
)
from pdplane.transport.greeting import Bundle, GreetingKind, ReceiverGreeting, encode
from pdplane.transport.line import DataSocket
from pdplane.transport.pull import PeerMemory
from pdplane.transport.reports import OnReport, TransportOptions
from pdplane.transport.sender import cause_of
from pdplane.transport.vector import Cursor


@attrs.frozen
class ReceiverSnapshot:
    """Open connections now, and what was refused since the start."""

    connections: int
    half_open: int
    refused_connections: int
    refused_greetings: int
    malformed_frames: int
    out_of_descriptors: int = 0
    """Times that a connection had to wait because the process has no free file descriptor."""
    ways: dict[str, int] = attrs.field(factory=dict)
    """Open connections by what carries their bytes: tcp, unix, pull, loopback."""


class Reception:
    """One receiver's identity and counts, shared by its connections."""

    def __init__(
        self,
        session: SessionId | None,
        decode_life: Life,
        fence: Fence,
        secret: Secret | None,
        report: OnReport,
        options: TransportOptions,
    ) -> None:
        self._session, self._decode_life, self._secret = session, decode_life, secret
        self.fence, self.report, self.options = fence, report, options
        self.writers = Writers()
        self.closing = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def session(self) -> SessionId:
        if self._session is None:
            raise LocalProtocolError("a receiver has no session before it starts")
        return self._session

    def name_session(self, advertised: Endpoint) -> SessionId:
        """Take the advertised address for the session unless one was given."""
        if self._session is None:
            self._session = SessionId(str(advertised))
        return self._session

    def greeting(self) -> ReceiverGreeting:
        """Return a new greeting for one connection."""
        return ReceiverGreeting(self.session, self._decode_life, self._secret)

    def landing(self, writer: Writer) -> Landing:
        """Return the accounts of one new connection."""
        return Landing(self.fence, writer, self.report, checksums=bool(self.options.checksum))

    def cut(self, writer: Writer, cause: str) -> None:
        """Report that a writer's connection ended, unless we close."""
        if not self.closing:
            self.report(WriterCut(writer.prefill_rank, writer.life, cause))

    def count(self, kind: str) -> None:
        """Count one refusal; `kind` is a field of the snapshot."""
        with self._lock:
            self._counts[kind] += 1

    def snapshot(self, connections: int, half_open: int, ways: Mapping[str, int]) -> ReceiverSnapshot:
        with self._lock:
            return ReceiverSnapshot(
                connections=connections,
                half_open=half_open,
                refused_connections=self._counts["refused_connections"],
                refused_greetings=self._counts["refused_greetings"],
                malformed_frames=self._counts["malformed_frames"],
                out_of_descriptors=self._counts["out_of_descriptors"],
                ways={way: ways[way] for way in sorted(ways) if way and ways[way]},
            )


# ---- The receiving half of a connection, whatever moves its bytes: pushes that land, and who may send them


MAX_OPEN_PUSHES = 4096


@attrs.define
class _OpenPush:
    refusal: Refusal | None = None
    nbytes: int = 0


class Landing:
    """The pushes of one writer's connection; used by that connection's thread only."""

    def __init__(self, fence: Fence, writer: Writer, report: OnReport, *, checksums: bool = False) -> None:
        """Set up; with `checksums` a segment without one is refused."""
        self._fence, self._writer, self._report = fence, writer, report
        self._demands_checksums = checksums
        self._open: dict[PushKey, _OpenPush] = {}
        self._grant: Grant | None = None
        self._runs: tuple[U64, U64] | None = None  # of the segment that is being stored

    def begin(self, header: Header, offsets: U64, lengths: U64) -> Grant | None:
        """Return permission to store a segment's bytes; None when they must be dropped: refused, or landed before."""
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
        """Count a segment whose bytes are all read; return the answer to send, if it asks for one."""
        push = self._push(header)
        landed = self._finish(header, push)
        if not header.last:
            return _answer(header, FrameKind.TAKEN) if header.kind is FrameKind.PULL else None
        del self._open[header.key]
        if landed is not None and push.refusal is None:
            self._report(Landed(header.room, header.generation, self._writer.prefill_rank, landed))
        return _answer(header, FrameKind.ACK, push.refusal.value if push.refusal else 0, push.nbytes)

    def _admit(self, header: Header, write: Write) -> Admission:
        wanted = self._demands_checksums and header.nbytes > 0
        if (wanted and header.checksum is None) or (header.checksum is not None and not can_check()):
            self._fence.count(Refusal.CHECKSUM)
            return Refusal.CHECKSUM
        return self._fence.admit(write)

    def _finish(self, header: Header, push: _OpenPush) -> int | None:
        """Return all bytes that the rank has landed, this segment included; None when it does not count."""
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
        """Forget a push that its sender gave up; return the answer to send, if it asks for one."""
        push = self._open.pop(header.key, _OpenPush())
        return _answer(header, FrameKind.ACK, 0, push.nbytes) if header.last else None

    def _push(self, header: Header) -> _OpenPush:
        key = header.key
        if key not in self._open and len(self._open) >= MAX_OPEN_PUSHES:
            raise WireError("push", f"more than {MAX_OPEN_PUSHES} pushes are open on one connection")
        return self._open.setdefault(key, _OpenPush())


def _answer(header: Header, kind: FrameKind, status: int = 0, nbytes: int = 0) -> Header:
    where = header.session_number, header.room, header.generation, header.segment
    return Header(kind, *where, status, nbytes, header.last)


class WriterConnection(Protocol):
    """A writer's connection as the table sees it."""

    def end(self, cause: str) -> None:
        """End the connection and return when nothing more lands through it. Raises TimeoutError."""


class Writers:
    """The connections of each writer. One of another bundle, or of the same stream, ends the old ones first."""

    def __init__(self) -> None:
        self._taking = threading.Lock()  # held while an old connection ends
        self._lock = threading.Lock()
        self._connections: dict[Writer, dict[Bundle, WriterConnection]] = {}

    def enter(self, writer: Writer, bundle: Bundle, connection: WriterConnection) -> None:
        """Make this the connection of the bundle's stream. Raises TimeoutError when an old one does not end."""
        with self._taking:
            with self._lock:
                known = dict(self._connections.get(writer, {}))
            for other, old in known.items():
                if other.id != bundle.id or other == bundle:
                    old.end("replaced by a new connection of the same writer")
            with self._lock:
                self._connections.setdefault(writer, {})[bundle] = connection

    def leave(self, writer: Writer, bundle: Bundle, connection: WriterConnection) -> None:
        """Forget the connection unless another took its place."""
        with self._lock:
            known = self._connections.get(writer, {})
            if known.get(bundle) is connection:
                del known[bundle]
            if not known:
                self._connections.pop(writer, None)


# ---- One accepted connection of a writer: its greeting, and then segments into the arena, on a thread of its own


HALF_OPEN = ""
"""The way of a connection that has not finished its greeting."""


@attrs.frozen
class Greeted:
    """The result of a greeting: whose connection it is, our last message, and how its bytes come."""

    writer: Writer
    bundle: Bundle
    session_number: int
    reply: bytes
    way: str = "tcp"
    memory: PeerMemory | None = None


class Connection:
    """One accepted socket and its thread."""

    def __init__(
        self,
        link: DataSocket,
        reception: Reception,
        greet: Callable[[DataSocket, float], Greeted],
        forget: Callable[[Connection], None],
        address: str = "",
    ) -> None:
        self.address, self.since = address, time.monotonic()
        self.landed = False
        """A segment came through it: its sender is no stranger who only holds a place."""
        self.gives_way = False
        self._link, self._reception, self._greet, self._forget = link, reception, greet, forget
        self._options = reception.options
        self.greeted: Greeted | None = None
        self.moves = False
        """Set when its sender goes on over a Unix socket, so that the end of this one is no cut."""
        self._thread = threading.Thread(target=self._run, name="land", daemon=True)

    @property
    def half_open(self) -> bool:
        return self.greeted is None

    @property
    def way(self) -> str:
        """What carries the bytes; HALF_OPEN before the greeting is over."""
        return HALF_OPEN if self.greeted is None else self.greeted.way

    def is_accepted_as(self, session_number: int) -> bool:
        return self.greeted is not None and self.greeted.session_number == session_number

    def start(self) -> None:
        self._thread.start()

    def give_way(self) -> None:
        """End, so that another one has place."""
        self.gives_way = True
        self.stop("it makes place for another one")

    def stop(self, cause: str) -> None:
        """Ask the connection to end."""
        self._link.stop(cause)

    def end(self, cause: str) -> None:
        """End the connection and join its thread. Raises TimeoutError."""
        self.stop(cause)
        if self._thread is threading.current_thread():
            return  # it stops at its next step
        self._thread.join(self._options.close_timeout_s)
        if self._thread.is_alive():
            raise TimeoutError("the writer's old connection does not end")

    def _run(self) -> None:
        try:
            greeted = self._greeted()
            if greeted is not None:
                self._serve(greeted)
        finally:
            self._link.close()
            self._forget(self)

    def _greeted(self) -> Greeted | None:
        """Greet, up to our last message; return None when the connection is refused."""
        deadline_s = time.monotonic() + self._options.greeting_timeout_s
        try:
            return self._greet(self._link, deadline_s)
        except WireError as error:
            self._reception.count("refused_greetings")
            with contextlib.suppress(OSError):
                self._link.write(encode(GreetingKind.REFUSED, error.reason), deadline_s)
        except OSError:
            self._reception.count("refused_greetings")
        return None

    def _serve(self, greeted: Greeted) -> None:
        writer, cause = greeted.writer, ""
        try:
            self._reception.writers.enter(writer, greeted.bundle, self)
        except TimeoutError:
            self._reception.count("refused_connections")
            return
        self.greeted = greeted
        try:
            self._link.write(greeted.reply, time.monotonic() + self._options.greeting_timeout_s)
            self._receive(greeted, self._reception.landing(writer))
        except WireError as error:
            self._reception.count("malformed_frames")
            cause = f"malformed frame: {error.reason}"
        except OSError as error:
            cause = cause_of(error)
        finally:
            self._reception.writers.leave(writer, greeted.bundle, self)
            if not self.moves:
                self._reception.cut(writer, cause)

    def _receive(self, greeted: Greeted, landing: Landing) -> None:
        """Store segments until the connection ends, which raises OSError or WireError."""
        kinds = FROM_SENDER if greeted.memory is None else FROM_PULLED_SENDER
        while True:
            self._link.wait(select.POLLIN, None)
            data = self._link.read_bytes(HEADER_BYTES, self._deadline())
            header = decode_header(data, greeted.session_number, kinds)
            if header.kind is FrameKind.ABANDON:
                answer = landing.abandon(header)
            else:
                answer = self._land(landing, header, greeted.memory)
            self.landed = True
            if answer is not None:
                self._link.write(encode_header(answer), time.monotonic() + self._options.send_timeout_s)

    def _land(self, landing: Landing, header: Header, memory: PeerMemory | None) -> Header | None:
        tables = np.frombuffer(self._link.read_bytes(header.table_bytes, self._deadline()), "<u8")
        offsets, lengths = decode_tables(header, tables)
        sources = None if memory is None else decode_sources(header, tables, memory.nbytes)
        grant = landing.begin(header, offsets, lengths)
        if memory is None or sources is None:
            stored = self._store(grant, offsets, lengths) if grant else 0
            self._link.drain(header.nbytes - stored, self._options.receive_timeout_s)
        elif grant is not None:
            self._pull(grant, Copies(sources, offsets, lengths), memory)
        return landing.end(header)

    def _store(self, grant: Grant, offsets: U64, lengths: U64) -> int:
        """Store the stream's bytes; return how many were taken, fewer than all when the room closed meanwhile."""
        cursor = Cursor(offsets + np.uint64(self._reception.fence.arena.base), lengths, self._options.call_bytes)
        receive = functools.partial(self._link.receive_vector, cursor)
        deadline_s = self._deadline()
        while cursor.left:
            self._link.check()
            before = cursor.done
            full = grant.store(receive)
            if full is None:
                break
            if cursor.done > before:
                deadline_s = self._deadline()
            if not full and cursor.left:
                self._link.wait(select.POLLIN, deadline_s)  # outside the room's lock
        return cursor.done

    def _pull(self, grant: Grant, part: Copies, memory: PeerMemory) -> None:
        """Copy the runs from the sender's memory while the room stays open. Raises OSError."""
        for read in memory.readings(part, self._reception.fence.arena, self._options.pull_call_bytes):
            self._link.check()
            if grant.store(read) is None:
                return

    def _deadline(self) -> float:
        return time.monotonic() + self._options.receive_timeout_s
