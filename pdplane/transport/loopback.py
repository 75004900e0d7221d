"""The same contract inside one process, without sockets: for tests, and for an embedder that holds both roles.

A receiver listens under a port number of this process. Frames and greetings go through the same encoders
and checks as over TCP; the bytes are copied from arena to arena by the sender's thread, through the fence.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable

import attrs
import numpy as np

from pdplane.errors import ConfigError, LocalProtocolError, WireError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.security import Secret
from pdplane.transport.fence import Fence, Grant, Writer
from pdplane.transport.framing import (
    FROM_SENDER,
    HEADER_BYTES,
    FrameKind,
    Header,
    decode_header,
    decode_tables,
    encode_header,
    encode_segment,
    segments,
)
from pdplane.transport.greeting import (
    PREFIX_BYTES,
    Accepted,
    Bundle,
    GreetingKind,
    SenderGreeting,
    decode_body,
    decode_prefix,
)
from pdplane.transport.receiver import ReceiverSnapshot, Reception
from pdplane.transport.reports import OnReport, TransportOptions

_STORE_BYTES = 4 << 20  # one hold of a room's lock
_STORE_RUNS = 256

_listening: dict[int, LoopbackReceiver] = {}
_listening_lock = threading.Lock()
_ports = itertools.cycle(range(1, 65536))  # a closed receiver's session is not given again soon


class LoopbackReceiver:
    """A `Receiver` that this process's senders find by its port."""

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
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._started = False

    @property
    def endpoint(self) -> Endpoint:
        return self._listen

    @property
    def session(self) -> SessionId:
        return self._reception.session

    def start(self, advertise_host: str | None = None) -> SessionId:
        if self._started or self._reception.closing:
            raise LocalProtocolError("a receiver starts once")
        with _listening_lock:
            port = self._listen.port or next(number for number in _ports if number not in _listening)
            if port in _listening:
                raise ConfigError(f"cannot listen on {self._listen}: a loopback receiver is there already")
            self._listen = Endpoint(self._listen.host, port)
            session = self._reception.name_session(Endpoint(advertise_host or self._listen.host, port))
            _listening[port] = self
        self._started = True
        return session

    def snapshot(self) -> ReceiverSnapshot:
        with self._lock:
            count = len(self._connections)
            return self._reception.snapshot(count, 0, {"loopback": count})

    def trouble(self) -> str | None:
        return None

    def close(self) -> None:
        self._reception.closing = True
        with _listening_lock:
            if _listening.get(self._listen.port) is self:
                del _listening[self._listen.port]
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.end("the receiver was closed")

    def greet(self, line: LoopbackLine, greeting: SenderGreeting) -> tuple[_Connection, Accepted]:
        """Greet a connecting line. Raises WireError."""
        reply = self._reception.greeting()
        try:
            welcome = reply.hello(*_message(greeting.hello()))
            reply.proof(*_message(greeting.welcome(*_message(welcome))))
        except WireError as error:
            self._reception.count("refused_greetings")
            raise WireError(error.field, f"the receiver refused: {error.reason}") from error
        connection = _Connection(self._reception, reply.writer, reply.bundle, line, self._forget)
        with self._lock:
            if self._reception.closing or len(self._connections) >= self._reception.options.max_connections:
                self._reception.count("refused_connections")
                raise WireError("refused", "the receiver refused: too many connections")
            self._connections.add(connection)
        self._reception.writers.enter(reply.writer, reply.bundle, connection)
        accepted = greeting.accepted(*_message(reply.accepted(connection.session_number)))
        return connection, attrs.evolve(accepted, way="loopback")

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)


def _message(data: bytes) -> tuple[GreetingKind, tuple[str, ...]]:
    kind, length = decode_prefix(data[:PREFIX_BYTES])
    return kind, decode_body(kind, data[PREFIX_BYTES : PREFIX_BYTES + length])


