"""A link of a known rate before any transport, as a test double: no byte leaves faster than a token bucket lets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs

from pdplane.errors import ConfigError
from pdplane.kv.copies import Copies
from pdplane.transport.framing import Header
from pdplane.transport.greeting import Accepted
from pdplane.transport.registry import TRANSPORTS, Transport
from pdplane.transport.sender import Line


class TokenBucket:
    """One link that any number of lines share; `bytes_per_s` may change between segments, None is no limit.

    After a pause the link may send `burst_bytes` at once.
    """

    def __init__(self, bytes_per_s: float | None = None, burst_bytes: int = 64 << 10) -> None:
        self.bytes_per_s, self._burst_bytes = bytes_per_s, burst_bytes
        self._lock = threading.Lock()
        self._free_at = 0.0

    def reserve(self, nbytes: int, now: float) -> float:
        """Return the time at which so many bytes are through the link, if they enter it now."""
        rate = self.bytes_per_s
        if rate is None:
            return now
        with self._lock:
            self._free_at = max(self._free_at, now - self._burst_bytes / rate) + nbytes / rate
            return self._free_at


class SlowLine:
    """A line whose segments arrive when the link has carried them."""

    def __init__(self, inner: Line, bucket: TokenBucket) -> None:
        self._inner, self._bucket = inner, bucket
        self._ended = threading.Event()

    def open(self) -> Accepted:
        return self._inner.open()

    def send_segment(self, header: Header, part: Copies) -> None:
        now = time.monotonic()
        self._ended.wait(max(0.0, self._bucket.reserve(part.nbytes, now) - now))
        self._inner.send_segment(header, part)

    def send_header(self, header: Header) -> None:
        self._inner.send_header(header)

    def receive(self, timeout_s: float | None) -> list[Header]:
        return self._inner.receive(timeout_s)

    def wake(self) -> None:
        self._inner.wake()

    def shutdown(self) -> None:
        self._ended.set()
        self._inner.shutdown()

    def close(self) -> None:
        self._inner.close()


def slow_transport(bucket: TokenBucket, over: str = "tcp") -> Transport:
    """Return the transport `over` behind the bucket's link; put it into `TRANSPORTS` under a name of its own.

    Raises ConfigError for one that has no lines of ours.
    """
    inner = TRANSPORTS.get(over)
    if not isinstance(inner, Transport):
        raise ConfigError(f"no slow link over {over!r}")
    line: Callable[..., Line] = inner.line

    def slow_line(*args: Any) -> SlowLine:  # noqa: ANN401  (whatever a line of that transport takes)
        return SlowLine(line(*args), bucket)

    return attrs.evolve(inner, line=slow_line)
