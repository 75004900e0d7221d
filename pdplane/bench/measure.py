"""One condition of `pdplane bench transport`: a receiving process, the contenders, and rounds over all of them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Self

import attrs
import numpy as np

from pdplane.bench.contenders import Contender, PlaneContender, open_contenders
from pdplane.bench.far_end import FarOptions, pattern
from pdplane.errors import ConfigError, InternalError
from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64, Copies, merged_copies
from pdplane.net import JsonLines
from pdplane.security import Tls
from pdplane.transport.reports import TransportOptions

GIB = 1 << 30
UNFENCED = ("raw", "tuned", "memcpy")  # they move contiguous bytes, which hold no pattern
_LATENCY_BYTES = 64 << 10
_LATENCY_BLOCK = 4 << 10
_LATENCY_TURN = 20  # pushes of one contender before it is the next one's turn


@attrs.frozen
class Plan:
    """What is measured; the same for every condition."""

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    arrangements: tuple[str, ...]
    nbytes: int
    rounds: int
    latency_pushes: int
    mlx_arena: bool
    transport: dict[str, Any]
    tls: tuple[str, ...] | None = None

    @property
    def arena_bytes(self) -> int:
        return self.nbytes * (2 if "sparse" in self.arrangements else 1)


@attrs.define
class _Point:
    """One contender's rounds at one block size and arrangement: seconds, and processor seconds of each side."""

    seconds: list[float] = attrs.Factory(list)
    near: float = 0.0
    far: float = 0.0


