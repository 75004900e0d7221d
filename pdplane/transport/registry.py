"""The transports by name, and what both ends of each can do."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol

import attrs

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.messages import Push
from pdplane.security import Secret, Tls
from pdplane.transport.fence import Fence, Writer
from pdplane.transport.greeting import PULL, UNIX, Bundle, SenderGreeting
from pdplane.transport.line import DataSocket, StreamLine
from pdplane.transport.loopback import LoopbackLine, LoopbackReceiver
from pdplane.transport.mooncake import MooncakeLine, MooncakeReceiver, close_engines, load_mooncake, mooncake_options
from pdplane.transport.receiver import ReceiverSnapshot
from pdplane.transport.reports import OnReport, TransportOptions
from pdplane.transport.sender import Line, PushSender
from pdplane.transport.stream_receiver import StreamReceiver
from pdplane.transport.striped import StripedSender
from pdplane.transport.tls import TlsSocket


class Sender(Protocol):
    """Pushes bytes of our arena into one session's arena over one connection, on one thread of its own."""

    def start(self) -> None:
        """Connect; ends in `Connected` or `ConnectFailed`."""

    def submit(self, push: Push) -> None:
        """Queue a push; never blocks. It ends in one `Pushed` or `PushFailed`. Raises LocalProtocolError."""

    def offer(self, push: Push) -> bool:
        """Queue a push as `submit` does; return False, without a report, when the connection is over."""

    def cancel(self, room: Room, generation: Generation) -> None:
        """End the room's pushes at the next segment border; those sent whole still await their answer."""

    def stop(self) -> None:
        """Fail what is left; return at once, harmless when repeated."""

    @property
    def ended(self) -> bool:
        """Whether `close` would return at once."""

    def close(self) -> None:
        """Fail what is left and join the thread; bounded, idempotent."""


class Receiver(Protocol):
    """Lets writers into the arena through its fence."""

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens; the port is the real one after `start`."""

    @property
    def session(self) -> SessionId:
        """The session that greetings must name; known after `start`."""

    def start(self, advertise_host: str | None = None) -> SessionId:
        """Listen. Raises ConfigError naming the address."""

    def snapshot(self) -> ReceiverSnapshot:
        """Return counts of connections and refusals."""

    def trouble(self) -> str | None:
        """Return why no writer gets in any more, None when there is no reason."""

    def close(self) -> None:
        """Close every connection and join every thread, so that nothing lands afterwards; idempotent."""


@attrs.frozen
class Transport:
    """How one scheme makes its two ends."""

    line: Callable[[Endpoint, SenderGreeting, Arena, TransportOptions], Line]
    receiver: Callable[[Endpoint, SessionId | None, Life, Fence, Secret | None, OnReport, TransportOptions], Receiver]


@attrs.frozen
class OneSidedTransport:
    """A scheme that writes to addresses, past any fence: no greeting, no life, no `Landed`, no `WriterCut`.

    Its `Connected` carries an empty life. `line` takes the address at which the receiver's arena begins.
    """

    line: Callable[[Endpoint, SessionId, int, Arena, TransportOptions], Line]
    receiver: Callable[[Endpoint, SessionId | None, Life, Fence, Secret | None, OnReport, TransportOptions], Receiver]
    options: Callable[[TransportOptions], TransportOptions]
    load: Callable[[], object]
    """Imports what the scheme needs, or raises ConfigError, which says what to install."""
    close_shared: Callable[[Arena], None]
    """Closes what is kept for an arena's senders from one to the next."""


def _stream(*ways: str) -> Transport:
    return Transport(partial(_stream_line, ways), partial(StreamReceiver, ways=ways))


def _stream_line(
    ways: tuple[str, ...], peer: Endpoint, greeting: SenderGreeting, arena: Arena, options: TransportOptions
) -> Line:
    encrypt = None if options.tls is None else partial(_encrypted, options.tls)
    return StreamLine(peer, greeting, arena, options, ways=ways, encrypt=encrypt)


