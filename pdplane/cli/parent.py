"""Ends with the process that started us, whatever way that one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STDIN = 0
_GRACE_S = 20.0
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def exit_with_parent(spoken_to: Callable[[], None] = lambda: None) -> None:
    """Send ourselves SIGTERM when standard input, a pipe from the parent, comes to its end.

    The kernel closes the parent's end even after SIGKILL. If the signal has not ended us after a while, we go without
    cleaning up: nobody is left who could be told. `spoken_to` is called on another thread for whatever comes before.
    """
    threading.Thread(target=_watch, args=(spoken_to,), name="pdplane-parent", daemon=True).start()


def leave_within(limit_s: float) -> None:
    """Exit without cleaning up if the process is still here then.

    For a rank of a split model whose end has begun: a collective operation that waits for a peer which is gone, or
    will never come, cannot be interrupted, and the thread inside it cannot be joined.
    """
    threading.Thread(target=_leave, args=(limit_s,), name="pdplane-leave", daemon=True).start()


@contextmanager
def killable(limit_s: int) -> Iterator[None]:
    """Inside the block the kernel ends the process at a signal, or after the limit; the main thread only.

    For a call that waits without letting go of the interpreter, as MLX does until all ranks have come: no handler and
    no thread of ours would run.
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
