"""What both roles of the interop peer share: options, events, the ranks' agreement, the loop over rooms, the planes."""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import attrs

from pdplane.control.lookup import Announcement, PrefillFound, PrefillNotFound
from pdplane.errors import ConfigError, PdplaneError, RoomFailed
from pdplane.ids import MAX_ROOM, Endpoint, GroupId, Room
from pdplane.kv.arena import Arena
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import logical_slots
from pdplane.messages import StatusCode
from pdplane.net import JsonLines, listen
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.testing.bench_layouts import LAYOUTS, bench_layout
from pdplane.transport.reports import TransportOptions
from pdplane.wire import decode_layout

ROLES = ("prefill", "decode", "bootstrap")
CHANNELS = ("legacy", "native")
OUTCOMES = ("success", "failed", "timeout")


@attrs.frozen(kw_only=True)
class InteropOptions:
    """One rank of one side."""

    role: str
    host: str
    protocol: str
    transport: str
    channel: str
    bootstrap_port: int
    serve_bootstrap: bool
    bootstrap: Endpoint | None
    wait_bootstrap: float
    layout: str
    layout_file: str | None
    arena_blocks: int
    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int
    reduce_port: int
    rooms: tuple[Room, ...]
    prompt_len: int
    prefix_len: int
    token: int
    spec: tuple[int, ...]
    layerwise_interval: int
    target_layers: int
    chunk: int
    chunk_start: int
    abort: int
    expect: str
    timeout: float
    linger: float
    log_level: str

    @property
    def rendezvous(self) -> Endpoint:
        """Where a decode looks for prefill, and where a prefill registers."""
        return self.bootstrap or Endpoint(self.host, self.bootstrap_port)

    @property
    def reduce_at(self) -> Endpoint:
        """Where the ranks of one side meet; port 0 means that they do not."""
        return Endpoint(self.host, self.reduce_port)

    def make_layout(self) -> Layout:
        """Return this rank's layout. Raises ConfigError or WireError."""
        if self.layout_file is None:
            return bench_layout(self.layout, self.tp_size, self.arena_blocks)
        try:
            return decode_layout(json.dumps(json.loads(Path(self.layout_file).read_text())).encode())
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"--layout-file {self.layout_file}: {wrong}") from wrong


