"""`pdplane bench soak`: two prefills and two decodes under random load, cancels, stops and kills.

Every byte of every room says where it belongs, every block that nobody has borrowed is empty, and the counts of the
two processes that are never killed have to come back to where they were.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any

import attrs

from pdplane.bench.control_far import BLOCK_TOKENS
from pdplane.bench.soak_side import BOOTSTRAP_S, MAX_BLOCKS_A_ROOM, WAITING_S
from pdplane.bench.tables import print_table
from pdplane.errors import ConfigError
from pdplane.net import JsonLines
from pdplane.options import count

IN_FLIGHT = 12  # rooms of each pair at one time
_PATIENCE_S = 60.0
_DEADLINE_S = BOOTSTRAP_S + WAITING_S + 15.0  # a stop of a process holds its own rooms up, and pings take a while
_SHARE_CANCELLED, _SHARE_HALVES = 0.08, 0.01
_STOPS_EVERY_S, _KILLS_EVERY_S, _LONGEST_STOP_S = 8.0, 15.0, 4.0
_ENOUGH_ROOMS = 50_000
"""Fewer say little about the growth of memory."""
_MAX_GROWTH = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: how long, and from which seed."""
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="how long (default: %(default)s)")
    parser.add_argument(
        "--seed", type=count, default=1, metavar="N", help="start of the random choices (default: %(default)s)"
    )
    parser.add_argument(
        "--transport", choices=("tcp", "unix", "pull", "auto"), default="auto",
        help="what carries the bytes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    """Soak and print; return 0 only if nothing was wrong, stray, left or late. Raises ConfigError."""
    with Soak(args.transport, args.seed) as soak:
        soak.load(min(20.0, args.minutes * 6), faults=False)  # warm-up
        soak.note_start()
        soak.load(args.minutes * 60, faults=True)
        found = soak.result()
    found = {"minutes": args.minutes, "seed": args.seed, "transport": args.transport, **found}
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if not found["complaints"] else 1


@attrs.define(eq=False)
class _Half:
    """A process: one side of two pairs. The address is empty while it is dead; it comes back at the same port."""

    role: str
    number: int
    process: subprocess.Popen[bytes]
    lines: JsonLines
    address: str = ""
    counts: dict[str, Any] | None = None
    is_stopped: bool = False
    port: int = 0

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@attrs.define(eq=False)
class _Room:
    """A room under way; `open` are the halves that have not told their end."""

    pair: tuple[_Half, _Half]
    open: set[str]
    began: float
    disturbed: bool


class Soak:
    """The four processes and the chances that befall them."""

    def __init__(self, transport: str, seed: int) -> None:
        self._transport, self._chance = transport, random.Random(seed)
        self._news: queue.SimpleQueue[tuple[_Half, dict[str, Any] | None]] = queue.SimpleQueue()
        self._halves: dict[tuple[str, int], _Half] = {}
        self._rooms: dict[int, _Room] = {}
        self._next = 1
        self._stopped_until: list[tuple[float, _Half]] = []
        self._restarts: list[tuple[float, _Half]] = []
        self._ends: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}
        self._faults: Counter[str] = Counter()
        self._wrong = self._hung = self._finished = 0
        self._took: dict[bool, list[float]] = {False: [], True: []}
        self._start: dict[str, dict[str, Any]] = {}
        self._seconds = 0.0

    def __enter__(self) -> Soak:
        try:
            for role in ("prefill", "decode"):
                for number in range(2):
                    self._halves[role, number] = self._spawn(role, number, 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for half in self._halves.values():
            half.process.kill()
            half.process.communicate()

    # ---- load

    def load(self, seconds: float, *, faults: bool) -> None:
        """Keep every pair busy for so long, then wait until no room is left."""
        began = time.monotonic()
        before, self._took = self._finished, {False: [], True: []}
        next_stop, next_kill = began + _STOPS_EVERY_S / 2, began + _KILLS_EVERY_S / 2
        while (now := time.monotonic()) < began + seconds:
            if faults and now > next_stop:
                next_stop = now + self._chance.uniform(0.5, 1.5) * _STOPS_EVERY_S
                self._stop(now)
            if faults and now > next_kill:
                next_kill = now + self._chance.uniform(0.5, 1.5) * _KILLS_EVERY_S
                self._kill(now)
            self._mend(now)
            self._fill(now, faults=faults)
            self._hear(0.01)
        self._seconds = time.monotonic() - began
        self._settle()
        self._finished -= before if not faults else 0

    def note_start(self) -> None:
        """Remember the counts to which all has to come back, and forget what was measured so far."""
        self._start = self._all_counts()
        self._ends = {"prefill": Counter(), "decode": Counter()}
        self._finished = 0

    def _fill(self, now: float, *, faults: bool) -> None:
        busy = Counter((room.pair[0].number, room.pair[1].number) for room in self._rooms.values())
        asked: dict[str, tuple[_Half, list[dict[str, Any]]]] = {}
        for prefill, decode in self._pairs():
            for _ in range(IN_FLIGHT - busy[prefill.number, decode.number]):
                for half, room in self._new_room(prefill, decode, now, faults=faults):
                    asked.setdefault(half.name, (half, []))[1].append(room)
        for half, rooms in asked.values():
            self._send(half, {"do": "begin", "rooms": rooms})

    def _pairs(self) -> Iterator[tuple[_Half, _Half]]:
        up = {key: half for key, half in self._halves.items() if half.address}
        for p in range(2):
            for d in range(2):
                if ("prefill", p) in up and ("decode", d) in up:
                    yield up["prefill", p], up["decode", d]

    def _new_room(
        self, prefill: _Half, decode: _Half, now: float, *, faults: bool
    ) -> Iterator[tuple[_Half, dict[str, Any]]]:
        number, self._next = self._next, self._next + 1
        chance = self._chance
        room: dict[str, Any] = {
            "room": number,
            "tokens": chance.randint(1, MAX_BLOCKS_A_ROOM * BLOCK_TOKENS),
            "prefill": prefill.address,
            "cancel_after": None,
        }
        told = {"prefill": prefill, "decode": decode}
        cancelled = ""
        if faults and chance.random() < _SHARE_CANCELLED:
            self._faults["cancels"] += 1
            cancelled = chance.choice(("prefill", "decode"))
        if faults and chance.random() < _SHARE_HALVES:
            self._faults["halves that never come"] += 1
            del told[chance.choice(("prefill", "decode"))]
        anybody = any(half.is_stopped for half in self._halves.values()) or bool(self._restarts)
        self._rooms[number] = _Room((prefill, decode), set(told), now, anybody)
        for role, half in told.items():
            after = chance.choice((0.0, 0.002, 0.02, 0.5)) if role == cancelled else None
            yield half, {**room, "cancel_after": after}

    # ---- faults

    def _stop(self, now: float) -> None:
        half = self._chance.choice([half for half in self._halves.values() if half.address and not half.is_stopped])
        self._faults["stops"] += 1
        half.is_stopped = True
        half.process.send_signal(signal.SIGSTOP)
        self._stopped_until.append((now + self._chance.uniform(0.3, _LONGEST_STOP_S), half))
        self._disturb()

    def _kill(self, now: float) -> None:
        half = self._halves[self._chance.choice(("prefill", "decode")), 1]
        if not half.address:
            return
        self._faults["kills"] += 1
        half.process.kill()
        half.process.wait()
        self._disturb()
        for number, room in list(self._rooms.items()):
            if half in room.pair:
                self._ended(number, half.role)
        self._restarts.append((now + self._chance.uniform(0.0, 1.0), half))
        half.address, half.is_stopped = "", False

    def _mend(self, now: float) -> None:
        for due, half in list(self._stopped_until):
            if now >= due:
                self._stopped_until.remove((due, half))
                half.is_stopped = False
                if half.process.poll() is None:
                    half.process.send_signal(signal.SIGCONT)
        for due, half in list(self._restarts):
            if now >= due:
                self._restarts.remove((due, half))
                self._halves[half.role, half.number] = self._spawn(half.role, half.number, half.port)
        for number, room in list(self._rooms.items()):
            if now - room.began > _DEADLINE_S + _LONGEST_STOP_S:
                self._hung += 1
                del self._rooms[number]

    def _disturb(self) -> None:
        for room in self._rooms.values():
            room.disturbed = True

    # ---- news

    def _hear(self, wait_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            half, news = self._news.get(timeout=wait_s)
            self._take(half, news)
            while True:
                self._take(*self._news.get_nowait())

    def _take(self, half: _Half, news: dict[str, Any] | None) -> None:
        if news is None:
            if half.address and half.process.poll() is not None:
                raise ConfigError(f"{half.name} has ended by itself; its error stands above")
            return
        if "counts" in news:
            half.counts = news["counts"]
            return
        self._ends[half.role][news["end"]] += 1
        self._wrong += news.get("wrong", 0)
        room = self._rooms.get(news["room"])
        if (
            room is not None
            and half.role == "decode"
            and news["end"] == "done"
            and not any(each.is_stopped for each in room.pair)
        ):
            self._took[room.disturbed].append(news["ms"])
        self._ended(news["room"], half.role)

    def _ended(self, number: int, role: str) -> None:
        room = self._rooms.get(number)
        if room is None:
            return
        room.open.discard(role)
        if not room.open:
            del self._rooms[number]
            self._finished += 1

    # ---- the end

    def _settle(self) -> None:
        """Go on all that is stopped, start again what was killed, and wait for every room's end."""
        give_up = time.monotonic() + _DEADLINE_S + _LONGEST_STOP_S + 5.0
        while (self._rooms or self._restarts or self._stopped_until) and time.monotonic() < give_up:
            self._mend(time.monotonic())
            self._hear(0.05)
        self._hung += len(self._rooms)
        self._rooms.clear()

    def _all_counts(self) -> dict[str, dict[str, Any]]:
        """Return every process's counts, once nothing is left in them or no more goes away."""
        give_up = time.monotonic() + _DEADLINE_S
        while True:
            found: dict[str, dict[str, Any]] = {}
            for half in self._halves.values():
                half.counts = None
                self._send(half, {"do": "counts"})
                limit = time.monotonic() + _PATIENCE_S
                while half.counts is None and time.monotonic() < limit:
                    self._hear(0.1)
                if half.counts is None:
                    raise ConfigError(f"{half.name} does not answer")
                found[half.name] = half.counts
            if not any(counts["left"] for counts in found.values()) or time.monotonic() > give_up:
                return found
            time.sleep(0.2)

    def result(self) -> dict[str, Any]:
        """Return what happened, and `complaints` about what must not."""
        ends, counts = self._ends, self._all_counts()
        growth = {
            name: (counts[name]["rss"] - self._start[name]["rss"]) / self._start[name]["rss"]
            for name in ("prefill 0", "decode 0")
        }
        p99 = {"alone": _p99(self._took[False]), "beside": _p99(self._took[True])}
        found: dict[str, Any] = {
            "rooms": self._finished,
            "rooms_s": self._finished / max(self._seconds, 1e-9),
            "ends": {role: dict(told.most_common()) for role, told in ends.items()},
            "faults": dict(self._faults),
            "wrong_bytes": self._wrong,
            "stray": {name: one["stray"] for name, one in counts.items() if one["stray"]},
            "hung": self._hung,
            "left": {name: one["left"] for name, one in counts.items() if one["left"]},
            "growth": growth,
            "threads": {name: (self._start[name]["threads"], counts[name]["threads"]) for name in growth},
            "descriptors": {name: (self._start[name]["descriptors"], counts[name]["descriptors"]) for name in growth},
            "p99_ms": p99,
            "p99_beside": p99["beside"] / p99["alone"] if p99["alone"] and p99["beside"] else None,
        }
        return {**found, "complaints": list(_complaints(found))}

    # ---- processes

    def _spawn(self, role: str, number: int, port: int) -> _Half:
        words = [sys.executable, "-m", "pdplane.bench.soak_side", role, self._transport, str(port)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        half = _Half(role, number, process, JsonLines(process.stdout, process.stdin))
        first: Any = half.lines.receive(_PATIENCE_S)
        half.address = first["address"]
        half.port = int(half.address.rpartition(":")[2])
        threading.Thread(target=self._listen, args=(half,), daemon=True).start()
        return half

    def _listen(self, half: _Half) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):
            while True:
                news: Any = half.lines.receive()
                self._news.put((half, news))
        self._news.put((half, None))

    def _send(self, half: _Half, command: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it was killed; its rooms are told so
            half.lines.send(command)


def _p99(took: Sequence[float]) -> float | None:
    return quantiles(took, n=100)[98] if len(took) > 1 else None


def _complaints(found: dict[str, Any]) -> Iterator[str]:
    for name in ("wrong_bytes", "hung", "stray", "left"):
        if found[name]:
            yield f"{name}: {found[name]}"
    for name in ("threads", "descriptors"):
        for half, (before, after) in found[name].items():
            if after > before:
                yield f"{name} of {half}: {before} before, {after} after"
    for half, grown in found["growth"].items():
        if found["rooms"] >= _ENOUGH_ROOMS and grown * 100_000 / found["rooms"] > _MAX_GROWTH:
            yield f"memory of {half} grew by {grown:.1%} in {found['rooms']} rooms"


def _print(found: dict[str, Any]) -> None:
    names = ("rooms", "rooms_s", "wrong_bytes", "hung", "p99_beside")
    print_table(
        f"{found['minutes']:g} minutes, seed {found['seed']}; load average {os.getloadavg()[0]:.1f}",
        ["", "value"],
        [(name, found[name]) for name in names]
        + [(f"fault: {name}", number) for name, number in found["faults"].items()]
        + [(f"{role}: {end}", number) for role, ends in found["ends"].items() for end, number in ends.items()]
        + [(f"memory of {name}", f"{grown:+.1%}") for name, grown in found["growth"].items()],
    )
    for complaint in found["complaints"]:
        print(f"WRONG {complaint}")
