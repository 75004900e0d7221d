"""The WP30 cache worker: runs prompts, and hands out and takes in their caches, for any number of clients."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager

import attrs

from pdplane.errors import Cause, IncompatibleCache, LocalProtocolError, PdplaneError, WireError
from pdplane.ids import Endpoint
from pdplane.net import Json
from pdplane.workers.cache import codecs
from pdplane.workers.cache.codecs import LOSSY
from pdplane.workers.cache.model import CacheModel, Left
from pdplane.workers.cache.prefix import PrefixEngine
from pdplane.workers.cache.wp30 import (
    MAX_LENGTH,
    PREFIX_BYTES,
    UNLIMITED,
    Frame,
    Wp30Limits,
    decode_header,
    decode_prefix,
    read_frame,
    send_frame,
)
from pdplane.workers.listener import BoundedSocket, Listener

DEFAULT_MAX_TOKENS = 48
_WAIT_S = 60.0
_MAX_TOKEN = 2**31 - 1
_MAX_TEXT = 1024


@attrs.frozen(eq=False)
class Reply:
    """A reply's fields and payload; `timed` asks for `server_ms` at the end."""

    header: dict[str, Json]
    payload: bytes | bytearray | memoryview = b""
    timed: bool = True


class Expansion:
    """The memory that unpacked caches may take together; one more than the bound waits for another's end."""

    def __init__(self, bound: int) -> None:
        self._bound, self._held = bound, 0
        self._changed = threading.Condition()

    @contextmanager
    def of(self, nbytes: int) -> Iterator[None]:
        """Hold so many bytes inside the block; one alone gets in whatever it needs. Raises LocalProtocolError."""
        with self._changed:
            free = self._changed.wait_for(lambda: not self._held or self._held + nbytes <= self._bound, _WAIT_S)
            if not free:
                text = f"other caches took the memory for {self._bound} unpacked bytes for {_WAIT_S:g} s"
                raise LocalProtocolError(text, Cause.FULL)
            self._held += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= nbytes
                self._changed.notify_all()


class Commands:
    """Answers frames out of a receiver model; used by many threads."""

    def __init__(self, receiver: CacheModel, expanded_bytes: int) -> None:
        self._receiver = receiver
        self._expanded_bytes = expanded_bytes
        self._expansion = Expansion(expanded_bytes)
        self._table: Mapping[str, Callable[[Frame, Left], Reply]] = {
            "ping": self._ping,
            "run_text": self._run_text,
            "run_cache": self._run_cache,
            "prefill_cache": self._prefill_cache,
            "prefill_time": self._prefill_time,
            "shutdown": _refuse_shutdown,
        }

    def run(self, frame: Frame, left: Left) -> Reply:
        """Answer one frame.

        Raises IncompatibleCache, and ValueError, TypeError, KeyError or a PdplaneError; ConnectionAbortedError when the
        client has left meanwhile.
        """
        name = frame.header.get("cmd")
        command = self._table.get(name) if isinstance(name, str) else None
        return Reply({"error": "unknown cmd"}) if command is None else command(frame, left)

    def _ping(self, _frame: Frame, _left: Left) -> Reply:
        receiver = self._receiver
        return Reply({"model_revision": receiver.model_revision, "config_hash": receiver.config_hash})

    def _run_text(self, frame: Frame, left: Left) -> Reply:
        run = self._receiver.run_text(_tokens(frame, "token_ids"), _max_tokens(frame), left)
        return Reply({
            "text": run.text, "prefill_ms": run.prefill_ms, "ttft_ms": run.ttft_ms, "decode_ms": run.decode_ms,
            "output_tokens": list(run.tokens), "peak_bytes": run.peak_bytes,
        })  # fmt: skip

    def _run_cache(self, frame: Frame, left: Left) -> Reply:
        codec, lossy = _codec(frame)
        longest = min(self._expanded_bytes, self._receiver.longest_cache)
        with self._expansion.of(longest):
            return self._continued(frame, left, codec, lossy, longest)

    def _continued(self, frame: Frame, left: Left, codec: str, lossy: str, longest: int) -> Reply:
        began = time.perf_counter()
        data = codecs.decode(codec, frame.payload, longest)
        decompress_ms = _since(began)
        file = self._receiver.check_cache(data, _prefix_hash(frame), lossy)
        checked_ms = _since(began)
        run = self._receiver.run_cache(file, _tokens(frame, "query_ids"), _max_tokens(frame), left)
        return Reply({
            "status": "success", "text": run.text, "decompress_ms": decompress_ms, "load_ms": checked_ms + run.load_ms,
            "ttft_ms": run.ttft_ms, "decode_ms": run.decode_ms, "output_tokens": list(run.tokens),
            "cache_tensor_bytes": run.tensor_bytes, "peak_bytes": run.peak_bytes,
        })  # fmt: skip

    def _prefill_cache(self, frame: Frame, left: Left) -> Reply:
        tokens = _tokens(frame, "token_ids")
        codec, lossy = _codec(frame)
        found = self._receiver.prefill_cache(tokens, _text(frame, "document_id", "?"), lossy, left)
        began = time.perf_counter()
        payload = codecs.encode(codec, found.data, found.width)
        if len(payload) > MAX_LENGTH:
            raise ValueError(
                f"the cache is too large: {len(payload)} bytes, and a frame holds {MAX_LENGTH}; "
                "ask for a codec or a shorter prefix"
            )
        header: dict[str, Json] = {
            "prefill_ms": found.prefill_ms, "serialize_ms": _since(began), "prefix_hash": found.prefix_hash,
        }  # fmt: skip
        return Reply(header, payload, timed=False)

    def _prefill_time(self, frame: Frame, left: Left) -> Reply:
        return Reply({"prefill_ms": self._receiver.prefill_time(_tokens(frame, "token_ids"), left)})


