"""The TX1 expert worker: holds some experts of a MoE model and runs them for authenticated coordinators.

Each connection has a thread of its own; the expert tables have one owner, the MLX thread, on which every load and every
exec runs whole. A request with a bad field is answered with an `error` and the connection stays; bytes that are no
frame, or a wrong token, end it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import TypeVar

import attrs

from pdplane.engine.thread import EngineThread, Job, Turns
from pdplane.errors import InternalError, WireError
from pdplane.ids import Endpoint
from pdplane.net import Complaints, first_to_go
from pdplane.workers.experts.bank import ExpertBank
from pdplane.workers.experts.requests import DTYPES, OLD_DTYPE, read_assignments, read_dtype, read_exec
from pdplane.workers.experts.store import ExpertStore
from pdplane.workers.experts.tx1 import Framer, Message, Tx1Limits, Tx1Token
from pdplane.workers.listener import BoundedSocket, Listener, Network

_FAILURES = (OSError, ValueError, RuntimeError, MemoryError)
_MAX_ID = 2**53
_T = TypeVar("_T")
Header = dict[str, object]
Answer = tuple[str, Header, bytes | memoryview]


@attrs.frozen
class ExpertWorkerOptions:
    """Bounds of an expert worker; `capacity` is slots a layer, None for all experts."""

    capacity: int | None = None
    allow: tuple[Network, ...] = ()
    limits: Tx1Limits = attrs.field(factory=Tx1Limits)
    max_connections: int = 32
    max_unproved: int = 8
    handshake_s: float = 5.0
    stall_s: float = 30.0
    idle_s: float = 600.0


@attrs.frozen
class ExpertWorkerStatistics:
    """Counts since the start."""

    connections: int
    accepted: int
    refused_connections: int
    refused_handshakes: int
    refused_requests: int
    execs: int
    pairs: int
    exec_ms: float
    loaded: int
    evicted: int
    bytes_in: int
    bytes_out: int


class ExpertWorker:
    """Serves the experts of one model; `open_store` is called on the MLX thread. The constructor opens nothing."""

    def __init__(
        self,
        listen: Endpoint,
        open_store: Callable[[], ExpertStore],
        token: Tx1Token,
        options: ExpertWorkerOptions | None = None,
    ) -> None:
        self.options = options or ExpertWorkerOptions()
        self.thread = EngineThread("pdplane-experts")
        self._open_store, self._token = open_store, token
        self._bank: ExpertBank | None = None
        self._listener = Listener(
            listen, self._serve, name="tx1", max_connections=self.options.max_connections,
            stall_s=self.options.stall_s, allow=self.options.allow,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._unproved: set[BoundedSocket] = set()  # at their handshake
        names = ("refused_handshakes", "refused_requests", "execs", "pairs", "loaded", "evicted", "bytes_in",
                 "bytes_out")  # fmt: skip
        self._counts = dict.fromkeys(names, 0)
        self._exec_ms = 0.0

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    @property
    def bank(self) -> ExpertBank:
        """The tables; only the MLX thread may touch them."""
        if self._bank is None:
            raise InternalError("the expert worker was not started")
        return self._bank

    def start(self) -> Endpoint:
        """Open the store and listen. Raises ConfigError, and then the worker is closed."""
        self.thread.start()
        started = False
        try:
            self._bank = self.thread.call(lambda: ExpertBank(self._open_store(), self.options.capacity))
            self._listener.start()
            started = True
        finally:
            if not started:
                self.close()
        return self.endpoint

    @property
    def complaints(self) -> Complaints:
        """What writes about peers that are wrong."""
        return self._listener.complaints

    def trouble(self) -> str | None:
        """Return which thread does not go on, None while all do, and while the store is opened."""
        return None if self._bank is None else self._listener.trouble() or self.thread.trouble()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the worker is closed; return whether it is. No client can end it."""
        return self._closed.wait(timeout_s)

    def close(self) -> None:
        """End every connection and join every thread; idempotent."""
        self._closed.set()
        self._listener.stop()
        self.thread.close()
        self._listener.close()

    def statistics(self) -> ExpertWorkerStatistics:
        with self._lock:
            counts, exec_ms = dict(self._counts), self._exec_ms
        listener = self._listener
        refused = listener.refused
        return ExpertWorkerStatistics(listener.connections, listener.accepted, refused, exec_ms=exec_ms, **counts)

    def count(self, **changes: int) -> None:
        """Add to the counts of `statistics`."""
        with self._lock:
            for name, change in changes.items():
                self._counts[name] += change

    def add_exec_ms(self, spent: float) -> float:
        """Add an exec's time; return the total, which goes into replies."""
        with self._lock:
            self._exec_ms += spent
            return self._exec_ms

    def _serve(self, line: BoundedSocket, _host: str) -> None:
        framer = self._prove(line)
        if framer is None:
            return
        line.proved = True
        session = CoordinatorSession(self, framer)
        try:
            session.run()
        except WireError as error:
            self.count(refused_requests=1)
            text = "tx1: %s sent a malformed frame (%s); its connection is closed"
            self.complaints.tell((line.address, "frame"), text, line.peer, error)
            if error.field == "payload":
                framer.refuse(error, self.options.stall_s)

    def _prove(self, line: BoundedSocket) -> Framer | None:
        """Shake hands; return None when the peer fails. The oldest of too many others makes place."""
        with self._lock:
            others = [other for other in self._unproved if not other.ended]
            self._unproved.add(line)
        if len(others) >= self.options.max_unproved:
            goes = first_to_go(others, lambda other: other.address, lambda other: (other.since,))
            self.complaints.tell((goes.address, "place"), "tx1: %s makes place for others", goes.peer)
            goes.stop()
        try:
            deadline_s = time.monotonic() + self.options.handshake_s
            return Framer.serve(line, self._token, self.options.limits, deadline_s)
        except (WireError, OSError) as error:
            self.count(refused_handshakes=1)
            self.complaints.tell((line.address, "handshake"), "tx1: %s failed the handshake: %s", line.peer, error)
            return None
        finally:
            with self._lock:
                self._unproved.discard(line)


