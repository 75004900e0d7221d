"""WP30: one JSON header and one payload a frame, and its client."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import NoReturn, Self

import attrs

from pdplane.errors import LocalProtocolError, SessionLost, WireError
from pdplane.ids import Endpoint
from pdplane.net import Json
from pdplane.workers.listener import BoundedSocket, bytes_of

MAGIC = b"WP30"
PREFIX_BYTES = 12
MAX_LENGTH = 2**32 - 1

_PREFIX = struct.Struct("!4sII")


@attrs.frozen
class Wp30Limits:
    """The largest lengths that a reader accepts; checked before any memory is taken."""

    header_bytes: int = 4 << 20
    payload_bytes: int = 1 << 30

    def exceeded_by(self, prefix: bytes | memoryview) -> WireError | None:
        """Return what a frame with this prefix has too much of; None for one within the limits, or for no frame."""
        magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if magic == MAGIC and header_bytes > self.header_bytes:
            return WireError("header", f"a header of {header_bytes} bytes, allowed are 1..{self.header_bytes}")
        if magic == MAGIC and header_bytes and payload_bytes > self.payload_bytes:
            return WireError("payload", f"a payload of {payload_bytes} bytes, allowed are {self.payload_bytes}")
        return None


UNLIMITED = Wp30Limits(MAX_LENGTH, MAX_LENGTH)


@attrs.frozen(eq=False)
class Frame:
    """A frame that was read; `nbytes` counts all of it."""

    header: dict[str, Json]
    payload: memoryview
    nbytes: int


def encode_frame(header: object, payload: bytes | bytearray | memoryview = b"") -> list[bytes | memoryview]:
    """Return a frame as parts that are sent one after the other; the payload is not copied.

    Raises TypeError or ValueError for a header that is no JSON, LocalProtocolError for one that is too long.
    """
    text = json.dumps(header, allow_nan=False).encode("ascii")
    view = bytes_of(payload)
    if max(len(text), len(view)) > MAX_LENGTH:
        raise LocalProtocolError(f"a frame of {len(text)} and {len(view)} bytes does not fit in u32 lengths")
    return [_PREFIX.pack(MAGIC, len(text), len(view)) + text, view]


def decode_prefix(data: bytes | memoryview, limits: Wp30Limits) -> tuple[int, int]:
    """Return the header's and the payload's length. Raises WireError."""
    magic, header_bytes, payload_bytes = _PREFIX.unpack(data)
    if magic != MAGIC:
        raise WireError("magic", f"the magic is {bytes(magic)!r}, not {MAGIC!r}")
    if not header_bytes:
        raise WireError("header", "a header of 0 bytes")
    if (over := limits.exceeded_by(data)) is not None:
        raise over
    return header_bytes, payload_bytes


def decode_header(data: bytes | memoryview) -> dict[str, Json]:
    """Return the header object. Raises WireError for anything else."""
    try:
        found = json.loads(str(data, "utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # bad Unicode, bad JSON and endless digits are ValueErrors
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
        raise WireError("header", f"the header {reason}") from None
    if not isinstance(found, dict):
        raise WireError("header", "the header is not a JSON object")
    return found


def send_frame(line: BoundedSocket, header: Mapping[str, object], payload: bytes | bytearray | memoryview = b"") -> int:
    """Send one frame; return its size, 12 bytes and both lengths."""
    parts = encode_frame(header, payload)
    line.write(*parts)
    return sum(len(part) for part in parts)


def read_frame(line: BoundedSocket, limits: Wp30Limits, *, prefix: memoryview | None = None) -> Frame:
    """Read one frame, whose prefix may have been read before. Raises WireError or OSError."""
    header_bytes, payload_bytes = decode_prefix(line.read(PREFIX_BYTES) if prefix is None else prefix, limits)
    header = decode_header(line.read(header_bytes))
    return Frame(header, line.read(payload_bytes), PREFIX_BYTES + header_bytes + payload_bytes)


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(word)


# ---- A client of WP30 workers, ours and the reference's
#
# A call that fails half-way (a time-out, a lost connection, bytes that are no reply) closes the connection: so that a
# late reply is never taken for the next call's. The next call connects again.


@attrs.frozen(eq=False)
class Wp30Reply:
    """A worker's reply, its sizes and times.

    As the reference counts: `transport_bytes` is the request's frame, `send_ms` the time until the kernel has taken it,
    `roundtrip_ms` the time until the reply was read, `reply_bytes` the reply's payload and 12. Complete:
    `request_bytes` and `reply_frame_bytes`, headers included, and `wait_ms` from sent to the reply's first byte.
    """

    header: dict[str, Json]
    payload: memoryview
    transport_bytes: int
    send_ms: float
    roundtrip_ms: float
    reply_bytes: int
    request_bytes: int
    reply_frame_bytes: int
    wait_ms: float

    @property
    def failure(self) -> str | None:
        """The error that the worker reports, None without one."""
        found = self.header.get("error")
        return None if found is None else str(found)


class Wp30Client:
    """One connection, one call at a time; for the thread that made it. The constructor opens nothing."""

    def __init__(
        self,
        worker: Endpoint,
        *,
        timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        limits: Wp30Limits | None = None,
    ) -> None:
        self.worker = worker
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._limits = limits or Wp30Limits()
        self._line: BoundedSocket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; idempotent, and the next call opens another one."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def call(
        self,
        header: Mapping[str, object],
        payload: bytes | bytearray | memoryview = b"",
        *,
        timeout_s: float | None = None,
    ) -> Wp30Reply:
        """Send one frame and read its reply within `timeout_s` (default: the client's).

        Raises SessionLost with the cause, and then the connection is closed.
        """
        deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        try:
            line = self._connected(deadline_s)
            reply = self._exchange(line, header, payload, deadline_s)
        except (OSError, WireError) as error:
            self.close()
            raise SessionLost(str(self.worker), str(error) or type(error).__name__) from error
        except BaseException:
            self.close()
            raise
        return reply

    def ping(self) -> Wp30Reply:
        return self.call({"cmd": "ping"})

    def run_text(self, tokens: Sequence[int], max_tokens: int = 48) -> Wp30Reply:
        return self.call({"cmd": "run_text", "token_ids": list(tokens), "max_tokens": max_tokens})

    def run_cache(
        self,
        cache: bytes | bytearray | memoryview,
        query: Sequence[int],
        max_tokens: int = 48,
        *,
        codec: str = "none",
        prefix_hash: str | None = None,
    ) -> Wp30Reply:
        header = {
            "cmd": "run_cache", "codec": codec, "prefix_hash": prefix_hash, "query_ids": list(query),
            "max_tokens": max_tokens,
        }  # fmt: skip
        return self.call(header, cache)

    def prefill_cache(self, tokens: Sequence[int], *, document_id: str = "?", codec: str = "none") -> Wp30Reply:
        header = {"cmd": "prefill_cache", "token_ids": list(tokens), "document_id": document_id, "codec": codec}
        return self.call(header)

    def prefill_time(self, tokens: Sequence[int]) -> Wp30Reply:
        return self.call({"cmd": "prefill_time", "token_ids": list(tokens)})

    def shutdown(self) -> Wp30Reply:
        reply = self.call({"cmd": "shutdown"})
        self.close()
        return reply

    def _connected(self, deadline_s: float) -> BoundedSocket:
        if self._line is None:
            within_s = min(self._connect_timeout_s, max(deadline_s - time.monotonic(), 0.001))
            self._line = BoundedSocket.connect(self.worker, within_s, self._timeout_s)
        return self._line

    def _exchange(
        self,
        line: BoundedSocket,
        header: Mapping[str, object],
        payload: bytes | bytearray | memoryview,
        deadline_s: float,
    ) -> Wp30Reply:
        with line.deadline(deadline_s):
            began = time.perf_counter()
            sent_bytes = send_frame(line, header, payload)
            sent = time.perf_counter()
            prefix = line.read(PREFIX_BYTES)
            first = time.perf_counter()
            frame: Frame = read_frame(line, self._limits, prefix=prefix)
            ended = time.perf_counter()
        return Wp30Reply(
            frame.header, frame.payload, transport_bytes=sent_bytes, send_ms=(sent - began) * 1000,
            roundtrip_ms=(ended - began) * 1000, reply_bytes=len(frame.payload) + PREFIX_BYTES,
            request_bytes=sent_bytes, reply_frame_bytes=frame.nbytes, wait_ms=(first - sent) * 1000,
        )  # fmt: skip


def expect(reply: Wp30Reply, key: str) -> Json:
    """Return a field of a reply. Raises WireError with the worker's own error when it is missing."""
    if key not in reply.header:
        raise WireError(key, f"the worker's reply has no {key}: {reply.failure or 'no reason given'}")
    return reply.header[key]
