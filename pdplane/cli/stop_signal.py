"""SIGINT and SIGTERM as something to wait for."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_KILLED = 130


class StopSignal:
    """SIGINT and SIGTERM: the first one asks for an end, the second one ends at once.

    A handler runs in the main thread, in the middle of whatever that was doing. So it takes no lock: an Event would
    deadlock with a main thread that was just waiting for it.
    """

    def __init__(self) -> None:
        self._asked = False
        self._interrupts = False
        self._bell: tuple[socket.socket, socket.socket] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle both signals inside the block; the main thread only."""
        self._bell = bell = socket.socketpair()
        bell[1].settimeout(0)
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for end in bell:
                end.close()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal inside the block raises KeyboardInterrupt there: for a start that waits for a long load."""
        self._interrupts = True
        try:
            if self._asked:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def wait(self, timeout_s: float) -> bool:
        """Whether a signal came within the time; inside `listening`."""
        assert self._bell is not None, "listen first"
        if not self._asked:
            select.select([self._bell[0]], [], [], timeout_s)
        return self._asked

    def _receive(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            os._exit(_KILLED)
        self._asked = True
        if self._bell is not None:
            self._bell[1].send(b"\0")
        if self._interrupts:
            raise KeyboardInterrupt
