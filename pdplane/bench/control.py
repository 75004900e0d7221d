"""`pdplane bench control`: what small rooms cost, on the native and on the legacy channel.

A decode process opens rooms of 24 KiB, a prefill process pushes each in two pushes; nobody computes anything. A room
is timed from `open` to its delivery. Afterwards the same with more and more rooms open that prefill never serves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import attrs

from pdplane.bench.control_far import BLOCK_TOKENS, CHANNELS, KV, MAX_ROOMS, processor_seconds, room_layout
from pdplane.bench.tables import print_table
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.kv.arena import Arena
from pdplane.kv.manifest import build_manifest
from pdplane.net import JsonLines
from pdplane.options import count
from pdplane.plane.config import DecodeConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.rooms import DecodeRoom

_PATIENCE_S = 60.0
_WARM_UP = 50  # rooms
_GROWN_IN_FLIGHT = 8


@attrs.frozen
class ControlPoint:
    """One measurement: so many rooms in flight beside so many that stay open."""

    channel: str
    in_flight: int
    open_rooms: int
    rooms_s: float
    p50_ms: float
    p99_ms: float
    decode_cpu_ms: float
    prefill_cpu_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to measure and how to show it."""
    parser.add_argument(
        "--channel",
        nargs="+",
        choices=CHANNELS,
        default=["native"],
        help="channels; legacy needs the extra mooncake, which then carries the bytes (default: native)",
    )
    parser.add_argument(
        "--in-flight", nargs="+", type=count, default=[1, 8, 64], metavar="N",
        help="rooms at one time (default: 1 8 64)",
    )  # fmt: skip
    parser.add_argument(
        "--open", nargs="*", type=count, default=[100, 1000, 4000], metavar="N",
        help="rooms that stay open beside eight in flight (default: 100 1000 4000)",
    )  # fmt: skip
    parser.add_argument("--rooms", type=count, default=2000, metavar="N", help="rooms a round (default: %(default)s)")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="rounds (default: %(default)s)")
    parser.add_argument(
        "--sessions",
        type=count,
        default=1,
        metavar="N",
        help="decode ranks that share the rooms (default: %(default)s)",
    )
    parser.add_argument(
        "--transport", choices=("tcp", "unix", "pull", "auto"), default="auto",
        help="what carries the bytes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--plot", metavar="FILE.png", help="file for a drawing; needs the extra plot (default: none)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises ConfigError."""
    draw = _plotter() if args.plot else None
    before = os.getloadavg()[0]
    points = [point for channel in args.channel for point in _measure(channel, args)]
    load = {"before": before, "after": os.getloadavg()[0]}
    results = {"rooms": args.rooms, "rounds": args.rounds, "sessions": args.sessions, "transport": args.transport}
    results |= {"cpus": os.cpu_count(), "load_average": load, "points": [attrs.asdict(point) for point in points]}
    if args.json:
        print(json.dumps(results))
    else:
        head = [field.name for field in attrs.fields(ControlPoint)]
        print_table(f"rooms of 24 KiB; load average {load['before']:.1f} and {load['after']:.1f}", head,
                    [attrs.astuple(point) for point in points])  # fmt: skip
    if draw is not None:
        draw(results, Path(args.plot))
    return 0


def _measure(channel: str, args: argparse.Namespace) -> Iterator[ControlPoint]:
    shapes = [(in_flight, 0) for in_flight in args.in_flight]
    shapes += [(_GROWN_IN_FLIGHT, number) for number in sorted(args.open)]
    transport = "mooncake" if channel == "legacy" else args.transport
    with Rooms(channel, transport, args.sessions, max(in_flight for in_flight, _ in shapes)) as rooms:
        rooms.serve(_WARM_UP, 1)
        for in_flight, still_open in shapes:
            if not args.json:
                print(f"measuring: {channel}, {in_flight} in flight, {still_open} open", file=sys.stderr)
            rooms.leave_open(still_open)
            yield _middle([rooms.round(args.rooms, in_flight) for _ in range(args.rounds)])


def _middle(rounds: Sequence[ControlPoint]) -> ControlPoint:
    """Return the medians of several rounds."""
    first = attrs.asdict(rounds[0])
    return ControlPoint(
        **{
            name: median(getattr(each, name) for each in rounds) if isinstance(value, float) else value
            for name, value in first.items()
        }
    )


class Rooms:
    """Decode planes here and a prefill process, between which rooms travel."""

    def __init__(self, channel: str, transport: str, sessions: int, in_flight: int) -> None:
        self._channel, self._next, self._open_rooms = channel, 1, 0
        self._stack = contextlib.ExitStack()
        layout = room_layout(in_flight + 1)
        self._manifests = [build_manifest(layout, {KV: (number + 1,)}, 0, BLOCK_TOKENS) for number in range(in_flight)]
        self._idle = build_manifest(layout, {KV: (in_flight + 1,)}, 0, BLOCK_TOKENS)
        config = DecodeConfig(
            transport=transport, legacy=channel == "legacy", max_rooms=MAX_ROOMS,
            bootstrap_timeout_s=3600, waiting_timeout_s=3600,
        )  # fmt: skip
        self._planes = [
            DecodePlane(config, layout=layout, arena=Arena.zeros(layout.arena_bytes)) for _ in range(sessions)
        ]
        self._words = [sys.executable, "-m", "pdplane.bench.control_far", channel, transport]

    def __enter__(self) -> Rooms:
        with contextlib.ExitStack() as stack:
            far = stack.enter_context(subprocess.Popen(self._words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert far.stdin is not None, "a pipe was asked for"
            stack.callback(far.stdin.close)
            self._far = JsonLines(far.stdout, far.stdin)
            self._rendezvous = Endpoint.parse(str(self._answer()))
            for plane in self._planes:
                stack.enter_context(plane)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def leave_open(self, number: int) -> None:
        """Open rooms that prefill never serves until there are so many."""
        while self._open_rooms < number:
            self._planes[0].open(self._next, prefill=self._rendezvous, manifest=self._idle)
            self._next += 1
            self._open_rooms += 1

    def round(self, rooms: int, in_flight: int) -> ControlPoint:
        """Measure so many rooms."""
        began, here, there = time.perf_counter(), processor_seconds(), self._ask(do="cpu")
        took = self.serve(rooms, in_flight)
        seconds = time.perf_counter() - began
        here, there = processor_seconds() - here, self._ask(do="cpu") - there
        cuts = quantiles(took, n=100)
        return ControlPoint(
            self._channel, in_flight, self._open_rooms, rooms / seconds,
            cuts[49] * 1e3, cuts[98] * 1e3, here / rooms * 1e3, there / rooms * 1e3,
        )  # fmt: skip

    def serve(self, rooms: int, in_flight: int) -> list[float]:
        """Let so many rooms travel; return how long each took, in seconds."""
        first, self._next = self._next, self._next + rooms
        self._ask(do="expect", first=first, count=rooms)
        free = list(range(in_flight))
        ready = threading.Semaphore(in_flight)
        took: list[float] = []
        failures: list[str] = []

        def ended(room: DecodeRoom, block: int, began: float, _done: object) -> None:
            if (error := room.done.exception()) is None:
                took.append(time.perf_counter() - began)
            else:
                failures.append(str(error))
            free.append(block)
            ready.release()

        for number in range(first, first + rooms):
            self._take(ready)
            block, began = free.pop(), time.perf_counter()
            plane = self._planes[number % len(self._planes)]
            room = plane.open(number, prefill=self._rendezvous, manifest=self._manifests[block])
            room.done.add_done_callback(partial(ended, room, block, began))
        for _ in range(in_flight):
            self._take(ready)
        if failures:
            raise ConfigError(f"{len(failures)} of {rooms} rooms failed: {failures[0]}")
        return took

    @staticmethod
    def _take(ready: threading.Semaphore) -> None:
        if not ready.acquire(timeout=_PATIENCE_S):
            raise ConfigError(f"no room ended in {_PATIENCE_S:g} s")

    def _ask(self, **command: object) -> float:
        self._far.send(command)
        found = self._answer()
        return float(found) if found is not None else 0.0

    def _answer(self) -> Any:  # noqa: ANN401 - whatever JSON carries
        try:
            return self._far.receive(_PATIENCE_S)
        except (EOFError, TimeoutError):
            raise ConfigError("the prefill process has ended or hangs; its error stands above") from None


def _plotter() -> Any:  # noqa: ANN401 - a function of a module that may be missing
    try:
        from pdplane.bench.plots import draw_control as draw
    except ImportError:
        raise ConfigError("--plot needs `pip install 'pdplane[plot]'`") from None
    return draw
