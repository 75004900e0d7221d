"""TCP connections into the arena: a listener, and one thread for each writer."""

from __future__ import annotations

import contextlib
import functools
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

import numpy as np

from pdplane.errors import ConfigError, LocalProtocolError, WireError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.kv.copies import U64
from pdplane.security import Secret
from pdplane.transport.fence import Fence, Grant, Writer
from pdplane.transport.framing import HEADER_BYTES, Header, Kind, decode_header, decode_tables, encode_header
from pdplane.transport.greeting import GreetingKind, ReceiverGreeting, encode
from pdplane.transport.iovec import Cursor
from pdplane.transport.landing import Landing
from pdplane.transport.options import TransportOptions
from pdplane.transport.receiver import ReceiverSnapshot, Reception
from pdplane.transport.reports import OnReport
from pdplane.transport.sender import cause_of
from pdplane.transport.stream import Link, Wakeup

_BACKLOG = 128
_EXHAUSTED_PAUSE_MS = 200  # out of descriptors: the connection stays in the backlog, and `poll` would spin


class StreamReceiver:
    """A `Receiver` over TCP; the constructor opens nothing."""

    def __init__(
        self,
        listen: Endpoint,
        session: SessionId | None,
        decode_life: Life,
        fence: Fence,
        secret: Secret | None,
        report: OnReport,
        options: TransportOptions,
    ) -> None:
        self._listen = listen
        self._reception = Reception(session, decode_life, fence, secret, report, options)
        self._options = options
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> Endpoint:
        return self._listen

    @property
    def session(self) -> SessionId:
        return self._reception.session

    def start(self, advertise_host: str | None = None) -> SessionId:
        """Bind and accept. Raises ConfigError naming the address."""
        if self._listener is not None or self._reception.closing:
            raise LocalProtocolError("a receiver starts once")
        self._listener = _listening(self._listen)
        self._listen = Endpoint(self._listen.host, self._listener.getsockname()[1])
        session = self._reception.name_session(Endpoint(advertise_host or self._listen.host, self._listen.port))
        self._wakeup = Wakeup()
        self._thread = threading.Thread(
            target=self._accept, args=(self._listener, self._wakeup), name=f"accept {self._listen}", daemon=True
        )
        self._thread.start()
        return session

    def snapshot(self) -> ReceiverSnapshot:
        with self._lock:
            half_open = sum(connection.half_open for connection in self._connections)
            return self._reception.snapshot(len(self._connections) - half_open, half_open)

    def close(self) -> None:
        """End every connection and join every thread; idempotent."""
        self._reception.closing = True
        if self._wakeup is not None and self._thread is not None and self._listener is not None:
            self._wakeup.wake()
            self._thread.join()
            self._listener.close()
            self._wakeup.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop("the receiver was closed")
        for connection in connections:
            with contextlib.suppress(TimeoutError):
                connection.end("the receiver was closed")

    def _accept(self, listener: socket.socket, wakeup: Wakeup) -> None:
        poll, pause = select.poll(), select.poll()
        poll.register(listener.fileno(), select.POLLIN)
        poll.register(wakeup.descriptor, select.POLLIN)
        pause.register(wakeup.descriptor, select.POLLIN)
        while not self._reception.closing:
            poll.poll()
            try:
                connected, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError:
                self._reception.count("out_of_descriptors")
                pause.poll(_EXHAUSTED_PAUSE_MS)
                continue
            self._admit(connected)

    def _admit(self, connected: socket.socket) -> None:
        with self._lock:
            half_open = sum(connection.half_open for connection in self._connections)
            full = len(self._connections) >= self._options.max_connections or half_open >= self._options.max_half_open
        if full or self._reception.closing:
            self._reception.count("refused_connections")
            connected.close()
            return
        try:
            link = Link(connected, self._options.socket_buffer_bytes)
        except OSError:  # gone again already
            connected.close()
            return
        connection = _Connection(link, self._reception, self._forget)
        with self._lock:
            self._connections.add(connection)
        connection.start()

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


def _listening(listen: Endpoint) -> socket.socket:
    family = socket.AF_INET6 if listen.is_ipv6 else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host, listen.port))
        listener.listen(_BACKLOG)
        listener.settimeout(0)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {listen}: {error.strerror or error}") from error
    return listener


class _Connection:
    """One accepted connection and its thread."""

    def __init__(self, link: Link, reception: Reception, forget: Callable[[_Connection], None]) -> None:
        self._link, self._reception, self._forget = link, reception, forget
        self._options = reception.options
        self._session_number = secrets.randbits(64)
        self.half_open = True
        self._thread = threading.Thread(target=self._run, name="land", daemon=True)

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
            greeting = self._greet()
            if greeting is not None:
                self._serve(greeting)
        finally:
            self._link.close()
            self._forget(self)

    def _greet(self) -> ReceiverGreeting | None:
        """Both sides' words up to the sender's proof; None when the connection is refused."""
        greeting = self._reception.greeting()
        deadline_s = time.monotonic() + self._options.greeting_timeout_s
        try:
            self._link.write(greeting.hello(*self._link.read_greeting(deadline_s)), deadline_s)
            greeting.proof(*self._link.read_greeting(deadline_s))
        except WireError as error:
            self._reception.count("refused_greetings")
            with contextlib.suppress(OSError):
                self._link.write(encode(GreetingKind.REFUSED, error.reason), deadline_s)
            return None
        except OSError:
            self._reception.count("refused_greetings")
            return None
        return greeting

    def _serve(self, greeting: ReceiverGreeting) -> None:
        writer, cause = greeting.writer, ""
        try:
            self._reception.writers.enter(writer, self)
        except TimeoutError:
            self._reception.count("refused_connections")
            return
        self.half_open = False
        try:
            deadline_s = time.monotonic() + self._options.greeting_timeout_s
            self._link.write(greeting.accepted(self._session_number), deadline_s)
            self._receive(self._reception.landing(writer))
        except WireError as error:
            self._reception.count("malformed_frames")
            cause = f"malformed frame: {error.reason}"
        except OSError as error:
            cause = cause_of(error)
        finally:
            self._leave(writer, cause)

    def _leave(self, writer: Writer, cause: str) -> None:
        self._reception.writers.leave(writer, self)
        self._reception.cut(writer, cause)

    def _receive(self, landing: Landing) -> None:
        """Land segments until the connection ends, which is an OSError or a WireError."""
        while True:
            self._link.wait(select.POLLIN, None)
            header = decode_header(
                self._link.read_bytes(HEADER_BYTES, self._deadline()),
                self._session_number,
                (Kind.SEGMENT, Kind.ABANDON),
            )
            if header.kind is Kind.ABANDON:
                landing.abandon(header)
            else:
                self._land(landing, header)

    def _land(self, landing: Landing, header: Header) -> None:
        tables = self._link.read_bytes(header.table_bytes, self._deadline())
        offsets, lengths = decode_tables(header, np.frombuffer(tables, "<u8"))
        grant = landing.begin(header, offsets, lengths)
        stored = self._store(grant, offsets, lengths) if grant else 0
        self._link.drain(header.nbytes - stored, self._options.receive_timeout_s)
        ack = landing.end(header)
        if ack is not None:
            self._link.write(encode_header(ack), time.monotonic() + self._options.send_timeout_s)

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

    def _deadline(self) -> float:
        return time.monotonic() + self._options.receive_timeout_s
