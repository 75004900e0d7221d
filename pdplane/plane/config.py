"""What an embedder sets; every deadline in seconds, every default for one host."""

from __future__ import annotations

import ipaddress
import logging

import attrs

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.net import NAMES, as_endpoint, reached
from pdplane.security import Secret
from pdplane.transport.registry import is_one_sided
from pdplane.transport.reports import TransportOptions

logger = logging.getLogger(__name__)

DEFAULT_BOOTSTRAP_PORT = 8998
_LOOK_UP_S = 5.0
_WILDCARDS = ("0.0.0.0", "::")


def _rendezvous(value: Endpoint | str | None) -> Endpoint | None:
    return None if value is None else as_endpoint(value, "rendezvous")


@attrs.frozen(kw_only=True)
class PlaneConfig:
    """What both roles have in common.

    `advertise_host` is the address that peers are told; it defaults to `host`. Port 0 takes a free one. Ended rooms
    are remembered for `tombstone_s`, so that late messages are told apart from unknown ones.

    `legacy` opens the channel for peers of the older generation too. None opens it unless there is a `legacy_obstacle`;
    True opens it in spite of a secret and is a ConfigError with any other obstacle. The cache travels between them and
    us by `legacy_transport`, by default the same as `transport`; theirs is mooncake. `legacy_lacks` says what this side
    lacks to serve them, and rooms that meet one fail with it.

    A half of a request waits `peer_timeout_s` at most for the first word of the other half, by default as long as
    `bootstrap_timeout_s`, which bounds what follows. Rooms in line for decode's blocks wait for `waiting_timeout_s`.

    `max_rooms` bounds the rooms that are live at one time; more fail at once with "too many live rooms". With
    `record_events` the plane keeps what `poll` gives. Raises ConfigError.
    """

    host: str = "127.0.0.1"
    advertise_host: str | None = None
    tp_size: int = 1
    tp_rank: int = 0
    secret: Secret | None = None
    peer_timeout_s: float | None = None
    bootstrap_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    ping_interval_s: float = 2.0
    tombstone_s: float = 10.0
    transport: str = "auto"
    transport_options: TransportOptions = attrs.field(factory=TransportOptions)
    legacy: bool | None = None
    legacy_transport: str | None = None
    legacy_lacks: str = ""
    record_events: bool = False
    max_rooms: int = 4096

    def __attrs_post_init__(self) -> None:
        self._check_addresses()
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError(f"tp_rank {self.tp_rank} is outside 0..{self.tp_size - 1}")
        for name in ("peer_timeout_s", "bootstrap_timeout_s", "waiting_timeout_s"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name} is below 1 s")
        for name in ("ping_interval_s", "tombstone_s", "max_rooms"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above zero")
        for name, value in attrs.asdict(self, recurse=False).items():
            if name.endswith("_port") and not 0 <= value <= 65535:
                raise ConfigError(f"{name} is {value}, a port is 0..65535")

    def _check_addresses(self) -> None:
        if not self.host:
            raise ConfigError("host is empty")
        if self.advertised in _WILDCARDS:
            raise ConfigError(
                f"host {self.host} is every interface: say which address peers can reach (advertise_host)"
            )
        if self.transport_options.tls is not None and is_one_sided(self.transport):
            raise ConfigError(f"transport {self.transport} cannot be encrypted: leave TLS out, or take tcp or auto")
        if self.legacy and (obstacle := self._unreachable):
            raise ConfigError(f"no legacy peers: {obstacle}")

    @property
    def patience_s(self) -> float:
        """How long a half waits for the first word of the other one."""
        return min(self.peer_timeout_s or self.bootstrap_timeout_s, self.bootstrap_timeout_s)

    @property
    def groups(self) -> int:
        """How many data-parallel groups there are on this side."""
        return 1

    @property
    def advertised(self) -> str:
        return self.advertise_host or self.host

    def reached(self, bound: Endpoint) -> Endpoint:
        """Return where peers reach a socket of ours: one on every interface has no address of its own."""
        return reached(bound, self.advertised)

    @property
    def speaks_legacy(self) -> bool:
        """Whether the legacy channel is open."""
        return bool(self.legacy) or (self.legacy is None and self.legacy_obstacle is None)

    @property
    def legacy_obstacle(self) -> str | None:
        """Why the legacy channel stays closed unless it is asked for; None without such a reason."""
        if self.secret is not None:
            return "they cannot prove that they know the secret"
        if self.transport_options.tls is not None:
            return "they cannot encrypt"
        return self._unreachable

    @property
    def _unreachable(self) -> str | None:
        if ":" in self.advertised:
            return f"they cannot reach the IPv6 address {self.advertised}: advertise an IPv4 address or a name"
        if ":" in self.host and self.host != "::":
            return f"they cannot reach a socket on the IPv6 address {self.host}: listen on :: or on an IPv4 address"
        return None


@attrs.frozen(kw_only=True)
class PrefillConfig(PlaneConfig):
    """A prefill rank. `rendezvous` names another rank's; without it this rank serves one at `bootstrap_port`.

    `legacy_port` is where legacy decode ranks push to.
    """

    control_port: int = 0
    legacy_port: int = 0
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    rendezvous: Endpoint | None = attrs.field(default=None, converter=_rendezvous)
    dp_size: int = 1
    dp_rank: int = 0
    exact: bool = False

    @property
    def groups(self) -> int:
        return self.dp_size

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not 0 <= self.dp_rank < self.dp_size:
            raise ConfigError(f"dp_rank {self.dp_rank} is outside 0..{self.dp_size - 1}")


@attrs.frozen(kw_only=True)
class DecodeConfig(PlaneConfig):
    """A decode rank; `data_port` is where prefill ranks connect to push.

    A room finds its prefill within `peer_timeout_s`, however slow the rendezvous is to answer. Where nobody
    accepts a connection at all it is given up after `unreachable_timeout_s`: raise that where prefill may start later.

    `status_port` is where legacy prefill ranks report. Blocks of a failed room that such a rank may still write to
    are held for `quarantine_timeout_s` after its last status.
    """

    data_port: int = 0
    status_port: int = 0
    unreachable_timeout_s: float = 1.5
    quarantine_timeout_s: float = 300.0

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        for name in ("unreachable_timeout_s", "quarantine_timeout_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is below 0 s")


def log_legacy(config: PlaneConfig, others: str) -> None:
    """Log what an operator may not expect of the legacy channel and of one-sided transports."""
    if config.secret is not None and is_one_sided(config.transport):
        logger.warning(
            "transport %s asks nobody for the secret: whoever reaches its port may write here", config.transport
        )
    if config.speaks_legacy and config.secret is not None:
        logger.warning(
            "legacy %s ranks are heard without any proof of the secret: whoever reaches this port may pose as one",
            others,
        )
    elif not config.speaks_legacy and config.legacy is None:
        logger.info("legacy %s ranks are not heard: %s", others, config.legacy_obstacle)


def is_loopback(host: str) -> bool:
    """Return whether an address or name stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = NAMES.find(host, 0, _LOOK_UP_S)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)
