"""After each test, and after each module: no thread, socket or file descriptor more than before it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S


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


def _nothing_kept() -> Iterator[None]:
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    deadline = time.monotonic() + PATIENCE_S  # a joined thread's file descriptors may close a moment later
    while leaks := _leaks(threads, descriptors):
        gc.collect()
        if time.monotonic() > deadline:
            pytest.fail(f"leaked: {', '.join(leaks)}")
        time.sleep(0.01)


@pytest.fixture(autouse=True, scope="module")
def _no_leaks_of_a_module() -> Iterator[None]:
    """What the fixtures of a whole module have started is gone after its last test."""
    yield from _nothing_kept()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """A module's fixture has started everything before its first test, which is any test when that runs alone."""
    yield from _nothing_kept()
