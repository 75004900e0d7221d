"""The one MLX thread of a process, and the cooperative jobs that take turns on it.

MLX streams belong to the thread that made them and a lazy array cannot be evaluated elsewhere, so loading, probing
and every evaluation happen on this thread. Work comes as generators: each `next` is one turn (one chunk of a prompt,
one token of a sequence) and the jobs' turns are served first come, first served, which makes a round robin. Jobs of
one `PromptLine` share one place in it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from pdplane.engine.prompts import PromptLine
from pdplane.engine.untyped import clear_streams
from pdplane.errors import InternalError

T = TypeVar("T")
Turns = Generator[None, None, T]
"""A job's work: it yields at the end of each turn and returns the job's result."""


class Job(Generic[T]):
    """One piece of work on the MLX thread.

    `future` ends with the generator's return value, with the exception that it raised, or with CancelledError. It
    ends on the MLX thread after the job's last turn: once it is done, the job touches no arena block any more.
    """

    def __init__(self, make_turns: Callable[[], Turns[T]]) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()  # so that Future.cancel() is refused: it would end too early
        self._cancelled = threading.Event()
        self._make_turns = make_turns
        self._turns: Turns[T] | None = None

    def cancel(self) -> None:
        """Ask the job to end at its next turn; harmless when it has ended. Any thread may call this."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled.is_set()

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the job and return its result. Raises what the job raised, CancelledError, or TimeoutError."""
        return self.future.result(timeout_s)

    def _turn(self, *, closing: bool) -> bool:
        """Run one turn on the MLX thread; return True when another one is needed."""
        if closing or self._cancelled.is_set():
            self._drop_turns()
            self.future.set_exception(CancelledError("the engine closes" if closing else "cancelled"))
            return False
        if self._turns is None:
            self._turns = self._make_turns()
        try:
            next(self._turns)
        except StopIteration as stop:
            self._turns = None
            self.future.set_result(stop.value)
            return False
        return True

    def _fail(self, error: BaseException) -> None:
        self._turns = None
        if not self.future.done():
            self.future.set_exception(error)

    def _drop_turns(self) -> None:
        if self._turns is not None:
            self._turns.close()
            self._turns = None


BUSY_S = 300.0
"""A turn that takes longer counts as one that hangs; a large model's longest chunk takes a part of it."""


class _OneWorker(ThreadPoolExecutor):
    """One thread that shows since when it has been at the same turn."""

    began: float | None = None

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:  # noqa: ANN401  (the base's own)
        """Queue a call, timed."""
        return super().submit(self._timed, fn, *args, **kwargs)

    def _timed(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:  # noqa: ANN401
        self.began = time.monotonic()
        try:
            return fn(*args, **kwargs)
        finally:
            self.began = None


class EngineThread:
    """One permanent thread; `submit` queues jobs on it, `close` ends them and joins it.

    The executor behind it has exactly one worker, which it never replaces. An exception in a turn ends in that
    turn's own future and from there in its job; the thread goes on with the others.
    """

    def __init__(self, name: str = "pdplane-mlx") -> None:
        self._name = name
        self._lock = threading.RLock()  # reentrant: a turn that failed at once reports from inside submit
        self._closing = False
        self._executor: _OneWorker | None = None

    def start(self) -> None:
        """Start the thread; harmless when it runs."""
        with self._lock:
            if self._closing:
                raise InternalError("the engine thread was closed and cannot start again")
            if self._executor is None:
                self._executor = _OneWorker(max_workers=1, thread_name_prefix=self._name)

    def trouble(self, allowed_s: float = BUSY_S) -> str | None:
        """Return why no turn comes any more, None while they come, however long one takes within the bound."""
        began = None if self._executor is None else self._executor.began
        late_s = 0.0 if began is None else time.monotonic() - began
        return f"the thread {self._name} hangs: one turn takes {late_s:.0f} s" if late_s > allowed_s else None

    @property
    def closing(self) -> bool:
        """Whether `close` was called; long work may look and stop."""
        return self._closing

    def submit(
        self, make_turns: Callable[[], Turns[T]], line: PromptLine[Job[Any]] | None = None, chunks: int = 1
    ) -> Job[T]:
        """Queue a job; `make_turns` is called on the MLX thread. Raises InternalError when the thread does not run.

        With a `line` its turns come when the line says so; `chunks` is how many it will take.
        """
        job = Job(make_turns)
        with self._lock:
            if self._executor is None or self._closing:
                raise InternalError("the engine thread is not running")
            if line is None:
                self._schedule(self._executor, job)
            else:
                line.add(job, chunks)
                self._serve(self._executor, line)
        return job

    def share(
        self,
        make_turns: Callable[[], Turns[T]],
        key: int,
        mark: str,
        line: PromptLine[Job[Any]] | None = None,
        chunks: int = 1,
    ) -> Job[T]:
        """Queue a job that all ranks of a split model run together under this key; here there is one rank.

        `mark` says what the job is about, and must be the same on all ranks.
        """
        return self.submit(make_turns, line, chunks)

    def call(self, function: Callable[[], T]) -> T:
        """Run one function on the MLX thread and return its result. Raises what it raised."""

        def turns() -> Turns[T]:
            yield from ()
            return function()

        return self.submit(turns).result()

    def close(self) -> None:
        """End every job at its next turn and join the thread; idempotent."""
        with self._lock:
            first, self._closing = not self._closing, True
            executor = self._executor
            if executor is not None and first:
                # A thread that ends with live MLX streams can abort the process at exit ("terminate called").
                executor.submit(clear_streams)
        if executor is not None:
            executor.shutdown(wait=True)

    def _schedule(self, executor: ThreadPoolExecutor, job: Job[T]) -> None:
        executor.submit(self._take_turn, executor, job).add_done_callback(lambda turn: self._report(turn, job))

    def _take_turn(self, executor: ThreadPoolExecutor, job: Job[T]) -> None:
        wants_more = job._turn(closing=self._closing)
        while wants_more:
            with self._lock:
                if not self._closing:
                    self._schedule(executor, job)
                    return
            wants_more = job._turn(closing=True)

    def _serve(self, executor: ThreadPoolExecutor, line: PromptLine[Job[Any]]) -> None:
        """Queue a turn of a line that has none queued (under the lock); the job is chosen when the turn comes."""
        if line.is_served or not line:
            return
        line.is_served = True
        taken: list[Job[Any]] = []
        turn = executor.submit(self._take_turn_of_line, executor, line, taken)
        turn.add_done_callback(lambda turn: self._report(turn, taken[0]))

    def _take_turn_of_line(
        self, executor: ThreadPoolExecutor, line: PromptLine[Job[Any]], taken: list[Job[Any]]
    ) -> None:
        with self._lock:
            job = line.take()
        assert job is not None, "a line is served only while a job waits in it"
        taken.append(job)
        unfinished: Job[Any] | None = None
        try:
            unfinished = job if job._turn(closing=self._closing) else None
        finally:
            self._go_on(executor, line, unfinished)

    def _go_on(self, executor: ThreadPoolExecutor, line: PromptLine[Job[Any]], unfinished: Job[Any] | None) -> None:
        with self._lock:
            line.is_served = False
            if unfinished is not None:
                line.resume(unfinished)
            if not self._closing:
                self._serve(executor, line)
                return
        while (job := line.take()) is not None:
            job._turn(closing=True)

    def _report(self, turn: Future[None], job: Job[T]) -> None:
        error = turn.exception()
        if error is not None:
            job._fail(error)