def _encrypted(tls: Tls, connected: socket.socket, buffer_bytes: int | None) -> DataSocket:
    """Return the sending end of a TLS connection. Raises OSError."""
    try:
        context = tls.member(server_side=False)  # read anew, so that a renewed certificate counts at once
    except ConfigError as error:
        raise OSError(str(error)) from error
    return TlsSocket(connected, buffer_bytes, context, server_side=False)


LOOPBACK = "loopback"
"""The scheme between two planes of one process: nothing for daemons, which never share one."""

# Any two of the first four understand each other and use the shortest way that both know and the host allows.
TRANSPORTS: dict[str, Transport | OneSidedTransport] = {
    "auto": _stream(PULL, UNIX),
    "pull": _stream(PULL, UNIX),
    "unix": _stream(UNIX),
    "tcp": _stream(),
    LOOPBACK: Transport(LoopbackLine, LoopbackReceiver),
    "mooncake": OneSidedTransport(MooncakeLine, MooncakeReceiver, mooncake_options, load_mooncake, close_engines),
}


def open_sender(
    scheme: str,
    *,
    peer: Endpoint,
    session: SessionId,
    prefill_rank: Rank,
    prefill_life: Life,
    arena: Arena,
    report: OnReport,
    secret: Secret | None = None,
    decode_life: Life | None = None,
    options: TransportOptions | None = None,
    target_base: int | None = None,
) -> Sender:
    """Return a sender that is not started yet; `decode_life` None accepts any life. Raises ConfigError.

    When the arena's last sender is closed, its owner calls `close_shared`.
    `target_base` is the address of the receiver's arena in its own process, as registered: one-sided schemes need it.
    """
    settings = options or TransportOptions()
    transport = _transport(scheme)
    if isinstance(transport, OneSidedTransport):
        if target_base is None:
            raise ConfigError(f"the transport {scheme!r} needs the address of the arena that it writes into")
        settings = transport.options(settings)
        one_sided = partial(transport.line, peer, session, target_base, arena, settings)
        return PushSender(one_sided, session, arena, report, settings)
    writer, fenced = Writer(prefill_rank, prefill_life), transport.line

    def make_line(bundle: Bundle) -> Line:
        return fenced(peer, SenderGreeting(session, writer, secret, decode_life, bundle), arena, settings)

    if settings.streams > 1:
        return StripedSender(make_line, session, arena, report, settings)
    return PushSender(partial(make_line, Bundle()), session, arena, report, settings)


def close_shared(scheme: str, arena: Arena) -> None:
    """Close what the scheme kept for an arena's senders, which are all closed; idempotent. Raises ConfigError."""
    transport = _transport(scheme)
    if isinstance(transport, OneSidedTransport):
        transport.close_shared(arena)


def open_receiver(
    scheme: str,
    *,
    listen: Endpoint,
    decode_life: Life,
    fence: Fence,
    report: OnReport,
    session: SessionId | None = None,
    secret: Secret | None = None,
    options: TransportOptions | None = None,
) -> Receiver:
    """Return a receiver that is not started yet; `session` None makes it from the advertised address.

    Raises ConfigError.
    """
    settings = options or TransportOptions()
    return _transport(scheme).receiver(listen, session, decode_life, fence, secret, report, settings)


def is_one_sided(scheme: str) -> bool:
    """Return whether the scheme writes past the fence. Raises ConfigError for one that does not exist."""
    return isinstance(_transport(scheme), OneSidedTransport)


def require_transport(scheme: str) -> None:
    """Raise ConfigError for a scheme that does not exist, or whose packages are not installed."""
    transport = _transport(scheme)
    if isinstance(transport, OneSidedTransport):
        transport.load()


def _transport(scheme: str) -> Transport | OneSidedTransport:
    try:
        return TRANSPORTS[scheme]
    except KeyError:
        raise ConfigError(f"no transport {scheme!r}; there are {', '.join(sorted(TRANSPORTS))}") from None
