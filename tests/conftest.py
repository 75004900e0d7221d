"""The BLAS library, how much hypothesis tries; and after each test and module nothing that was opened is left."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from pdplane.engine.blas import AUTO, use_blas
from tests.waiting import PATIENCE_S

# No deadlines: a busy machine pauses for longer than any of them.
settings.register_profile("quick", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", settings.get_profile("quick"), max_examples=500)
settings.load_profile("quick")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--blas", default=AUTO, help="what MLX computes with in this process, as for the daemons")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # here and in daemons: tests run side by side
    use_blas(config.getoption("blas"))


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
    found = _descriptors()
    standard = {found.get(number) for number in "012"}  # pytest has given them back when a run ends early
    new_files = [f"fd {k} {v}" for k, v in found.items() if descriptors.get(k) != v and v not in standard]
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
