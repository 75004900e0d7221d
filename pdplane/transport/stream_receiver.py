"""Stream sockets into the arena: listeners, and one thread for each writer."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from collections import Counter

import attrs

from pdplane.errors import ConfigError, LocalProtocolError, WireError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.security import Secret
from pdplane.transport.fence import Fence
from pdplane.transport.greeting import PULL, UNIX, Attach, decode_attach, encode_attached
from pdplane.transport.line import Link, Wakeup
from pdplane.transport.pull import PeerMemory
from pdplane.transport.receiver import HALF_OPEN, Connection, Greeted, ReceiverSnapshot, Reception
from pdplane.transport.reports import OnReport, TransportOptions
from pdplane.transport.unix_socket import UnixListener, open_unix_listener

_BACKLOG = 128
_EXHAUSTED_PAUSE_MS = 200  # out of descriptors: the connection stays in the backlog, and `poll` would spin


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
        self._listener: socket.socket | None = None
        self._unix: UnixListener | None = None
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
        self._unix = open_unix_listener() if UNIX in self._ways else None
        self._wakeup = Wakeup()
        listeners = [self._listener] if self._unix is None else [self._listener, self._unix.listener]
        self._thread = threading.Thread(
            target=self._accept, args=(listeners, self._wakeup), name=f"accept {self._listen}", daemon=True
        )
        self._thread.start()
        return session

    def snapshot(self) -> ReceiverSnapshot:
        with self._lock:
            ways = Counter(connection.way for connection in self._connections)
            return self._reception.snapshot(len(self._connections) - ways[HALF_OPEN], ways[HALF_OPEN], ways)

    def close(self) -> None:
        """End every connection and join every thread; idempotent."""
        self._reception.closing = True
        if self._wakeup is not None and self._thread is not None and self._listener is not None:
            self._wakeup.wake()
            self._thread.join()
            self._listener.close()
            self._wakeup.close()
            if self._unix is not None:
                self._unix.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.stop("the receiver was closed")
        for connection in connections:
            with contextlib.suppress(TimeoutError):
                connection.end("the receiver was closed")

    def _accept(self, listeners: list[socket.socket], wakeup: Wakeup) -> None:
        poll, pause = select.poll(), select.poll()
        for listener in listeners:
            poll.register(listener.fileno(), select.POLLIN)
        poll.register(wakeup.descriptor, select.POLLIN)
        pause.register(wakeup.descriptor, select.POLLIN)
        while not self._reception.closing:
            ready = dict(poll.poll())
            for listener in listeners:
                if listener.fileno() in ready and not self._accept_one(listener):
                    pause.poll(_EXHAUSTED_PAUSE_MS)

    def _accept_one(self, listener: socket.socket) -> bool:
        """Accept one connection; return False when the process is out of descriptors."""
        try:
            connected, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError:
            self._reception.count("out_of_descriptors")
            return False
        self._admit(connected)
        return True

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
        except OSError:  # it has ended already
            connected.close()
            return
        greet = self._greet_attached if connected.family == socket.AF_UNIX else self._greet
        connection = Connection(link, self._reception, greet, self._forget)
        with self._lock:
            self._connections.add(connection)
        connection.start()

    def _greet(self, link: Link, deadline_s: float) -> Greeted:
        """Exchange the messages over TCP, up to the sender's proof. Raises WireError or OSError."""
        greeting = self._reception.greeting()
        link.write(greeting.hello(*link.read_greeting(deadline_s)), deadline_s)
        greeting.proof(*link.read_greeting(deadline_s))
        number = secrets.randbits(64)
        path = self._unix.path if self._unix is not None else ""
        return Greeted(greeting.writer, greeting.bundle, number, greeting.accepted(number, path))

    def _greet_attached(self, link: Link, deadline_s: float) -> Greeted:
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

    def _memory(self, link: Link, wish: Attach) -> PeerMemory | None:
        """Return the sender's arena if it is readable from here and proved to be the sender's, else None."""
        credentials = link.credentials
        if wish.way != PULL or PULL not in self._ways or credentials is None or not credentials.pid:
            return None
        memory = PeerMemory(credentials.pid, wish.arena_base, wish.arena_nbytes)
        return memory if memory.holds(wish.nonce_address, bytes.fromhex(wish.nonce)) else None

    def _forget(self, connection: Connection) -> None:
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
