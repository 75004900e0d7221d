"""Jobs on the MLX thread: turns, results, failures, cancelling and closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from pdplane.engine.thread import EngineThread, Turns
from pdplane.errors import InternalError


@pytest.fixture
def thread() -> Iterator[EngineThread]:
    found = EngineThread("engine-under-test")
    found.start()
    yield found
    found.close()


def counting(name: str, turns: int, log: list[str]) -> Turns[str]:
    for number in range(turns):
        log.append(f"{name}{number}")
        yield
    return name


def endless(running: threading.Event) -> Turns[None]:
    while True:
        running.set()
        yield


def test_jobs_take_turns(thread: EngineThread) -> None:
    log: list[str] = []
    gate = threading.Event()
    opened = thread.submit(lambda: waiting_for(gate))
    jobs = [thread.submit(lambda name=name: counting(name, 3, log)) for name in "ab"]
    gate.set()
    assert [job.result(10) for job in jobs] == ["a", "b"]
    assert log == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert opened.result(10) is None


def waiting_for(gate: threading.Event) -> Turns[None]:
    gate.wait(10)
    yield


def test_everything_runs_on_one_thread(thread: EngineThread) -> None:
    def who() -> Turns[set[int]]:
        seen = set()
        for _ in range(3):
            seen.add(threading.get_ident())
            yield
        return seen

    first, second = thread.submit(who), thread.submit(who)
    assert first.result(10) | second.result(10) == {thread.call(threading.get_ident)}
    assert thread.call(threading.get_ident) != threading.get_ident()


def test_an_exception_fails_its_job_only(thread: EngineThread) -> None:
    log: list[str] = []

    def failing() -> Turns[None]:
        yield
        raise RuntimeError("no memory")

    def not_even_starting() -> Turns[None]:
        raise KeyError("layer")

    bad, worse = thread.submit(failing), thread.submit(not_even_starting)
    good = thread.submit(lambda: counting("g", 4, log))
    assert good.result(10) == "g"
    with pytest.raises(RuntimeError, match="no memory"):
        bad.result(10)
    with pytest.raises(KeyError, match="layer"):
        worse.result(10)
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)


def test_cancel_ends_a_job_at_its_next_turn(thread: EngineThread) -> None:
    running, ended_on = threading.Event(), []

    def turns() -> Turns[None]:
        try:
            yield from endless(running)
        finally:
            ended_on.append(threading.get_ident())

    job = thread.submit(turns)
    assert running.wait(10)
    assert not job.future.cancel(), "only Job.cancel waits for the turn's end"
    job.cancel()
    with pytest.raises(CancelledError):
        job.result(10)
    assert ended_on == [thread.call(threading.get_ident)]
    job.cancel()  # harmless afterwards


def test_a_job_cancelled_before_its_first_turn_never_runs(thread: EngineThread) -> None:
    gate, log = threading.Event(), []
    blocker = thread.submit(lambda: waiting_for(gate))
    job = thread.submit(lambda: counting("x", 1, log))
    job.cancel()
    gate.set()
    blocker.result(10)
    with pytest.raises(CancelledError):
        job.result(10)
    assert log == []


def test_close_ends_all_jobs_and_joins() -> None:
    thread = EngineThread("engine-under-test")
    thread.start()
    running = threading.Event()
    jobs = [thread.submit(lambda: endless(running)) for _ in range(3)]
    assert running.wait(10)
    thread.close()
    thread.close()
    for job in jobs:
        with pytest.raises(CancelledError, match="closes"):
            job.result(0)
    assert not [t for t in threading.enumerate() if t.name.startswith("engine-under-test")]
    with pytest.raises(InternalError, match="not running"):
        thread.submit(lambda: endless(running))
    with pytest.raises(InternalError, match="cannot start again"):
        thread.start()


def test_close_before_start_opens_nothing() -> None:
    thread = EngineThread()
    thread.close()
    with pytest.raises(InternalError):
        thread.call(threading.get_ident)


def test_a_long_turn_is_busy_until_it_counts_as_hung(thread: EngineThread) -> None:
    begun, gate = threading.Event(), threading.Event()

    def turns() -> Turns[None]:
        begun.set()
        gate.wait()
        yield

    job = thread.submit(turns)
    assert begun.wait(15)
    assert thread.trouble() is None
    assert "engine-under-test hangs" in str(thread.trouble(allowed_s=0.0))
    gate.set()
    job.result(15)
    thread.call(lambda: None)
    assert thread.trouble() is None