def _refuse_shutdown(_frame: Frame, _left: Left) -> Reply:
    raise ValueError("shutdown is for clients on this machine")


def _codec(frame: Frame) -> tuple[str, str]:
    """Return the codec of the bytes and the lossy form of the cache, `none` for each that is not asked for."""
    name = frame.header.get("codec", "none")
    if isinstance(name, str) and name in LOSSY:
        return "none", name
    if not isinstance(name, str) or name not in codecs.LOSSLESS:
        raise ValueError(f"codec {name}")
    return name, "none"


def _prefix_hash(frame: Frame) -> str | None:
    found = frame.header.get("prefix_hash")
    if found is not None and not isinstance(found, str):
        raise IncompatibleCache("prefix_hash", "a text", str(found)[:80])
    return found


def _tokens(frame: Frame, key: str) -> tuple[int, ...]:
    found = frame.header[key]
    if not isinstance(found, list):
        raise TypeError(f"{key} must be a list of token ids")
    tokens = tuple(token for token in found if type(token) is int and 0 <= token <= _MAX_TOKEN)
    if len(tokens) != len(found):
        raise TypeError(f"{key} must hold whole numbers of 0..{_MAX_TOKEN} only")
    return tokens


def _max_tokens(frame: Frame) -> int:
    found = frame.header.get("max_tokens")
    if found is None:
        return DEFAULT_MAX_TOKENS
    if type(found) is not int or not 1 <= found <= _MAX_TOKEN:
        raise ValueError("max_tokens must be a whole number above zero")
    return found


def _text(frame: Frame, key: str, default: str) -> str:
    found = frame.header.get(key, default)
    if not isinstance(found, str) or len(found) > _MAX_TEXT:
        raise TypeError(f"{key} must be a text of up to {_MAX_TEXT} characters")
    return found


def _since(began: float) -> float:
    return (time.perf_counter() - began) * 1000


# ---- The worker
#
# Each connection has a thread that reads a frame, answers it and reads the next; commands that need the model wait
# there for the one MLX thread, and end when their client closes its side. A connection that sends no frame costs a
# thread and blocks nobody. A frame over the limits is answered with the limit, skipped, and the next one is read; a
# malformed frame closes its connection and no other. Replies carry the reference's fields in the reference's order.