class _Connection:
    """The receiver's side of a line. `_delivering` is held while a frame is taken in."""

    def __init__(
        self,
        reception: Reception,
        writer: Writer,
        bundle: Bundle,
        line: LoopbackLine,
        forget: Callable[[_Connection], None],
    ) -> None:
        self._reception, self._writer, self._bundle = reception, writer, bundle
        self._line, self._forget = line, forget
        self._landing = reception.landing(writer)
        self._delivering = threading.RLock()  # a report may end the connection from inside a delivery
        self._cause: str | None = None
        self._ended = False
        self.session_number = secrets.randbits(64)

    def deliver(self, frame: bytes, part: Copies, source: Arena) -> Header | None:
        """Take one frame, its bytes still in the sender's arena; return the acknowledgement, if it asks for one."""
        with self._delivering:
            self._check()
            try:
                header = decode_header(frame[:HEADER_BYTES], self.session_number, FROM_SENDER)
                if header.kind is FrameKind.ABANDON:
                    return self._landing.abandon(header)
                offsets, lengths = decode_tables(header, np.frombuffer(frame, "<u8", offset=HEADER_BYTES))
            except WireError as error:
                self._reception.count("malformed_frames")
                self.end(f"malformed frame: {error.reason}")
                raise
            grant = self._landing.begin(header, offsets, lengths)
            if grant is not None:
                self._store(grant, part, source)
            return self._landing.end(header)

    def end(self, cause: str) -> None:
        """End the connection and return when nothing more lands through it."""
        if self._cause is None:
            self._cause = cause
        with self._delivering:
            if self._ended:
                return
            self._ended = True
        self._forget(self)
        self._reception.writers.leave(self._writer, self._bundle, self)
        self._reception.cut(self._writer, self._cause)
        self._line.cut(self._cause)

    def _store(self, grant: Grant, part: Copies, source: Arena) -> None:
        target = self._reception.fence.arena
        for chunk in segments(part, _STORE_BYTES, _STORE_RUNS):
            self._check()
            if grant.store(functools.partial(_copy, chunk, source, target)) is None:
                return

    def _check(self) -> None:
        if self._cause is not None:
            raise ConnectionAbortedError(self._cause)


def _copy(chunk: Copies, source: Arena, target: Arena) -> int:
    for start, to, length in zip(chunk.source.tolist(), chunk.destination.tolist(), chunk.length.tolist(), strict=True):
        target.bytes[to : to + length] = source.bytes[start : start + length]
    return len(chunk.length)


class LoopbackLine:
    """A sender's line to a receiver of this process."""

    def __init__(self, peer: Endpoint, greeting: SenderGreeting, arena: Arena, options: TransportOptions) -> None:
        del options  # nothing here waits for a network
        self._peer, self._greeting, self._arena = peer, greeting, arena
        self._changed = threading.Condition()
        self._acks: deque[Header] = deque()
        self._woken = False
        self._cause: str | None = None
        self._connection: _Connection | None = None

    def open(self) -> Accepted:
        with _listening_lock:
            receiver = _listening.get(self._peer.port)
        if receiver is None:
            raise ConnectionRefusedError(f"cannot connect to {self._peer}: nothing listens there")
        self._connection, accepted = receiver.greet(self, self._greeting)
        return accepted

    def send_segment(self, header: Header, part: Copies) -> None:
        ack = self._connected().deliver(encode_segment(header, part.destination, part.length), part, self._arena)
        if ack is not None:
            with self._changed:
                self._acks.append(ack)

    def send_header(self, header: Header) -> None:
        nothing = np.empty(0, np.uint64)
        self._connected().deliver(encode_header(header), Copies(nothing, nothing, nothing), self._arena)

    def receive(self, timeout_s: float | None) -> list[Header]:
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._acks or self._cause is not None, timeout_s)
            self._woken = False
            if self._cause is not None and not self._acks:
                raise ConnectionResetError(self._cause)
            acks = list(self._acks)
            self._acks.clear()
            return acks

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def cut(self, cause: str) -> None:
        """Note that the receiver has closed."""
        with self._changed:
            if self._cause is None:
                self._cause = cause
            self._changed.notify()

    def shutdown(self) -> None:
        self.cut("the sender was closed")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.end("the peer closed the connection")
            self._connection = None

    def _connected(self) -> _Connection:
        if self._cause is not None or self._connection is None:
            raise ConnectionResetError(self._cause or "the line is closed")
        return self._connection