def parse(words: Sequence[str]) -> InteropOptions:
    """Return the options; a wrong one ends in SystemExit 2. Raises ConfigError for options that do not fit together."""
    values = vars(_parser().parse_args(words))
    options = InteropOptions(**values)
    if not 0 <= options.tp_rank < options.tp_size:
        raise ConfigError(f"--tp-rank {options.tp_rank} is outside 0..{options.tp_size - 1}")
    if not 0 <= options.dp_rank < options.dp_size:
        raise ConfigError(f"--dp-rank {options.dp_rank} is outside 0..{options.dp_size - 1}")
    if options.channel == "legacy" and options.transport != "mooncake":
        # Our own transports admit a writer by its life and generation, which only native notices carry.
        raise ConfigError(f"--transport {options.transport} needs --channel native; legacy peers write with mooncake")
    if options.log_level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {options.log_level} is none of {', '.join(logging.getLevelNamesMapping())}")
    if not 0 <= options.prefix_len < options.prompt_len:
        raise ConfigError(f"--prefix-len {options.prefix_len} is outside 0..{options.prompt_len - 1}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdplane.testing.interop_peer",
        description="One rank of one side, with synthetic pages and no model; events as JSON lines on stdout.",
    )
    parser.add_argument("role", choices=ROLES, help="side that is played; bootstrap is the rendezvous alone")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address on which everything listens (default: %(default)s)"
    )
    parser.add_argument(
        "--protocol", default="tcp", help="protocol that Mooncake uses, tcp or rdma (default: %(default)s)"
    )
    parser.add_argument(
        "--transport",
        default="mooncake",
        help="how pages travel: mooncake, or one of ours: auto, tcp, unix, pull (default: %(default)s)",
    )
    parser.add_argument(
        "--channel", choices=CHANNELS, default="legacy", help="generation of the control channel (default: %(default)s)"
    )
    parser.add_argument(
        "--bootstrap-port", type=int, default=18998, help="port of the rendezvous (default: %(default)s)"
    )
    parser.add_argument("--serve-bootstrap", action="store_true", help="run the rendezvous too, on prefill")
    parser.add_argument(
        "--bootstrap",
        type=Endpoint.parse,
        metavar="HOST:PORT",
        help="rendezvous (default: --host with --bootstrap-port)",
    )
    parser.add_argument(
        "--wait-bootstrap",
        type=float,
        default=20.0,
        metavar="S",
        help="longest wait for the rendezvous (default: %(default)s)",
    )
    parser.add_argument(
        "--layout", choices=sorted(LAYOUTS), default="full_attention", help="layout, by its name (default: %(default)s)"
    )
    parser.add_argument("--layout-file", metavar="JSON", help="file with a layout (default: that of --layout)")
    parser.add_argument(
        "--arena-blocks", type=int, default=63, metavar="N", help="parents of the arena (default: %(default)s)"
    )
    parser.add_argument("--tp-size", type=int, default=1, help="ranks of this side (default: %(default)s)")
    parser.add_argument("--tp-rank", type=int, default=0, help="number of this rank (default: %(default)s)")
    parser.add_argument("--dp-size", type=int, default=1, help="data-parallel groups of prefill (default: %(default)s)")
    parser.add_argument(
        "--dp-rank", type=int, default=0, help="data-parallel group of this rank (default: %(default)s)"
    )
    parser.add_argument(
        "--reduce-port", type=int, default=0, help="port at which the ranks of one side agree (default: they do not)"
    )
    parser.add_argument("--rooms", type=_rooms, default=(Room(1),), metavar="N,N", help="rooms to run (default: 1)")
    parser.add_argument("--prompt-len", type=int, default=22, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument(
        "--prefix-len", type=int, default=0, help="tokens that decode has already (default: %(default)s)"
    )
    parser.add_argument("--token", type=int, default=1234, help="first token, from prefill (default: %(default)s)")
    parser.add_argument(
        "--spec", type=_integers, default=(), metavar="N,N", help="speculative candidates, from prefill (default: none)"
    )
    parser.add_argument(
        "--layerwise-interval", type=int, default=0, metavar="N", help="layers that are sent together (default: all)"
    )
    parser.add_argument(
        "--target-layers", type=int, default=0, metavar="N", help="layers of the target model (default: all)"
    )
    parser.add_argument(
        "--chunk", type=int, default=0, metavar="N", help="tokens of one chunk (default: the whole prompt)"
    )
    parser.add_argument(
        "--chunk-start", type=int, default=0, metavar="N", help="first token of the first chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--abort", type=int, default=-1, metavar="ROOM", help="room that prefill gives up (default: none)"
    )
    parser.add_argument(
        "--expect", choices=OUTCOMES, default="success", help="end of every room for exit code 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, metavar="S", help="longest wait for the rooms (default: %(default)s)"
    )
    parser.add_argument(
        "--linger",
        type=float,
        default=0.3,
        metavar="S",
        help="time between the last room and the end (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", default="ERROR", help="least severe messages that are logged (default: %(default)s)"
    )
    return parser


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.strip())


def _rooms(text: str) -> tuple[Room, ...]:
    rooms = _integers(text)
    if not rooms or not all(0 <= room <= MAX_ROOM for room in rooms) or len(set(rooms)) < len(rooms):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different rooms")
    return tuple(Room(room) for room in rooms)


# ---- What the interop peer prints: one JSON object a line, with the seconds since the start


class EventLog:
    """Lines on standard output, or whatever `send` does with them; any thread may write."""

    def __init__(self, send: Callable[[object], None] | None = None) -> None:
        self._send = send or JsonLines(writer=sys.stdout).send
        self._started = time.monotonic()

    def __call__(self, event: str, **values: object) -> None:
        self._send({"event": event, "t": round(self.now, 6), **values})

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started


# ---- The ranks of one side agree on each poll: the minimum of every room's state, taken by rank 0


_PATIENCE_S = 20.0


