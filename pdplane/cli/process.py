"""What every command's process needs: signals to wait for, and an end together with its parent."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from pdplane.net import Wakeup

logger = logging.getLogger(__name__)

# ---- SIGINT and SIGTERM as something to wait for


_KILLED = 130
_HUNG = 1
END_S = 5.0
"""How long an end may take after the requests that run had their time."""
_LAST_WORDS_S = 0.5
_KERNEL_S = 3.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """SIGINT and SIGTERM: the first one asks for an end, the second one ends at once.

    A handler runs in the main thread, in the middle of whatever that was doing. So it takes no lock that the main
    thread may hold: an Event would deadlock with a main thread that was just waiting for it.

    With `limit_s` the process is over so long after the first signal, or after `ends`, whatever hangs: it exits
    without cleaning up, and names its threads. That is the work of a thread that a signal reaches without the main
    one, and of a timer of the kernel should even that thread not run.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._asked = False
        self._interrupts = False
        self._wakeup: Wakeup | None = None
        self._guard: _Guard | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle both signals inside the block; the main thread only."""
        self._wakeup = wakeup = Wakeup()
        self._guard = guard = None if self._limit_s is None else _Guard(self._limit_s)
        before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            wakeup.close()
            if guard is not None and not (guard.counts and _holds_up_exit()):
                guard.close()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at a signal inside the block: for a start that waits for a long load."""
        self._interrupts = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for a signal; return whether one came within the time. Only inside `listening`."""
        assert self._wakeup is not None, "listen first"
        if not self._asked:
            select.select([self._wakeup.descriptor], [], [], timeout_s)
        return self._asked

    def ends(self) -> None:
        """Begin to count the limit without a signal: the process ends by itself. Harmless when it counts already."""
        if self._guard is not None:
            self._guard.count()

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os._exit(_KILLED)
        self._asked = True
        if self._wakeup is not None:
            self._wakeup.wake()
        if self._interrupts:
            raise KeyboardInterrupt


class _Guard:
    """A thread that learns of signals from the interpreter's own handler, and ends the process when its end hangs."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._reader, self._writer = socket.socketpair()
        self._writer.settimeout(0)
        self._before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.counts = False
        self._thread = threading.Thread(target=self._run, name="pdplane-end", daemon=True)
        self._thread.start()

    def count(self) -> None:
        """Begin to count, as at a signal."""
        self.counts = True
        self._writer.send(b"\0")

    def close(self) -> None:
        """Watch no more; the main thread only."""
        signal.set_wakeup_fd(self._before)
        self._writer.close()
        if self.counts:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        signals, deadline_s = 0, None
        while deadline_s is None or (left_s := deadline_s - time.monotonic()) > 0:
            self._reader.settimeout(None if deadline_s is None else left_s)
            try:
                got = self._reader.recv(64)
            except TimeoutError:
                break
            if not got:
                return
            signals += sum(number in _SIGNALS for number in got)
            if signals > 1:
                os._exit(_KILLED)
            if deadline_s is None and (signals or 0 in got):
                self.counts, deadline_s = True, time.monotonic() + self._limit_s
                signal.setitimer(signal.ITIMER_REAL, self._limit_s + _KERNEL_S)
        # On a thread of its own: nobody may be reading the log.
        words = threading.Thread(target=_name_threads, args=(self._limit_s,), daemon=True)
        words.start()
        words.join(_LAST_WORDS_S)
        os._exit(_HUNG)


def _holds_up_exit() -> bool:
    """Return whether the interpreter would wait for a thread at its end."""
    others = (thread for thread in threading.enumerate() if thread is not threading.main_thread())
    return any(not thread.daemon for thread in others)


def _name_threads(limit_s: float) -> None:
    here = (threading.main_thread(), *threading.enumerate())
    names = ", ".join(sorted({thread.name for thread in here if thread is not threading.current_thread()}))
    logger.error("the end takes more than %g s: exiting without it. Threads that still run: %s", limit_s, names)
    for handler in logging.getLogger().handlers:
        handler.flush()


# ---- The end together with the parent, however that ends


_STDIN = 0
_GRACE_S = 20.0
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def exit_with_parent(spoken_to: Callable[[], None] = lambda: None) -> None:
    """Send ourselves SIGTERM when standard input, a pipe from the parent, ends.

    The kernel closes the parent's side even after SIGKILL. If the signal has not ended us after a while, the process
    exits without cleaning up, since nobody is left to be told. `spoken_to` is called on another thread for any input
    before.
    """
    threading.Thread(target=_watch, args=(spoken_to,), name="pdplane-parent", daemon=True).start()


def leave_within(limit_s: float) -> None:
    """Exit without cleaning up if the process is still here then.

    For a rank of a split model that is ending: a collective operation that waits for a peer which is gone, or will
    never come, cannot be interrupted, and the thread inside it cannot be joined.
    """
    threading.Thread(target=_leave, args=(limit_s,), name="pdplane-leave", daemon=True).start()


@contextmanager
def killable(limit_s: int) -> Iterator[None]:
    """Let the kernel end the process at a signal, or after the limit, inside the block; the main thread only.

    For a call that waits without releasing the GIL, as MLX does until all ranks have come: no handler and no thread of
    ours would run.
    """
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _ENDS}
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(limit_s: float) -> None:
    time.sleep(limit_s)
    os._exit(1)


def _watch(spoken_to: Callable[[], None]) -> None:
    while os.read(_STDIN, 4096):  # not sys.stdin, whose lock would be missed at the interpreter's end
        spoken_to()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(1)
