"""Experts on other machines: the connection to each worker, and what replaces a model's expert layers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from pdplane.engine.model import Model
from pdplane.errors import ConfigError, InternalError, SessionLost, WireError
from pdplane.ids import Endpoint
from pdplane.workers.experts.bank import ExpertBank
from pdplane.workers.experts.requests import DTYPES, Bits, from_half, to_half
from pdplane.workers.experts.store import ExpertStore, store_of
from pdplane.workers.experts.switch import ExpertCall, Indices, replace_switches
from pdplane.workers.experts.tx1 import Framer, Message, Tx1Limits, Tx1Token
from pdplane.workers.listener import BoundedSocket

WIRE_NAMES: Mapping[str, str] = {mlx: wire for wire, (mlx, _) in DTYPES.items()}

_MAX_PAIRS = 32_768  # keeps the header's JSON far below its limit


@attrs.frozen
class ModelFacts:
    """What a worker must agree on; `identity` is compared with that of workers that send one."""

    model_type: str
    num_layers: int
    num_experts: int
    identity: str


@attrs.frozen
class LinkOptions:
    """Time limits of a link in seconds, and the largest frames."""

    connect_s: float = 5.0
    reply_s: float = 30.0
    load_s: float = 120.0
    limits: Tx1Limits = attrs.field(factory=Tx1Limits)


@attrs.define
class Traffic:
    """Traffic of a link since it was made; times in ms."""

    execs: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    send_ms: float = 0.0
    wait_ms: float = 0.0
    worker_ms: float = 0.0


class ExpertLink:
    """Used by one thread, stopped by any; the constructor opens nothing. Every failure is a SessionLost."""

    def __init__(self, worker: Endpoint, token: Tx1Token, facts: ModelFacts, options: LinkOptions) -> None:
        self.worker = worker
        self.traffic = Traffic()
        self.capacity = 0
        """Experts a layer that the worker can hold; known once it is open."""
        self._token, self._facts, self._options = token, facts, options
        self._line: BoundedSocket | None = None
        self._framer: Framer | None = None
        self._number = 0
        self._half = False
        self._max_payload = options.limits.payload_bytes

    def open(self, connect_s: float | None = None) -> None:
        """Connect, prove that both know the token, greet, and compare models."""
        self.close()
        limit_s = self._options.connect_s if connect_s is None else connect_s
        with self._failures():
            self._line = BoundedSocket.connect(self.worker, limit_s, self._options.reply_s)
            deadline_s = time.monotonic() + limit_s
            self._framer = Framer.connect(self._line, self._token, self._options.limits, deadline_s)
            self._greet(self._framer)

    def close(self) -> None:
        """Close the connection; idempotent."""
        if self._line is not None:
            self._line.close()
        self._line = self._framer = None

    def stop(self) -> None:
        """End every wait on the connection; from any thread."""
        line = self._line
        if line is not None:
            line.stop()

    def max_pairs(self, width: int) -> int:
        """Return the most pairs whose rows and results fit in a frame of either side."""
        return max(1, min(_MAX_PAIRS, self._max_payload // (width * 4)))

    def send_load(self, assignments: Mapping[int, Sequence[int]]) -> None:
        """Ask the worker to read experts; `receive_load` waits for it."""
        header: dict[str, object] = {
            "assignments": {str(layer): list(experts) for layer, experts in assignments.items()}
        }
        with self._failures():
            self._send("load", header)

    def receive_load(self) -> None:
        with self._failures():
            self._receive("load_reply", self._options.load_s)

    def send_exec(self, part: ExpertCall) -> None:
        """Send a part's rows and pairs."""
        pairs = np.stack((part.row_of, part.expert_of), axis=1).tolist()
        header: dict[str, object] = {
            "layer": part.layer,
            "rows": len(part.rows),
            "dim": part.rows.shape[1],
            "pairs": pairs,
        }
        rows = to_half(part.rows, part.dtype) if self._half else part.rows
        if not self._half:
            header |= {"dtype": WIRE_NAMES[part.dtype], "grouped": part.grouped}
        with self._failures():
            self._send("exec", header, np.ascontiguousarray(rows).data)
        self.traffic.execs += 1
        self.traffic.pairs += len(pairs)

    def receive_exec(self, part: ExpertCall) -> tuple[Bits, str]:
        """Return the part's results in pair order, shape (pairs, width), and their dtype."""
        with self._failures():
            message = self._receive("exec_reply", self._options.reply_s)
            for name, wanted in (("layer", part.layer), ("n", len(part.row_of))):
                if message.header.member(name).json != wanted:
                    raise WireError(name, f"the reply is for another request: {name} is not {wanted}")
            dtype = self._result_dtype(message, part)
            width, bits = part.rows.shape[1], np.dtype(DTYPES[WIRE_NAMES[dtype]][1])
            if len(message.payload) != len(part.row_of) * width * bits.itemsize:
                raise WireError("payload", f"{len(message.payload)} bytes for {len(part.row_of)} results of {width}")
        if (spent := message.header.optional("ms")) is not None and isinstance(spent.json, float):
            self.traffic.worker_ms += spent.json
        found = np.frombuffer(message.payload, bits).reshape(-1, width)
        return (from_half(found, part.dtype), part.dtype) if self._half else (found, dtype)

    def _result_dtype(self, message: Message, part: ExpertCall) -> str:
        if self._half:
            return "float16"
        named = message.header.optional("dtype")
        if named is None:
            return part.dtype
        if not isinstance(named.json, str) or named.json not in DTYPES:
            named.refuse("is not a dtype of results")
        return DTYPES[named.text()][0]

    def _greet(self, framer: Framer) -> None:
        facts = self._facts
        framer.send("hello", {
            "proto": "TX1", "model_type": facts.model_type, "framer": 1,
            "max_payload": self._options.limits.payload_bytes,
        })  # fmt: skip
        ack = framer.receive(self._options.connect_s)
        if ack.kind != "hello_ack":
            raise WireError("hello", _refusal(ack))
        for name in ("num_layers", "num_experts"):
            if ack.header.member(name).json != getattr(facts, name):
                raise WireError(name, f"the worker has another model: {name} is not {getattr(facts, name)}")
        told = ack.header.optional("identity")
        if told is not None and told.json != facts.identity:
            raise WireError("identity", "the worker has other weights")
        self.capacity = ack.header.member("cap").whole(1)
        # An older worker takes and returns float16 only: its bits are not those of a local run.
        self._half = ack.header.optional("framer") is None
        limit = ack.header.optional("max_payload")
        own = self._options.limits.payload_bytes
        self._max_payload = own if limit is None else min(own, limit.whole(1))

    def _send(self, kind: str, header: dict[str, object], payload: memoryview | bytes = b"") -> None:
        if self._framer is None:
            raise ConnectionAbortedError("not connected")
        self._number += 1
        began = time.perf_counter()
        numbered = header if self._half else {**header, "id": self._number}
        self.traffic.bytes_sent += self._framer.send(kind, numbered, payload)
        self.traffic.send_ms += (time.perf_counter() - began) * 1000

    def _receive(self, kind: str, within_s: float) -> Message:
        if self._framer is None:
            raise ConnectionAbortedError("not connected")
        began = time.perf_counter()
        message = self._framer.receive(within_s)
        self.traffic.wait_ms += (time.perf_counter() - began) * 1000
        self.traffic.bytes_received += len(message.payload)
        if message.kind != kind:
            raise WireError("kind", _refusal(message))
        if not self._half and message.header.member("id").json != self._number:
            raise WireError("id", "the reply is for another request")
        return message

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Close the connection after any failure, so that nothing later on it is taken for an answer."""
        try:
            yield
        except (OSError, WireError) as error:
            self.close()
            raise SessionLost(str(self.worker), str(error) or type(error).__name__) from error
        except BaseException:
            self.close()
            raise


def _refusal(message: Message) -> str:
    if message.kind != "error":
        return f"the worker answered with {message.kind}"
    told = message.header.optional("reason") or message.header.optional("msg")
    return f"the worker refused: {'' if told is None else str(told.json)[:300]}"


# ---- What replaces a MoE model's expert layers
#
# Every expert has a home worker. A call sends each worker the rows and pairs of its own experts, first to all and
# then collects from all, so that the workers run at the same time. A worker that is lost has its experts moved to the
# others, in the middle of a call too: a pair is computed again from the same rows and gives the same bits. When none
# is left the experts run locally, if that is allowed, or the call fails with the cause.


_log = logging.getLogger(__name__)


@attrs.frozen
class RemoteOptions:
    """How lost workers are treated; `local` allows to read and run experts here when no worker is left.

    `local_capacity` bounds the experts a layer that are held here then. A lost worker is tried again after `retry_s`,
    for no longer than `retry_connect_s`, before a call.
    """

    link: LinkOptions = attrs.field(factory=LinkOptions)
    local: bool = False
    local_capacity: int | None = None
    preload: bool = True
    retry_s: float = 10.0
    retry_connect_s: float = 0.5


@attrs.frozen
class RemoteStatistics:
    """Counts since `attach`; `workers` by address."""

    calls: int
    pairs: int
    local_pairs: int
    lost: int
    live: tuple[str, ...]
    workers: Mapping[str, Traffic]


class RemoteExperts:
    """Places a model's experts on workers and runs them there.

    `attach` and `run` are for the MLX thread; `close` and `statistics` for any. The constructor opens nothing.
    """

    def __init__(self, workers: Sequence[Endpoint], token: Tx1Token, options: RemoteOptions | None = None) -> None:
        if not workers or len(set(workers)) != len(workers):
            raise ConfigError("name at least one expert worker, and each once")
        self.options = options or RemoteOptions()
        self._endpoints, self._token = tuple(workers), token
        self._homes: list[_Home] = []
        self._store: ExpertStore | None = None
        self._bank: ExpertBank | None = None
        self._lock = threading.RLock()  # held while the links are in use
        self._closed = False
        self._calls = self._pairs = self._local_pairs = self._lost = 0

    def attach(self, model: Model) -> None:
        """Connect to every worker, hand out the experts and replace the model's expert layers.

        Raises ConfigError for a model without experts that can be moved, SessionLost for a worker that cannot be
        reached or has another model.
        """
        self._store = store = store_of(model)
        facts = ModelFacts(
            store.model_type,
            store.num_layers,
            max(layer.num_experts for layer in store.layers.values()),
            store.identity,
        )
        links = [ExpertLink(endpoint, self._token, facts, self.options.link) for endpoint in self._endpoints]
        self._homes = [_Home(link) for link in links]
        attached = False
        try:
            with self._lock:
                self._open(links, store)
            replace_switches(model.network, self)
            attached = True
        finally:
            if not attached:
                self.close()

    def _open(self, links: Sequence[ExpertLink], store: ExpertStore) -> None:
        for link in links:
            link.open()
        if self.options.preload:
            self._preload(store)

    def close(self) -> None:
        """Close every connection; a call that runs meanwhile fails. Idempotent."""
        self._closed = True
        for home in self._homes:
            home.link.stop()
        with self._lock:
            for home in self._homes:
                home.link.close()

    def statistics(self) -> RemoteStatistics:
        live = tuple(str(home.link.worker) for home in self._homes if home.alive)
        traffic = {str(home.link.worker): attrs.evolve(home.link.traffic) for home in self._homes}
        return RemoteStatistics(self._calls, self._pairs, self._local_pairs, self._lost, live, traffic)

    def run(self, call: ExpertCall) -> tuple[Bits, str]:
        """Return results in pair order and their dtype.

        Raises SessionLost when no worker is left and nothing may run locally.
        """
        with self._lock:
            return self._run(call)

    def _run(self, call: ExpertCall) -> tuple[Bits, str]:
        if self._closed:
            raise SessionLost(", ".join(map(str, self._endpoints)), "the coordinator was closed")
        self._calls += 1
        self._pairs += len(call.row_of)
        self._try_lost_again()
        results = _Results(call)
        pending: Indices = np.arange(len(call.row_of))
        while len(pending):
            homes = self._homes_of(call.layer)
            if homes is None:
                self._run_here(results, pending)
                break
            pending = self._round(results, pending, homes[call.expert_of[pending]])
        return results.all()

    def _round(self, results: _Results, pending: Indices, homes: Indices) -> Indices:
        """Run pairs on their home workers; return those whose worker was lost."""
        queues = {
            home: deque(self._parts(home, results.call, pending[homes == number]))
            for number, home in enumerate(self._homes)
            if home.alive
        }
        undone: list[Indices] = []
        while any(queues.values()):
            asked = [home for home, queue in queues.items() if queue and self._ask(home, results, queue, undone)]
            for home in asked:
                self._collect(home, results, queues[home], undone)
        return np.sort(np.concatenate(undone)) if undone else np.empty(0, np.int64)

    def _parts(self, home: _Home, call: ExpertCall, places: Indices) -> Iterator[Indices]:
        """Yield the places of one worker's pairs in parts that fit in a frame and name no more experts than it holds.

        Grouped pairs are cut between experts.
        """
        for part in self._sets(home, call, places):
            yield from self._frames(home, call, part)

    def _sets(self, home: _Home, call: ExpertCall, places: Indices) -> Iterator[Indices]:
        experts = np.unique(call.expert_of[places])
        if len(experts) <= home.link.capacity:
            yield places
            return
        for start in range(0, len(experts), home.link.capacity):
            chosen = experts[start : start + home.link.capacity]
            yield places[np.isin(call.expert_of[places], chosen)]

    def _frames(self, home: _Home, call: ExpertCall, places: Indices) -> Iterator[Indices]:
        size = home.link.max_pairs(call.rows.shape[1])
        while len(places) > size:
            cut = size
            if call.grouped:
                experts = call.expert_of[places[: size + 1]]
                cut = int(np.searchsorted(experts, experts[-1])) or size
            yield places[:cut]
            places = places[cut:]
        if len(places):
            yield places

    def _ask(self, home: _Home, results: _Results, queue: deque[Indices], undone: list[Indices]) -> bool:
        try:
            home.part = results.part(queue[0])
            home.link.send_exec(home.part)
        except SessionLost as error:
            self._lose(home, error, queue, undone)
            return False
        return True

    def _collect(self, home: _Home, results: _Results, queue: deque[Indices], undone: list[Indices]) -> None:
        if home.part is None:
            raise InternalError("a reply is awaited without a request")
        try:
            bits, dtype = home.link.receive_exec(home.part)
            results.place(queue[0], bits, dtype, home.link)
            queue.popleft()
        except SessionLost as error:
            self._lose(home, error, queue, undone)

    def _lose(self, home: _Home, error: SessionLost, queue: deque[Indices], undone: list[Indices]) -> None:
        """Take a worker's unfinished pairs back; connect once more at once if only the connection ended."""
        undone.extend(queue)
        queue.clear()
        home.part = None
        if self._closed:
            raise SessionLost(error.session, "the coordinator was closed") from error
        _log.warning("tx1: expert worker %s is lost: %s", error.session, error.text)
        ended = isinstance(error.__cause__, ConnectionError)
        home.alive = ended and not home.retried and self._reopen(home)
        home.retried = True
        if not home.alive:
            self._lost += 1
            home.trouble, home.retry_at = error.text, time.monotonic() + self.options.retry_s

    def _reopen(self, home: _Home) -> bool:
        try:
            home.link.open(self.options.retry_connect_s)
        except SessionLost as error:
            home.trouble = error.text
            return False
        return True

    def _try_lost_again(self) -> None:
        for home in self._homes:
            home.retried = False
            if home.alive or time.monotonic() < home.retry_at:
                continue
            home.alive = self._reopen(home)
            home.retry_at = time.monotonic() + self.options.retry_s
            if home.alive:
                _log.warning("tx1: expert worker %s is back", home.link.worker)

    def _homes_of(self, layer: int) -> Indices | None:
        """Return the number of each expert's worker; a lost worker's experts are dealt out to the others."""
        live = [number for number, home in enumerate(self._homes) if home.alive]
        if not live:
            return None
        experts = np.arange(self._opened.layers[layer].num_experts)
        own = (experts + layer) % len(self._homes)  # so that the first experts are not all on the first worker
        spare = np.array(live)[(experts // len(self._homes) + layer) % len(live)]
        return np.where(np.isin(own, live), own, spare)

    def _run_here(self, results: _Results, pending: Indices) -> None:
        if not self.options.local:
            causes = "; ".join(f"{home.link.worker}: {home.trouble}" for home in self._homes)
            raise SessionLost(", ".join(map(str, self._endpoints)), f"no expert worker is left ({causes})")
        if self._bank is None:
            self._bank = ExpertBank(self._opened, self.options.local_capacity)
        done = self._bank.run(results.part(pending))
        self._local_pairs += len(pending)
        results.place(pending, done.bits, done.dtype, None)

    def _preload(self, store: ExpertStore) -> None:
        for layer, described in store.layers.items():
            homes = self._homes_of(layer)
            for number, home in enumerate(self._homes):
                wanted = np.flatnonzero(homes == number)[: home.link.capacity].tolist()
                home.link.send_load({layer: wanted})
            for home in self._homes:
                home.link.receive_load()
            _log.info("tx1: %d experts of layer %d are placed", described.num_experts, layer)

    @property
    def _opened(self) -> ExpertStore:
        if self._store is None:
            raise InternalError("no model was attached")
        return self._store


@attrs.define(eq=False)
class _Home:
    """A worker as the coordinator sees it."""

    link: ExpertLink
    alive: bool = True
    retried: bool = False
    retry_at: float = 0.0
    trouble: str = ""
    part: ExpertCall | None = None


class _Results:
    """A call and the results that have come so far."""

    def __init__(self, call: ExpertCall) -> None:
        self.call = call
        self._dtype = call.dtype
        self._bits: Bits | None = None

    def part(self, places: Indices) -> ExpertCall:
        """Return the pairs at `places`, which ascend, with only the rows that they need."""
        call = self.call
        needed, row_of = np.unique(call.row_of[places], return_inverse=True)
        return attrs.evolve(call, rows=call.rows[needed], row_of=row_of, expert_of=call.expert_of[places])

    def place(self, places: Indices, bits: Bits, dtype: str, link: ExpertLink | None) -> None:
        """Keep results. Raises SessionLost for a worker whose results have another dtype than the others'."""
        if self._bits is None:
            self._dtype = dtype
            self._bits = np.empty((len(self.call.row_of), self.call.rows.shape[1]), bits.dtype)
        if dtype != self._dtype:
            if link is None:
                raise InternalError(f"local results are {dtype}, remote ones {self._dtype}")
            link.close()
            raise SessionLost(str(link.worker), f"its results are {dtype}, the others' {self._dtype}")
        self._bits[places] = bits

    def all(self) -> tuple[Bits, str]:
        """Return every result in pair order, and their dtype."""
        empty = np.empty((0, self.call.rows.shape[1]), self.call.rows.dtype)
        return (empty if self._bits is None else self._bits), self._dtype
