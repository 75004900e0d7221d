"""The settings of a data connection; every one has a default that suits two nodes on one network."""

from __future__ import annotations

import attrs

from pdplane.errors import ConfigError
from pdplane.transport.framing import MAX_RUNS, MAX_SEGMENT_BYTES

MOONCAKE_PROTOCOLS = ("tcp", "rdma")


@attrs.frozen
class TransportOptions:
    """Bounds and times of both sides.

    `socket_buffer_bytes` None means 256 KiB to a loopback address and the
    kernel's autotuning to any other. `call_bytes` bounds one system call, `segment_bytes` one segment.
    """

    connect_timeout_s: float = 5.0
    greeting_timeout_s: float = 5.0
    send_timeout_s: float = 30.0
    """Without a byte taken by the receiver for this long, the connection is over."""
    ack_timeout_s: float = 30.0
    """Without an acknowledgement or a byte taken for this long, the connection is over."""
    receive_timeout_s: float = 30.0
    """Without a byte inside a segment for this long, the connection is over; between segments it may rest."""
    close_timeout_s: float = 5.0
    socket_buffer_bytes: int | None = None
    call_bytes: int = 16 << 20
    segment_bytes: int = 32 << 20
    segment_runs: int = MAX_RUNS
    max_queued: int = 4096
    """Pushes that wait to be sent; more fail at once."""
    max_unacknowledged: int = 64
    max_connections: int = 256
    max_half_open: int = 32
    """Connections that have not finished their greeting; more are closed at once."""
    mooncake_protocol: str = "tcp"
    """Of the transport mooncake: `tcp` or `rdma`."""
    mooncake_device: str = ""
    """The RDMA device by name; empty lets Mooncake choose."""

    def __attrs_post_init__(self) -> None:
        for name, value in attrs.asdict(self).items():
            if isinstance(value, int | float) and value <= 0:
                raise ConfigError(f"transport option {name} is {value}, it must be above zero")
        if self.segment_bytes > MAX_SEGMENT_BYTES:
            raise ConfigError(f"transport option segment_bytes is above {MAX_SEGMENT_BYTES}")
        if self.segment_runs > MAX_RUNS:
            raise ConfigError(f"transport option segment_runs is above {MAX_RUNS}")
        if self.mooncake_protocol not in MOONCAKE_PROTOCOLS:
            raise ConfigError(
                f"mooncake's protocol is {' or '.join(MOONCAKE_PROTOCOLS)}, not {self.mooncake_protocol!r}"
            )
