"""The settings of a data connection, and what transports report to their owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from pdplane.errors import ConfigError
from pdplane.ids import Generation, Life, Room, SessionId
from pdplane.messages import Landed, WriterCut
from pdplane.security import Tls
from pdplane.transport.framing import MAX_RUNS, MAX_SEGMENT_BYTES, XXH3, can_check
from pdplane.transport.greeting import MAX_STREAMS

MOONCAKE_PROTOCOLS = ("tcp", "rdma")
_MAY_BE_ZERO = ("resume_tries", "resume_pause_s")


@attrs.frozen
class TransportOptions:
    """Bounds and times of both sides.

    `socket_buffer_bytes` None means 256 KiB on one host (Unix sockets, loopback addresses) and the kernel's
    autotuning otherwise. `call_bytes` bounds one system call, `segment_bytes` one segment.
    """

    connect_timeout_s: float = 5.0
    greeting_timeout_s: float = 5.0
    """A receiver waits so long for each message of a greeting; a sender as long as for acknowledgements."""
    send_timeout_s: float = 30.0
    """Without a byte taken by the receiver for this long, the connection is over."""
    ack_timeout_s: float = 30.0
    """Without an acknowledgement or a byte taken for this long, the connection is over."""
    receive_timeout_s: float = 30.0
    """Without a byte inside a segment for this long, the connection is over; between segments it may be idle."""
    close_timeout_s: float = 5.0
    socket_buffer_bytes: int | None = None
    call_bytes: int = 16 << 20
    segment_bytes: int = 32 << 20
    segment_runs: int = MAX_RUNS
    max_queued: int = 32768
    """Pushes that wait to be sent; more fail at once. A room that streams layer by layer has dozens, 256 at most."""
    max_unacknowledged: int = 64
    """Pushes sent whole that await their acknowledgement; no other is begun meanwhile."""
    pull_window: int = 4
    """Segments that a receiver may have still to read from our memory, on connections that pull."""
    pull_call_bytes: int = 16 << 20
    """The most that one call copies from another process: what a closing room waits for."""
    resume_tries: int = 2
    """New connections for a push that a cut interrupted; 0 fails it at once."""
    resume_pause_s: float = 0.2
    """Pause before the second and each later of them, times their number."""
    streams: int = 1
    """Connections of one sender, over which large pushes are striped."""
    checksum: str = ""
    """`xxh3`: a sender adds it to each segment, a receiver demands it; needs the extra `checksum`."""
    max_connections: int = 256
    max_half_open: int = 32
    """Connections that have not finished their greeting; more are closed at once."""
    tls: Tls | None = None
    """Encrypts TCP connections; bytes that stay on this host by a shorter way are not encrypted."""
    mooncake_protocol: str = "tcp"
    """Of the transport mooncake: `tcp` or `rdma`."""
    mooncake_device: str = ""
    """The RDMA device by name; empty lets Mooncake choose."""

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if isinstance(value, int | float) and value <= 0 and (value or name not in _MAY_BE_ZERO):
                raise ConfigError(f"transport option {name} is {value}, it must be above zero")
        if self.segment_bytes > MAX_SEGMENT_BYTES:
            raise ConfigError(f"transport option segment_bytes is above {MAX_SEGMENT_BYTES}")
        if self.segment_runs > MAX_RUNS:
            raise ConfigError(f"transport option segment_runs is above {MAX_RUNS}")
        if self.streams > MAX_STREAMS:
            raise ConfigError(f"transport option streams is above {MAX_STREAMS}")
        self._check_words()

    def _check_words(self) -> None:
        if self.checksum not in ("", XXH3):
            raise ConfigError(f"there is no checksum {self.checksum!r}, only {XXH3}")
        if self.checksum and not can_check():
            raise ConfigError("the checksum xxh3 needs `pip install 'pdplane[checksum]'`")
        if self.mooncake_protocol not in MOONCAKE_PROTOCOLS:
            raise ConfigError(
                f"mooncake's protocol is {' or '.join(MOONCAKE_PROTOCOLS)}, not {self.mooncake_protocol!r}"
            )


# ---- Reports of a transport to its owner: frozen values, passed to one callback on transport threads


@attrs.frozen
class Connected:
    """A sender's greeting was accepted; `life` is the one that answered at the session's address.

    `way` is what carries the bytes: tcp, unix, pull, loopback, mooncake.
    """

    session: SessionId
    decode_life: Life
    way: str


@attrs.frozen
class ConnectFailed:
    """A sender got no connection and has stopped trying."""

    session: SessionId
    cause: str


@attrs.frozen
class Pushed:
    """The receiver acknowledged every byte of a push."""

    session: SessionId
    room: Room
    generation: Generation
    push: int
    nbytes: int


@attrs.frozen
class PushFailed:
    """A push did not land whole: refused, cancelled, cut, or the sender was closed."""

    session: SessionId
    room: Room
    generation: Generation
    push: int
    cause: str


@attrs.frozen
class Disconnected:
    """A sender's connection is over; the failures of its pushes were reported before this."""

    session: SessionId
    cause: str


@attrs.frozen
class Resumed:
    """A cut left so many pushes unfinished; the sender connects again and repeats them."""

    session: SessionId
    pushes: int
    cause: str


Report: TypeAlias = Connected | ConnectFailed | Pushed | PushFailed | Disconnected | Resumed | Landed | WriterCut
OnReport: TypeAlias = Callable[[Report], None]
"""Runs on the thread that moves bytes, so it must not block or raise."""