class Measurement:
    """Starts the receiving process and the contenders; `run` gives the numbers as JSON-able values."""

    def __init__(self, plan: Plan, condition: str) -> None:
        self._plan, self._condition = plan, condition
        self._source = Arena.zeros(plan.arena_bytes)
        self._contenders: dict[str, Contender] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = JsonLines()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for contender in self._contenders.values():
            contender.close()
        if self._process is not None:
            self._process.communicate()

    def run(self) -> dict[str, Any]:
        """Measure everything. Raises TransferError when a push fails, InternalError when bytes differ."""
        self._verify()
        points = {key: _Point() for key in self._keys()}
        for _ in range(self._plan.rounds):
            for name, block, arrangement in points:
                self._measure(points[name, block, arrangement], name, self._copies(block, arrangement))
        return {
            "points": [
                {"name": name, "block": block, "arrangement": arrangement, **self._numbers(point)}
                for (name, block, arrangement), point in points.items()
            ],
            "latency": self._latency(),
            "ways": {name: each.way for name, each in self._contenders.items() if isinstance(each, PlaneContender)},
        }

    def _keys(self) -> Iterator[tuple[str, int, str]]:
        for arrangement in self._plan.arrangements:
            for block in self._plan.blocks:
                for name in self._plan.names:
                    yield name, block, arrangement

    def _numbers(self, point: _Point) -> dict[str, Any]:
        gib = self._plan.nbytes / GIB
        total = gib * self._plan.rounds
        return {
            "gib_s": gib / median(point.seconds),
            "all_gib_s": [gib / seconds for seconds in point.seconds],
            "sender_cpu_s_gib": point.near / total,
            "receiver_cpu_s_gib": point.far / total,
        }

    def _measure(self, point: _Point, name: str, copies: Copies) -> None:
        contender = self._contenders[name]
        contender.prepare()
        far, near = float(self._ask("cpu")), _cpu()
        began = time.perf_counter()
        contender.move(copies)
        point.seconds.append(time.perf_counter() - began)
        point.near += _cpu() - near
        point.far += float(self._ask("cpu")) - far
        contender.settle()

    def _latency(self) -> dict[str, dict[str, float]]:
        """Return the milliseconds of small pushes at the median and at the 99th percentile."""
        places = np.random.default_rng(1).permutation(self._plan.nbytes // _LATENCY_BLOCK)
        chosen = places[: _LATENCY_BYTES // _LATENCY_BLOCK].astype(np.uint64) * np.uint64(_LATENCY_BLOCK)
        copies = merged_copies(chosen, chosen[::-1].copy(), np.full(len(chosen), _LATENCY_BLOCK, np.uint64))
        found: dict[str, list[float]] = {name: [] for name in self._plan.names}
        for _ in range(-(-self._plan.latency_pushes // _LATENCY_TURN)):
            for name, taken in found.items():
                taken.extend(self._time(self._contenders[name], copies) for _ in range(_LATENCY_TURN))
        return {
            name: {"p50_ms": float(np.percentile(taken, 50)) * 1e3, "p99_ms": float(np.percentile(taken, 99)) * 1e3}
            for name, taken in found.items()
        }

    def _time(self, contender: Contender, copies: Copies) -> float:
        contender.prepare()
        began = time.perf_counter()
        contender.move(copies)
        taken = time.perf_counter() - began
        contender.settle()
        return taken

    def _verify(self) -> None:
        """Push once by each contender, uncounted, to warm up and to check that the right bytes arrive."""
        for name, block, arrangement in self._keys():
            copies, contender = self._copies(block, arrangement), self._contenders[name]
            self._fill(block, arrangement)
            self._ask("clear")
            contender.prepare()
            contender.move(copies)
            contender.settle()
            if name in UNFENCED:
                continue
            if wrong := int(
                self._ask("differing", nbytes=self._plan.nbytes, block=block, sparse=arrangement == "sparse")
            ):
                raise InternalError(f"{name}, blocks of {block}, {arrangement}: {wrong} bytes differ")

    def _fill(self, block: int, arrangement: str) -> None:
        """Give each source block the bytes that its destination is to hold."""
        source, destination = _places(self._plan.nbytes, block, arrangement)
        wanted = pattern(self._plan.arena_bytes, block).reshape(-1, block)
        self._source.bytes.reshape(-1, block)[source // block] = wanted[destination // block]

    def _copies(self, block: int, arrangement: str) -> Copies:
        source, destination = _places(self._plan.nbytes, block, arrangement)
        return merged_copies(source.copy(), destination.copy(), np.full(len(source), block, np.uint64))

    def _start(self) -> None:
        plan, options = self._plan, TransportOptions(**self._plan.transport)
        encrypted = attrs.evolve(options, tls=Tls(*plan.tls) if plan.tls else None)
        far = FarOptions(
            plan.arena_bytes,
            plan.mlx_arena,
            self._condition == "decode",
            self._condition == "spin",
            plan.names,
            plan.transport,
            plan.tls,
        )
        words = [sys.executable, "-m", "pdplane.bench.far_end", json.dumps(attrs.asdict(far))]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lines = JsonLines(self._process.stdout, self._process.stdin)
        addresses = self._hear()
        self._contenders = open_contenders(
            list(plan.names),
            addresses,
            self._source,
            {name: encrypted if name == "tls" else options for name in plan.names},
            self._ask,
        )

    def _ask(self, what: str, **fields: object) -> Any:  # noqa: ANN401 - whatever JSON carries
        self._lines.send({"do": what, **fields})
        return self._hear()

    def _hear(self) -> Any:  # noqa: ANN401 - whatever JSON carries
        try:
            return self._lines.receive()
        except EOFError:
            raise ConfigError("the receiving process has ended; its error stands above") from None


def _places(nbytes: int, block: int, arrangement: str) -> tuple[U64, U64]:
    """Return the blocks' offsets on both sides."""
    blocks, size = np.arange(nbytes // block, dtype=np.uint64), np.uint64(block)
    if arrangement == "adjacent":
        return blocks * size, blocks * size
    random = np.random.default_rng(block)
    step = size * np.uint64(2 if arrangement == "sparse" else 1)
    return random.permutation(blocks) * step, random.permutation(blocks) * step


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
