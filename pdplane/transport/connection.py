"""One accepted connection of a writer: its greeting, and then segments into the arena, on a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import select
import threading
import time
from collections.abc import Callable

import attrs
import numpy as np

from pdplane.errors import WireError
from pdplane.kv.copies import U64, Copies
from pdplane.transport.fence import Grant, Writer
from pdplane.transport.framing import (
    FROM_PULLED_SENDER,
    FROM_SENDER,
    HEADER_BYTES,
    Header,
    Kind,
    decode_header,
    decode_sources,
    decode_tables,
    encode_header,
)
from pdplane.transport.greeting import Bundle, GreetingKind, encode
from pdplane.transport.iovec import Cursor
from pdplane.transport.landing import Landing
from pdplane.transport.pull import PeerMemory
from pdplane.transport.receiver import Reception
from pdplane.transport.sender import cause_of
from pdplane.transport.stream import Link

HALF_OPEN = ""
"""The way of a connection that has not finished its greeting."""


@attrs.frozen
class Greeted:
    """What a greeting led to: whose connection it is, our last word, and how its bytes come."""

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
        link: Link,
        reception: Reception,
        greet: Callable[[Link, float], Greeted],
        forget: Callable[[Connection], None],
    ) -> None:
        self._link, self._reception, self._greet, self._forget = link, reception, greet, forget
        self._options = reception.options
        self.greeted: Greeted | None = None
        self.moves = False
        """Its sender goes on over a Unix socket: the end of this one is no cut."""
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
            greeted = self._hear()
            if greeted is not None:
                self._serve(greeted)
        finally:
            self._link.close()
            self._forget(self)

    def _hear(self) -> Greeted | None:
        """The greeting up to our last word; None when the connection is refused."""
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
        """Land segments until the connection ends, which is an OSError or a WireError."""
        kinds = FROM_SENDER if greeted.memory is None else FROM_PULLED_SENDER
        while True:
            self._link.wait(select.POLLIN, None)
            data = self._link.read_bytes(HEADER_BYTES, self._deadline())
            header = decode_header(data, greeted.session_number, kinds)
            if header.kind is Kind.ABANDON:
                answer = landing.abandon(header)
            else:
                answer = self._land(landing, header, greeted.memory)
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
        """Bytes taken from the stream into the arena; fewer than all when the window closed meanwhile."""
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
                self._link.wait(select.POLLIN, deadline_s)  # outside the window's lock
        return cursor.done

    def _pull(self, grant: Grant, part: Copies, memory: PeerMemory) -> None:
        """Copy the runs from the sender's memory, as long as the window stays open. Raises OSError."""
        for read in memory.readings(part, self._reception.fence.arena, self._options.pull_call_bytes):
            self._link.check()
            if grant.store(read) is None:
                return

    def _deadline(self) -> float:
        return time.monotonic() + self._options.receive_timeout_s
