"""Wait for a condition that only counts can tell, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 15.0  # the bound of every wait in tests; on an idle machine none comes near it

ALERT = {"ping_interval_s": 0.3}
"""For both sides of a test that waits for silence to be noticed: after 0.9 s. A busy machine pauses as long."""


def until(condition: Callable[[], bool], what: str = "the condition", within_s: float = PATIENCE_S) -> None:
    """Return once the condition holds; an AssertionError names what did not come."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {within_s:g} s"
        time.sleep(0.005)
