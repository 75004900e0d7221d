"""After each test: no thread, socket or file descriptor more than before it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_PATIENCE_S = 3.0  # a joined thread's file descriptors may close a moment later


def _descriptors() -> dict[str, str]:
    found = {}
    for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd").exists() else []:
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own descriptor
    return found


def _leaks(threads: set[threading.Thread], descriptors: dict[str, str]) -> list[str]:
    new_threads = [t.name for t in threading.enumerate() if t not in threads]
    new_files = [f"fd {k} {v}" for k, v in _descriptors().items() if descriptors.get(k) != v]
    kept = [
        text for text in new_files if "socket:" in text or "pipe:" in text or "eventfd" in text or "eventpoll" in text
    ]
    return new_threads + kept


@pytest.fixture(autouse=True)
def _no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    if request.node.get_closest_marker("keeps_threads"):
        return  # the test shares an MLX thread or daemon with its module; the module's fixture closes it
    deadline = time.monotonic() + _PATIENCE_S
    while leaks := _leaks(threads, descriptors):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail(f"leaked: {', '.join(leaks)}")
        time.sleep(0.01)
