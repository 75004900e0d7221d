"""Stream sockets into the arena: listeners, and one thread for each writer."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import threading
import time
from collections import Counter

import attrs

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.net import Acceptor, Complaints, first_to_go, listen, plain
from pdplane.security import Secret
from pdplane.transport.fence import Fence
from pdplane.transport.greeting import PULL, UNIX, Attach, GreetingKind, decode_attach, encode, encode_attached
from pdplane.transport.line import DataSocket
from pdplane.transport.pull import PeerMemory
from pdplane.transport.receiver import HALF_OPEN, Connection, Greeted, ReceiverSnapshot, Reception
from pdplane.transport.reports import OnReport, TransportOptions
from pdplane.transport.tls import TlsSocket
from pdplane.transport.unix_socket import UnixListener, open_unix_listener

logger = logging.getLogger(__name__)


class StreamReceiver:
    """A `Receiver` over TCP, which offers `ways` to senders of its own host; the constructor opens nothing."""

    def __init__(
        self,
        listen: Endpoint,
        session: SessionId | None,
        decode_life: Life,
        fence: Fence,
        secret: Secret | None,
        report: OnReport,
        options: TransportOptions,
        *,
        ways: tuple[str, ...] = (),
    ) -> None:
        self._ways = ways
        self._listen = listen
        self._reception = Reception(session, decode_life, fence, secret, report, options)
        self._options = options
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._acceptor: Acceptor | None = None
        self._unix: UnixListener | None = None
        self._context: ssl.SSLContext | None = None
        self._complaints = Complaints(logger)

    @property
    def endpoint(self) -> Endpoint:
        return self._listen

    @property
    def session(self) -> SessionId:
        return self._reception.session

    def start(self, advertise_host: str | None = None) -> SessionId:
        """Bind and accept. Raises ConfigError naming the address."""
        if self._acceptor is not None or self._reception.closing:
            raise LocalProtocolError("a receiver starts once")
        self._context = self._options.tls.member(server_side=True) if self._options.tls else None
        listener = listen(self._listen)
        self._listen = Endpoint(self._listen.host, listener.getsockname()[1])
        session = self._reception.name_session(Endpoint(advertise_host or self._listen.host, self._listen.port))
        self._unix = open_unix_listener() if UNIX in self._ways else None
        listeners = [listener] if self._unix is None else [listener, self._unix.listener]
        self._acceptor = Acceptor(listeners, self._admit, name=f"accept {self._listen}", exhausted=self._exhausted)
        self._acceptor.start()
        return session

    def snapshot(self) -> ReceiverSnapshot:
        with self._lock:
            ways = Counter(connection.way for connection in self._connections)
            return self._reception.snapshot(len(self._connections) - ways[HALF_OPEN], ways[HALF_OPEN], ways)

    def trouble(self) -> str | None:
        return None if self._acceptor is None else self._acceptor.trouble()

    def close(self) -> None:
        """End every connection and join every thread; idempotent."""
        self._reception.closing = True
        if self._acceptor is not None:
            self._acceptor.close()
        if self._unix is not None:
            self._unix.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop("the receiver was closed")
        for connection in connections:
            with contextlib.suppress(TimeoutError):
                connection.end("the receiver was closed")

    def _exhausted(self) -> None:
        self._reception.count("out_of_descriptors")

    def _admit(self, connected: socket.socket, address: object) -> None:
        host = plain(str(address[0])) if isinstance(address, tuple) else ""
        if self._reception.closing or not self._make_place(host):
            self._refuse(connected, host)
            return
        try:
            link = self._link(connected)
        except OSError:  # it has ended already
            connected.close()
            return
        greet = self._greet_attached if connected.family == socket.AF_UNIX else self._greet
        connection = Connection(link, self._reception, greet, self._forget, host)
        with self._lock:
            self._connections.add(connection)
        try:
            connection.start()
        except RuntimeError:  # no thread is left
            self._forget(connection)
            link.close()
            raise

    def _link(self, connected: socket.socket) -> DataSocket:
        size = self._options.socket_buffer_bytes
        if self._context is None or connected.family == socket.AF_UNIX:
            return DataSocket(connected, size)
        return TlsSocket(connected, size, self._context, server_side=True)

    def _make_place(self, host: str) -> bool:
        """Return whether one more may connect, after ending one that makes place.

        That is one which has not finished its greeting, the oldest of the address with the most; else one of another
        address that no segment came through yet.
        """
        with self._lock:
            open_now = [connection for connection in self._connections if not connection.gives_way]
        half_open = [connection for connection in open_now if connection.half_open]
        if len(open_now) < self._options.max_connections and len(half_open) < self._options.max_half_open:
            return True
        idle = half_open or [each for each in open_now if not each.landed and each.address != host]
        if not idle:
            return False
        goes = first_to_go(idle, lambda each: each.address, lambda each: (each.since,))
        self._complaints.tell((goes.address, "place"), "a data connection of %s makes place for others", goes.address)
        self._reception.count("refused_connections")
        goes.give_way()
        return True

    def _refuse(self, connected: socket.socket, host: str) -> None:
        self._reception.count("refused_connections")
        if not self._reception.closing:
            self._complaints.tell((host, "full"), "a data connection of %s is refused: there are too many", host)
        with contextlib.suppress(OSError):
            connected.settimeout(0)
            if self._context is None:
                connected.send(encode(GreetingKind.REFUSED, "there are too many data connections"))
        connected.close()

    def _greet(self, link: DataSocket, deadline_s: float) -> Greeted:
        """Exchange the messages over TCP, up to the sender's proof. Raises WireError or OSError."""
        greeting = self._reception.greeting()
        link.handshake(deadline_s)
        link.write(greeting.hello(*link.read_greeting(deadline_s)), deadline_s)
        greeting.proof(*link.read_greeting(time.monotonic() + self._options.greeting_timeout_s))
        number = secrets.randbits(64)
        path = self._unix.path if self._unix is not None else ""
        return Greeted(greeting.writer, greeting.bundle, number, greeting.accepted(number, path), link.way)

    def _greet_attached(self, link: DataSocket, deadline_s: float) -> Greeted:
        """Take a TCP connection's sender over to the Unix socket. Raises WireError or OSError."""
        if link.credentials is not None and link.credentials.uid != os.getuid():
            raise WireError("uid", "another user's process")
        wish = decode_attach(*link.read_greeting(deadline_s))
        with self._lock:
            found = [each for each in self._connections if each.is_accepted_as(wish.session_number)]
        if not found or found[0].greeted is None:
            raise WireError("session number", "no connection has this number")
        memory = self._memory(link, wish)
        way = UNIX if memory is None else PULL
        found[0].moves = True
        return attrs.evolve(found[0].greeted, reply=encode_attached(way), way=way, memory=memory)

    def _memory(self, link: DataSocket, wish: Attach) -> PeerMemory | None:
        """Return the sender's arena if it is readable from here and proved to be the sender's, else None."""
        credentials = link.credentials
        if wish.way != PULL or PULL not in self._ways or credentials is None or not credentials.pid:
            return None
        memory = PeerMemory(credentials.pid, wish.arena_base, wish.arena_nbytes)
        return memory if memory.holds(wish.nonce_address, bytes.fromhex(wish.nonce)) else None

    def _forget(self, connection: Connection) -> None:
        with self._lock:
            self._connections.discard(connection)
