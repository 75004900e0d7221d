"""A signal ends a wait whenever it comes: a daemon that hangs in its handler can only be killed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

import pytest

from pdplane.cli.process import StopSignal


def _lines_of_a_wait(stop: StopSignal, at: int) -> int:
    """Wait once, with a signal at the given line of whatever Python code that runs; gives how many lines ran."""
    lines = 0

    def trace(_frame: FrameType, event: str, _arg: object) -> object:
        nonlocal lines
        lines += event == "line"
        if event == "line" and lines == at:
            signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        stop.wait(0.001)
    finally:
        sys.settrace(before)
    return lines


def test_a_signal_at_any_line_of_a_wait_ends_it() -> None:
    at, ran = 0, 1
    while at < ran:
        at, stop = at + 1, StopSignal()
        with stop.listening():
            ran = _lines_of_a_wait(stop, at)
            assert stop.wait(0) == (at <= ran)
    assert at > 1


def test_a_signal_ends_a_long_wait() -> None:
    stop = StopSignal()
    with stop.listening():
        sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        sender.start()
        assert stop.wait(60)
        sender.join()


def test_a_signal_breaks_off_a_start() -> None:
    stop = StopSignal()
    with stop.listening():
        with pytest.raises(KeyboardInterrupt), stop.interrupting():
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt), stop.interrupting():
            pytest.fail("asked before the start, it must not begin")


def test_without_a_signal_a_wait_is_over_in_time() -> None:
    stop = StopSignal()
    with stop.listening():
        assert not stop.wait(0.001)
    assert signal.getsignal(signal.SIGTERM) != stop._receive