class _Failed(RuntimeError):
    """A valid request could not be done: a file that cannot be read, no memory."""


class CoordinatorSession:
    """One coordinator's conversation."""

    def __init__(self, worker: ExpertWorker, framer: Framer) -> None:
        self._worker, self._framer = worker, framer
        self._store = worker.bank.store
        self._dtype: str | None = None
        self._max_reply_bytes = worker.options.limits.payload_bytes

    def run(self) -> None:
        """Greet, and then answer requests until the line ends with an OSError.

        Raises WireError for a malformed frame.
        """
        if not self._greet(self._framer.receive(self._worker.options.handshake_s)):
            return
        while True:
            message = self._framer.receive(self._worker.options.idle_s)
            kind, header, payload = self._answer(message)
            sent = self._framer.send(kind, header, payload)
            self._worker.count(bytes_in=len(message.payload), bytes_out=sent)

    def _greet(self, message: Message) -> bool:
        try:
            self._read_hello(message)
        except WireError as error:
            self._worker.count(refused_requests=1)
            self._worker.complaints.tell("hello", "tx1: a coordinator is refused: %s", error.reason)
            self._framer.send("error", {"msg": "bad hello", "code": "bad_hello", "reason": error.reason})
            return False
        bank = self._worker.bank
        resident = self._on_thread(lambda: _texts(bank.resident))
        experts = max(layer.num_experts for layer in self._store.layers.values())
        self._framer.send("hello_ack", {
            "host": socket.gethostname(), "num_layers": self._store.num_layers, "num_experts": experts,
            "cap": bank.capacity, "resident": resident, "framer": 1, "dtype": self._dtype or OLD_DTYPE,
            "max_payload": self._worker.options.limits.payload_bytes, "identity": self._store.identity,
        })  # fmt: skip
        return True

    def _read_hello(self, message: Message) -> None:
        header = message.header
        if message.kind != "hello" or header.member("proto").json != "TX1":
            raise WireError("proto", "the first message must be a hello of TX1")
        if header.member("model_type").json != self._store.model_type:
            raise WireError("model_type", f"this worker has a {self._store.model_type}")
        self._dtype = read_dtype(header)
        if (limit := header.optional("max_payload")) is not None:
            self._max_reply_bytes = min(self._max_reply_bytes, limit.whole(1))

    def _answer(self, message: Message) -> Answer:
        marked: Header = {}
        try:
            if (number := message.header.optional("id")) is not None:
                marked["id"] = number.whole(0, _MAX_ID)
            kind, header, payload = self._perform(message)
        except WireError as error:
            self._worker.count(refused_requests=1)
            self._worker.complaints.tell((message.kind, error.field), "tx1: %s is refused: %s", message.kind, error)
            return "error", {**marked, "msg": error.reason, "code": "bad_request", "field": error.field}, b""
        except _Failed as error:
            self._worker.count(refused_requests=1)
            self._worker.complaints.tell(message.kind, "tx1: %s failed: %s", message.kind, error)
            return "error", {**marked, "msg": str(error), "code": "failed"}, b""
        return kind, {**header, **marked}, payload

    def _perform(self, message: Message) -> Answer:
        if message.kind == "ping":
            return "pong", {"t": time.time()}, b""
        if message.kind == "load":
            return self._load(message)
        if message.kind == "exec":
            return self._exec(message)
        return "error", {"msg": f"unexpected {message.kind}", "code": "unexpected"}, b""

    def _load(self, message: Message) -> Answer:
        bank = self._worker.bank
        wanted, listed = read_assignments(message, self._store, bank.capacity)

        def load() -> tuple[dict[int, Sequence[int]], dict[int, list[int]]]:
            gone = {layer: bank.load(layer, experts) for layer, experts in wanted.items()}
            return {layer: left for layer, left in gone.items() if left}, bank.resident

        evicted, resident = self._on_thread(load)
        self._worker.count(loaded=listed, evicted=sum(map(len, evicted.values())))
        header: Header = {"loaded": listed, "resident": _texts(resident)}
        if evicted:
            header["evicted"] = _texts(evicted)
        return "load_reply", header, b""

    def _exec(self, message: Message) -> Answer:
        bank = self._worker.bank
        request = read_exec(message, self._store, self._dtype, self._max_reply_bytes)
        call = request.call
        began = time.perf_counter()
        done = self._on_thread(lambda: bank.run(call, convert=request.convert))
        spent = (time.perf_counter() - began) * 1000
        total = self._worker.add_exec_ms(spent)
        self._worker.count(execs=1, pairs=len(call.row_of), evicted=len(done.evicted))
        header: Header = {"layer": call.layer, "n": len(call.row_of), "exec_ms": total, "ms": spent}
        if done.evicted:
            header["evicted"] = list(done.evicted)
        if not request.convert:
            header["dtype"] = _wire_dtype(done.dtype)
        return "exec_reply", header, done.bits.data if done.bits.size else b""

    def _on_thread(self, function: Callable[[], _T]) -> _T:
        """Run on the MLX thread; a failure there comes out as a _Failed, so that none is taken for the line's own."""
        try:
            job: Job[_T] = self._worker.thread.submit(lambda: _one_turn(function))
        except InternalError as closed:
            raise ConnectionAbortedError("the worker closes") from closed
        error = job.future.exception()
        if isinstance(error, CancelledError):
            raise ConnectionAbortedError("the worker closes")
        if isinstance(error, _FAILURES):
            raise _Failed(f"{type(error).__name__}: {error}") from error
        return job.result()


def _one_turn(function: Callable[[], _T]) -> Turns[_T]:
    yield from ()
    return function()


def _wire_dtype(name: str) -> str:
    found = next((wire for wire, (mlx, _) in DTYPES.items() if mlx == name), None)
    if found is None:
        raise _Failed(f"results of dtype {name} have no name on the wire")
    return found


def _texts(tables: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(layer): list(experts) for layer, experts in tables.items()}
