"""A daemon that is one rank of a split model, as `mlx.launch -n N pdplane prefill ...` starts it.

All ranks have the same command line. Rank 0 serves HTTP and, for prefill, the rendezvous; the ports that are given are
rank 0's, and a fixed port of its own that every rank needs counts up with the rank. All ranks end together: a signal
to one of them ends them in order, the death of one ends the others at once, and so does the launcher's, since it leaves
its processes running when it dies.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import attrs
from aiohttp import web

from pdplane.cli.daemon import mlx_needed, run_daemon
from pdplane.cli.flags import TOY, DaemonOptions
from pdplane.cli.process import END_S, StopSignal, exit_with_parent, killable, leave_within
from pdplane.control.http_thread import HttpThread
from pdplane.control.ranks import RankLink, RankListener, connect_rank
from pdplane.engine.blas import share_cores
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.node.ranks import BeginLeg, Follower, Lead, Meet, Ranks
from pdplane.plane.config import PlaneConfig, is_loopback

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=PlaneConfig)
L = TypeVar("L", bound=Lead)

_LOST_S = 5.0  # for an orderly end without the others
_MEETING_S = 120
_LOOK_S = 0.1
_OWN_PORTS = ("control_port", "legacy_port", "data_port", "status_port")


@attrs.frozen
class Seat:
    """A process's place among the ranks of a split model; `host` is its own address on their ring.

    `here` ranks, this one included, have that address.
    """

    rank: int
    size: int
    host: str
    here: int = 1


def seat_here(environ: Mapping[str, str] = os.environ) -> Seat | None:
    """Return this process's place as the launcher set it: MLX_RANK and the hosts in MLX_HOSTFILE; None for a single
    one.

    Raises ConfigError.
    """
    rank, file = environ.get("MLX_RANK"), environ.get("MLX_HOSTFILE")
    if not rank or not file:
        return None
    try:
        with open(file, encoding="utf-8") as opened:
            text = opened.read().strip()
        hosts = json.loads(text) if text else []
        if len(hosts) < 2:
            return None
        if not 0 <= int(rank) < len(hosts):
            raise ConfigError(f"MLX_RANK is {rank}, but MLX_HOSTFILE names {len(hosts)} ranks")
        addresses = [Endpoint.parse(host[0]).host for host in hosts]
        own = addresses[int(rank)]
        return Seat(int(rank), len(hosts), own, addresses.count(own))
    except (OSError, ValueError, TypeError, LookupError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"MLX_RANK={rank} and MLX_HOSTFILE={file} describe no ranks: {error}") from error


def seated(config: C, seat: Seat) -> C:
    """Return this rank's config: --advertise-host is rank 0's, ranks on other machines use their ring address."""
    changes: dict[str, Any] = {"tp_size": seat.size, "tp_rank": seat.rank}
    if seat.rank > 0 and not is_loopback(config.host) and not is_loopback(seat.host):
        changes["advertise_host"] = seat.host
    for name in _OWN_PORTS:
        if getattr(config, name, 0):
            changes[name] = getattr(config, name) + seat.rank
    return attrs.evolve(config, **changes)


class RankProcess:
    """One rank's process: its group, its link to rank 0 or the others, and how it ends."""

    def __init__(self, seat: Seat, options: DaemonOptions, config: PlaneConfig) -> None:
        if options.engine.model == TOY:
            raise ConfigError("the toy cannot be split over ranks")
        share_cores(seat.here)
        with mlx_needed(options.blas):
            from pdplane.engine.ranks import RankGroup
        self.seat, self._options, self._config = seat, options, config
        self.group = RankGroup(seat.rank, seat.size)

    def watch_parent(self) -> None:
        """End with the launcher, which closes our standard input when it ends, unless that is a terminal or a file."""
        asked = self._options.exit_with_parent
        if (asked and self.seat.rank > 0) or (not asked and stat.S_ISFIFO(os.fstat(0).st_mode)):
            exit_with_parent()  # rank 0's daemon does this itself

    def lost(self, reason: str) -> None:
        """Log why the ranks cannot go on together, and exit without cleaning up unless the main thread ends soon."""
        logger.error("%s: this rank ends too", reason)
        leave_within(_LOST_S)

    def ends(self) -> None:
        """Bound an orderly end in time; ranks that have not met have no requests to wait for."""
        leave_within(self._options.drain_timeout_s + END_S if self.group.is_open else _LOST_S)

    def meet_as_first(self) -> list[RankLink]:
        """Open the group as rank 0, tell the others where we listen, return the links to them. Raises ConfigError."""
        self._open()
        listener = RankListener(self._config.host)
        try:
            address = Endpoint(self._config.advertised, listener.port)
            self.group.tell_all(f"{address} {listener.word}".encode())
            return listener.accept(self.seat.size)
        finally:
            listener.close()

    def meet_first(self) -> RankLink:
        """Open the group as another rank and return the link to rank 0. Raises ConfigError."""
        self._open()
        address, _, word = self.group.tell_all(b"").decode("ascii").partition(" ")
        return connect_rank(Endpoint.parse(address), word, self.seat.rank)

    def _open(self) -> None:
        logger.info("rank %s of %s waits for the others, %s s at most", self.seat.rank, self.seat.size, _MEETING_S)
        with killable(_MEETING_S):
            self.group.open()


def lead(
    role: str,
    rank: RankProcess,
    options: DaemonOptions,
    config: PlaneConfig,
    make_lead: Callable[[HttpThread, Mapping[str, Any], Ranks, Meet, Callable[[str], None]], L],
    make_app: Callable[[L], web.Application],
) -> int:
    """Run rank 0; return the exit code."""
    rank.watch_parent()

    def make(http: HttpThread, facts: Mapping[str, Any]) -> L:
        ranks = Ranks(rank.group.thread, rank.seat.size)
        return make_lead(http, facts, ranks, rank.meet_as_first, rank.lost)

    return run_daemon(role, options, config, make, make_app, on_end=rank.ends)


def follow(
    role: str,
    rank: RankProcess,
    options: DaemonOptions,
    make_node: Callable[[HttpThread, Follower], tuple[PrefillNode | DecodeNode, BeginLeg]],
) -> int:
    """Run another rank until rank 0 leaves; return the exit code. Raises ConfigError."""
    stop, http = StopSignal(options.drain_timeout_s + END_S), HttpThread()
    with stop.listening():
        rank.watch_parent()
        node: PrefillNode | DecodeNode | None = None
        follower: Follower | None = None
        try:
            with stop.interrupting():
                follower = Follower(rank.meet_first(), rank.group.thread, rank.lost)
                follower.start()
                http.start()
                node, begin = make_node(http, follower)
                node.start()
            return _follow(role, node, begin, follower, stop, rank)
        except KeyboardInterrupt:
            return 0
        finally:
            rank.ends()
            if node is not None:
                node.close()
            rank.group.close()
            if follower is not None:
                follower.close()
            http.close()


def _follow(
    role: str,
    node: PrefillNode | DecodeNode,
    begin: BeginLeg,
    follower: Follower,
    stop: StopSignal,
    rank: RankProcess,
) -> int:
    up = left = False
    while not follower.bye.is_set():
        if follower.trouble is not None:
            return 1
        if not node.alive:
            logger.error("a thread of %s rank %s has died", role, rank.seat.rank)
            return 1
        if not up and node.ready:
            up = True
            follower.up(begin)
            logger.info("%s rank %s of %s is up", role, rank.seat.rank, rank.seat.size)
        if left:
            time.sleep(_LOOK_S)
        elif stop.wait(_LOOK_S):
            left = True
            rank.ends()
            follower.leave()
    return 0