class Reduce(Protocol):
    """One collective call a poll."""

    def minimum(self, states: Sequence[int]) -> list[int]:
        """Return the least state of each room over the ranks; our own when the others are gone."""

    def close(self) -> None: ...


class Alone:
    """Ranks that do not wait for each other."""

    def minimum(self, states: Sequence[int]) -> list[int]:
        return list(states)

    def close(self) -> None:
        """Do nothing, since nothing is open."""


def join_ranks(where: Endpoint, tp_size: int, tp_rank: int) -> Reduce:
    """Meet the other ranks at rank 0's address and wait for all of them. Raises ConfigError."""
    if where.port <= 0 or tp_size == 1:
        return Alone()
    try:
        return _gather(where, tp_size) if tp_rank == 0 else _Member(_connect(where))
    except OSError as error:
        raise ConfigError(f"the ranks do not meet at {where}: {error}") from error


class _Line:
    """Lists of states over one connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._connection, self._lines = connection, JsonLines(connection, connection)

    def send(self, states: Sequence[int]) -> None:
        self._lines.send(list(states))

    def receive(self) -> list[int]:
        try:
            found: Any = self._lines.receive(_PATIENCE_S)
        except EOFError:
            raise ConnectionResetError("the rank is gone") from None
        return [int(state) for state in found]

    def close(self) -> None:
        self._connection.close()


class _Leader:
    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines

    def minimum(self, states: Sequence[int]) -> list[int]:
        try:
            every = [list(states), *(line.receive() for line in self._lines)]
            least = [min(column) for column in zip(*every, strict=True)]
            for line in self._lines:
                line.send(least)
        except OSError:
            self.close()
            return list(states)
        return least

    def close(self) -> None:
        for line in self._lines:
            line.close()
        self._lines = []


class _Member:
    def __init__(self, line: _Line) -> None:
        self._line: _Line | None = line

    def minimum(self, states: Sequence[int]) -> list[int]:
        if self._line is None:
            return list(states)
        try:
            self._line.send(states)
            return self._line.receive()
        except OSError:
            self.close()
            return list(states)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def _gather(where: Endpoint, tp_size: int) -> _Leader:
    with listen(where) as server:
        server.settimeout(_PATIENCE_S)
        return _Leader([_Line(server.accept()[0]) for _ in range(tp_size - 1)])


def _connect(where: Endpoint) -> _Line:
    """Connect to rank 0, which may start later than we do."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _Line(socket.create_connection((where.host, where.port), _PATIENCE_S))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# ---- One loop over the rooms of one rank: poll, agree with the other ranks, act on what was agreed


FAILED: int = StatusCode.FAILED.value
BOOTSTRAPPING: int = StatusCode.BOOTSTRAPPING.value
BOOTSTRAPPED: int = StatusCode.BOOTSTRAPPED.value
SUCCESS: int = StatusCode.SUCCESS.value
NAMES = {code.value: "".join(word.title() for word in code.name.split("_")) for code in StatusCode}

_POLL_S = 0.001  # delay at most of what no future reports, such as an offer


class Run(Protocol):
    """One room on this rank."""

    room: Room
    outcome: str | None
    """`success` or `failed` once it has ended on every rank that agrees."""

    @property
    @abstractmethod
    def state(self) -> int:
        """The room's state on this rank, as a status code."""

    @abstractmethod
    def advance(self, agreed: int) -> None:
        """Act on the state that all ranks have reached; called at every poll until the outcome is known."""