_TRACE_CHARACTERS = 800
_MAX_CAUSES = 8
# What a command may raise; the connection lives on. A bug of another kind ends its connection only.
_FAILURES = (PdplaneError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError,
             CancelledError)  # fmt: skip


@attrs.frozen
class CacheWorkerOptions:
    """Bounds of a cache worker.

    `remote_shutdown` lets clients of other machines end the worker too; without it only loopback clients may.
    `expanded_bytes` bounds what a compressed cache may expand to.
    """

    limits: Wp30Limits = attrs.field(factory=Wp30Limits)
    expanded_bytes: int = 2 << 30
    max_connections: int = 64
    stall_s: float = 30.0
    idle_s: float | None = None
    remote_shutdown: bool = False


@attrs.frozen
class CacheWorkerStatistics:
    """Counts since the start."""

    connections: int
    accepted: int
    refused_connections: int
    malformed_frames: int
    commands: int
    failed_commands: int
    abandoned_commands: int
    bytes_in: int
    bytes_out: int


class CacheWorker:
    """Serves one receiver model, which its owner closes. The constructor opens nothing."""

    def __init__(self, listen: Endpoint, receiver: CacheModel, options: CacheWorkerOptions | None = None) -> None:
        self._options = options or CacheWorkerOptions()
        self._commands = Commands(receiver, self._options.expanded_bytes)
        self._listener = Listener(
            listen, self._serve, name="wp30", max_connections=self._options.max_connections,
            stall_s=self._options.stall_s,
        )  # fmt: skip
        self._finished = threading.Event()
        self._lock = threading.Lock()
        names = ("malformed_frames", "commands", "failed_commands", "abandoned_commands", "bytes_in", "bytes_out")
        self._counts = dict.fromkeys(names, 0)

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    def start(self) -> Endpoint:
        """Listen. Raises ConfigError naming the address."""
        return self._listener.start()

    def trouble(self) -> str | None:
        """Return why no connection is accepted, None when there is no reason."""
        return self._listener.trouble()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a client asks for shutdown; return whether one did."""
        return self._finished.wait(timeout_s)

    def close(self) -> None:
        """End every connection and join every thread; idempotent. A command in the model is waited for."""
        self._listener.close()
        self._finished.set()

    def statistics(self) -> CacheWorkerStatistics:
        with self._lock:
            counts = dict(self._counts)
        listener = self._listener
        return CacheWorkerStatistics(listener.connections, listener.accepted, listener.refused, **counts)

    def _serve(self, line: BoundedSocket, host: str) -> None:
        while True:
            prefix = line.await_first(PREFIX_BYTES, self._options.idle_s)
            began = time.perf_counter()
            try:
                if (over := self._options.limits.exceeded_by(prefix)) is not None:
                    self._refuse(line, prefix, over, began)
                    continue
                frame = read_frame(line, self._options.limits, prefix=prefix)
                line.proved = True
            except WireError as error:
                self._count(malformed_frames=1)
                text = "wp30: %s sent a malformed frame (%s); its connection is closed"
                self._listener.complaints.tell((host, "frame"), text, line.peer, error)
                return
            received = time.perf_counter()
            if frame.header.get("cmd") == "shutdown" and self._may_shut_down(host):
                send_frame(line, {"ok": True})
                self._listener.stop()
                self._finished.set()
                return
            reply = self._answer(frame, (received - began) * 1000, received, line.has_left)
            self._count(commands=1, bytes_in=frame.nbytes)
            if not self._send(line, reply):
                return

    def _send(self, line: BoundedSocket, reply: Reply) -> bool:
        try:
            sent = send_frame(line, reply.header, reply.payload)
        except (ValueError, RecursionError):  # a command of 1e999 or of deep lists is read, but cannot be echoed
            self._count(malformed_frames=1)
            return False
        self._count(bytes_out=sent)
        return True

    def _refuse(self, line: BoundedSocket, prefix: memoryview, over: WireError, began: float) -> None:
        """Tell a client that its frame is over the limits, and skip the frame.

        Raises WireError when the header is none.
        """
        header_bytes, payload_bytes = decode_prefix(prefix, UNLIMITED)
        command: Json = None
        if header_bytes <= self._options.limits.header_bytes:
            command, header_bytes = decode_header(line.read(header_bytes)).get("cmd"), 0
        self._count(malformed_frames=1)
        self._listener.complaints.tell((line.address, "limit"), "wp30: %s sent %s; it is told", line.peer, over)
        recv_ms = _since(began)
        head: dict[str, Json] = {"cmd": command, "recv_ms": recv_ms, "payload_bytes": payload_bytes}
        if self._send(line, Reply({**head, **_failure(over), "server_ms": _since(began)})):
            with line.deadline(time.monotonic() + self._options.stall_s):
                line.skip(header_bytes + payload_bytes)  # else the client, which still sends, sees a reset only

    def _answer(self, frame: Frame, recv_ms: float, received: float, left: Left) -> Reply:
        head: dict[str, Json] = {
            "cmd": frame.header.get("cmd"), "recv_ms": recv_ms, "payload_bytes": len(frame.payload),
        }  # fmt: skip
        try:
            reply = self._commands.run(frame, left)
        except IncompatibleCache as error:
            self._count(failed_commands=1)
            text = "wp30: a cache is refused: %s"
            self._listener.complaints.tell(error.field, text, error, level=logging.INFO)
            return Reply({**head, "status": "incompatible", "error": str(error)}, timed=False)
        except ConnectionAbortedError:
            self._count(abandoned_commands=1)
            raise
        except _FAILURES as error:
            self._count(failed_commands=1)
            text = "wp30: command %r failed: %s"
            self._listener.complaints.tell(str(head["cmd"]), text, head["cmd"], error, level=logging.INFO)
            reply = Reply(_failure(error))
        header = {**head, **reply.header}
        if reply.timed:
            header["server_ms"] = (time.perf_counter() - received) * 1000
        return Reply(header, reply.payload)

    def _may_shut_down(self, host: str) -> bool:
        address = ipaddress.ip_address(host.partition("%")[0])
        plain = getattr(address, "ipv4_mapped", None) or address
        return self._options.remote_shutdown or plain.is_loopback

    def _count(self, **changes: int) -> None:
        with self._lock:
            for name, change in changes.items():
                self._counts[name] += change


def _failure(error: BaseException) -> dict[str, Json]:
    # The trace has the causes and no stack, which would show file names of this machine.
    causes: list[str] = []
    found: BaseException | None = error
    while found is not None and len(causes) < _MAX_CAUSES:
        causes.append(f"{type(found).__name__}: {found}")
        found = found.__cause__
    text = f"{type(error).__name__}: {error}"
    return {"status": "implementation_error", "error": text, "trace": "\n".join(causes)[-_TRACE_CHARACTERS:]}


# ---- A cache worker together with its engine, to start and close as one


class ModelWorker:
    """Loads, then listens; closes the engine first, so that no connection waits for its model."""

    def __init__(self, engine: PrefixEngine, worker: CacheWorker) -> None:
        self._engine, self._worker = engine, worker
        self._is_loaded = False

    def start(self) -> Endpoint:
        """Load the model and listen. Raises ConfigError."""
        self._engine.start()
        self._is_loaded = True
        return self._worker.start()

    def trouble(self) -> str | None:
        """Return which thread does not go on, None while all do, and while the model is loaded."""
        return self._worker.trouble() or (self._engine.thread.trouble() if self._is_loaded else None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a client asks for shutdown; return whether one did."""
        return self._worker.wait(timeout_s)

    def close(self) -> None:
        """End every job and connection and join every thread; idempotent."""
        self._engine.close()
        self._worker.close()

    def statistics(self) -> CacheWorkerStatistics:
        return self._worker.statistics()
