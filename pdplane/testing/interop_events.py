"""What the interop peer prints: one JSON object a line, with the seconds since the start."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TextIO


class Events:
    """Standard output, or another stream; any thread may print."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, event: str, **values: object) -> None:
        line = {"event": event, "t": round(self.now, 6), **values}
        with self._lock:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started