class Alarm:
    """Wakes the loop before its next poll is due."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def watch(self, *futures: Future[Any]) -> None:
        for future in futures:
            future.add_done_callback(lambda _done: self._rung.set())

    def wait(self) -> None:
        self._rung.wait(_POLL_S)
        self._rung.clear()


def drive(
    runs: Sequence[Run], reduce: Reduce, alarm: Alarm, timeout_s: float, poll: Callable[[], None] = lambda: None
) -> None:
    """Run until every room has ended, or `timeout` is its outcome; `poll` runs before each round."""
    deadline = time.monotonic() + timeout_s
    while any(run.outcome is None for run in runs) and time.monotonic() < deadline:
        poll()
        for run, agreed in zip(runs, reduce.minimum([run.state for run in runs]), strict=True):
            if run.outcome is None:
                run.advance(agreed)
        alarm.wait()
    for run in runs:
        run.outcome = run.outcome or "timeout"


def finish(events: EventLog, role: str, runs: Sequence[Run], expect: str, **more: object) -> bool:
    """Print the last event; return whether every room ended as expected."""
    events("done", role=role, rooms={str(run.room): run.outcome for run in runs}, **more)
    return all(run.outcome == expect for run in runs)


def reason_of(future: Future[Any], default: str = "another rank failed it") -> str:
    """Return why a room's future failed."""
    error = future.exception() if future.done() else None
    if isinstance(error, RoomFailed):
        return error.text
    return str(error) if isinstance(error, PdplaneError) else default


def tables(layout: Layout, blocks: Mapping[GroupId, Sequence[int]], prefix_len: int, prompt_len: int) -> dict[str, Any]:
    """Return the block ids by slot for each group; -1 where the room has none."""
    found = {}
    for group_id, ids in blocks.items():
        slots = logical_slots(layout.spec(group_id), prefix_len, prompt_len)
        found[str(group_id)] = [-1] * slots.start + list(ids)
    return found


# ---- The planes behind an interop peer: the product's own, set up for either channel
#
# On the legacy channel they leave out what native peers recognise each other by, so that two of them use it too.


_SLACK_S = 60.0  # so that the peer's own deadline comes before the plane's
_LEGACY_KEYS = ("role", "world_size", "dp_size", "rank_ip", "rank_port", "engine_rank", "cache_layout")


def prefill_plane(options: InteropOptions, layout: Layout, arena: Arena) -> PrefillPlane:
    """Return a prefill rank that is not started yet. Raises ConfigError."""
    legacy = options.channel == "legacy"
    config = PrefillConfig(
        host=options.host,
        tp_size=options.tp_size,
        tp_rank=options.tp_rank,
        dp_size=options.dp_size,
        dp_rank=options.dp_rank,
        transport=options.transport,
        transport_options=TransportOptions(mooncake_protocol=options.protocol),
        legacy=legacy,
        bootstrap_port=options.bootstrap_port,
        rendezvous=None if options.serve_bootstrap else options.rendezvous,
        bootstrap_timeout_s=options.timeout + _SLACK_S,
        waiting_timeout_s=options.timeout + _SLACK_S,
    )
    return (LegacyPrefillPlane if legacy else PrefillPlane)(config, layout=layout, arena=arena)


def decode_plane(options: InteropOptions, layout: Layout, arena: Arena) -> DecodePlane:
    """Return a decode rank that is not started yet. Raises ConfigError."""
    legacy = options.channel == "legacy"
    config = DecodeConfig(
        host=options.host,
        tp_size=options.tp_size,
        tp_rank=options.tp_rank,
        transport=options.transport,
        transport_options=TransportOptions(mooncake_protocol=options.protocol),
        legacy=legacy,
        bootstrap_timeout_s=max(1.0, options.wait_bootstrap),
        waiting_timeout_s=options.timeout + _SLACK_S,
        record_events=True,
    )
    return (_LegacyDecodePlane if legacy else DecodePlane)(config, layout=layout, arena=arena)


class LegacyPrefillPlane(PrefillPlane):
    """A prefill rank that announces itself as a legacy rank does."""

    def _announcement(self) -> Announcement:
        return _LegacyAnnouncement(**attrs.asdict(super()._announcement()))


@attrs.frozen
class _LegacyAnnouncement(Announcement):
    def body(self) -> str:
        found = json.loads(super().body())
        return json.dumps({key: found[key] for key in _LEGACY_KEYS})


class _LegacyDecodePlane(DecodePlane):
    def _found(self, number: Room, found: PrefillFound | PrefillNotFound) -> None:
        if isinstance(found, PrefillFound):
            ranks = tuple(attrs.evolve(rank, router_port=None, life=None) for rank in found.ranks)
            found = attrs.evolve(found, ranks=ranks)
        super()._found(number, found)
