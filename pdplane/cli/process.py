"""What every command's process needs: logging, signals to wait for, and an end together with its parent."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from types import FrameType

from pdplane.net import Wakeup

LEVELS = ("debug", "info", "warning", "error")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, a request's fields, the traceback if any."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= getattr(record, "fields", {})
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def set_up_logging(level: str, *, as_json: bool) -> None:
    """Log everything of `pdplane` from this level on, other packages from warning on."""
    handler = logging.StreamHandler(sys.stderr)
    line = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if as_json else line)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pdplane").setLevel(level.upper())


# ---- SIGINT and SIGTERM as something to wait for


_KILLED = 130


class StopSignal:
    """SIGINT and SIGTERM: the first one asks for an end, the second one ends at once.

    A handler runs in the main thread, in the middle of whatever that was doing. So it takes no lock that the main
    thread may hold: an Event would deadlock with a main thread that was just waiting for it.
    """

    def __init__(self) -> None:
        self._asked = False
        self._interrupts = False
        self._wakeup: Wakeup | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle both signals inside the block; the main thread only."""
        self._wakeup = wakeup = Wakeup()
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            wakeup.close()

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

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os._exit(_KILLED)
        self._asked = True
        if self._wakeup is not None:
            self._wakeup.wake()
        if self._interrupts:
            raise KeyboardInterrupt


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
