"""The WP30 cache worker: runs prompts, and hands out and takes in their caches, for any number of clients.

Each connection has a thread that reads a frame, answers it and reads the next; what needs the model waits there for the
one MLX thread. A connection that sends no frame costs a thread and blocks nobody. A malformed frame closes its
connection and no other. Replies carry the reference's fields in the reference's order.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from concurrent.futures import CancelledError

import attrs

from pdplane.errors import IncompatibleCache, PdplaneError, WireError
from pdplane.ids import Endpoint
from pdplane.wire.json_value import Json
from pdplane.workers.commands import Commands, Reply
from pdplane.workers.line import Line
from pdplane.workers.listener import Listener
from pdplane.workers.receiver import Receiver
from pdplane.workers.wp30 import PREFIX_BYTES, Frame, FrameLimits, read_frame, send_frame

_TRACE_CHARACTERS = 800
_MAX_CAUSES = 8
# What a command may raise; the connection lives on. A bug of another kind ends its connection only.
_FAILURES = (PdplaneError, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, MemoryError,
             CancelledError)  # fmt: skip
_log = logging.getLogger(__name__)


@attrs.frozen
class CacheWorkerOptions:
    """Bounds of a cache worker.

    `remote_shutdown` lets clients of other machines end the worker too; without it only loopback clients may.
    `expanded_bytes` bounds what a compressed cache may expand to.
    """

    limits: FrameLimits = attrs.field(factory=FrameLimits)
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
    bytes_in: int
    bytes_out: int


class CacheWorker:
    """Serves one receiver model. The constructor opens nothing; the model stays its owner's."""

    def __init__(self, listen: Endpoint, receiver: Receiver, options: CacheWorkerOptions | None = None) -> None:
        self._options = options or CacheWorkerOptions()
        self._commands = Commands(receiver, self._options.expanded_bytes)
        self._listener = Listener(
            listen, self._serve, name="wp30", max_connections=self._options.max_connections,
            stall_s=self._options.stall_s,
        )  # fmt: skip
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("malformed_frames", "commands", "failed_commands", "bytes_in", "bytes_out"), 0)

    @property
    def endpoint(self) -> Endpoint:
        return self._listener.endpoint

    def start(self) -> Endpoint:
        """Listen. Raises ConfigError naming the address."""
        return self._listener.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a client asked for shutdown; whether one did."""
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

    def _serve(self, line: Line, host: str) -> None:
        while True:
            prefix = line.await_first(PREFIX_BYTES, self._options.idle_s)
            began = time.perf_counter()
            try:
                frame = read_frame(line, self._options.limits, prefix=prefix)
            except WireError as error:
                self._count(malformed_frames=1)
                _log.warning("wp30: %s sent a malformed frame (%s); its connection is closed", line.peer, error)
                return
            received = time.perf_counter()
            if frame.header.get("cmd") == "shutdown" and self._may_shut_down(host):
                send_frame(line, {"ok": True})
                self._listener.stop()
                self._finished.set()
                return
            reply = self._answer(frame, (received - began) * 1000, received)
            self._count(commands=1, bytes_in=frame.nbytes)
            if not self._send(line, reply):
                return

    def _send(self, line: Line, reply: Reply) -> bool:
        try:
            sent = send_frame(line, reply.header, reply.payload)
        except (ValueError, RecursionError):  # a command of 1e999 or of deep lists is read, but cannot be echoed
            self._count(malformed_frames=1)
            return False
        self._count(bytes_out=sent)
        return True

    def _answer(self, frame: Frame, recv_ms: float, received: float) -> Reply:
        head: dict[str, Json] = {
            "cmd": frame.header.get("cmd"), "recv_ms": recv_ms, "payload_bytes": len(frame.payload),
        }  # fmt: skip
        try:
            reply = self._commands.run(frame)
        except IncompatibleCache as error:
            self._count(failed_commands=1)
            return Reply({**head, "status": "incompatible", "error": str(error)}, timed=False)
        except _FAILURES as error:
            self._count(failed_commands=1)
            _log.info("wp30: command %r failed: %s", head["cmd"], error)
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
    # The trace has the causes and no stack: file names of this machine are nobody's business.
    causes: list[str] = []
    found: BaseException | None = error
    while found is not None and len(causes) < _MAX_CAUSES:
        causes.append(f"{type(found).__name__}: {found}")
        found = found.__cause__
    text = f"{type(error).__name__}: {error}"
    return {"status": "implementation_error", "error": text, "trace": "\n".join(causes)[-_TRACE_CHARACTERS:]}
