"""Time as a thread lives it: a pause of its process is nobody else's silence."""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_S = 0.25  # a thread that is later than this was held up: stopped, swapped out, or kept from the interpreter


class AwakeClock:
    """Seconds that stand still while the thread that reads it cannot run.

    What others said meanwhile waits in the sockets, so deadlines that passed meanwhile are no sign of anything. One
    thread owns it: it says at each `lap` how long it may be busy or wait until the next one, and reads it after a lap,
    which takes out what has just been missed.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._missed = 0.0
        self._due: float | None = None

    def now(self) -> float:
        return self._read() - self._missed

    def lap(self, allowed_s: float = 0.0) -> None:
        """The last lap is over, and the next one takes no longer than `allowed_s`; what it is late then is a pause."""
        read = self._read()
        if self._due is not None and (late := read - self._due) > _PAUSE_S:
            self._missed += late
        self._due = read + allowed_s
