"""A coordinator's connection to one expert worker: one request at a time, and no reply taken on trust."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from pdplane.engine.switch import ExpertCall
from pdplane.errors import SessionLost, WireError
from pdplane.ids import Endpoint
from pdplane.workers.activations import Bits, from_half, to_half
from pdplane.workers.exec_request import DTYPES
from pdplane.workers.framer import Framer
from pdplane.workers.line import Line
from pdplane.workers.tx1 import FrameLimits, Message, Token

WIRE_NAMES: Mapping[str, str] = {mlx: wire for wire, (mlx, _) in DTYPES.items()}

_MAX_PAIRS = 32_768  # keeps the header's JSON far below its limit


@attrs.frozen
class ModelFacts:
    """What a worker must agree on; `identity` is compared with workers that tell theirs."""

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
    limits: FrameLimits = attrs.field(factory=FrameLimits)


@attrs.define
class Traffic:
    """What went over a link since it was made; times in ms."""

    execs: int = 0
    pairs: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    send_ms: float = 0.0
    wait_ms: float = 0.0
    worker_ms: float = 0.0


class ExpertLink:
    """Used by one thread, stopped by any; the constructor opens nothing. Every failure is a SessionLost."""

    def __init__(self, worker: Endpoint, token: Token, facts: ModelFacts, options: LinkOptions) -> None:
        self.worker = worker
        self.traffic = Traffic()
        self.capacity = 0
        """Experts a layer that the worker can hold; known once it is open."""
        self._token, self._facts, self._options = token, facts, options
        self._line: Line | None = None
        self._framer: Framer | None = None
        self._number = 0
        self._half = False
        self._max_payload = options.limits.payload_bytes

    def open(self, connect_s: float | None = None) -> None:
        """Connect anew, prove, greet and compare models."""
        self.close()
        limit_s = self._options.connect_s if connect_s is None else connect_s
        with self._failures():
            self._line = Line.connect(self.worker, limit_s, self._options.reply_s)
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
        """The most pairs whose rows and results fit in a frame of either side."""
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
        """The part's results in pair order, shape (pairs, width), and their dtype."""
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
        # A worker of the old kind takes and gives float16 only: its bits are not those of a local run.
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
        """Whatever goes wrong ends the connection: what comes later on it can never be taken for an answer."""
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
