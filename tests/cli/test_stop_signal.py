"""A signal ends a wait whenever it comes: a daemon that hangs in its handler can only be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
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


_HUNG_AT_EXIT = "threading.Thread(target=threading.Event().wait).start(); stop.wait(60)"
_HUNG_IN_C = (
    "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"  # no handler of Python's runs meanwhile
)


@pytest.mark.parametrize(
    ("hangs", "limit_s", "signals", "code"),
    [(_HUNG_AT_EXIT, 0.2, 1, 1), (_HUNG_IN_C, 0.2, 1, 1), (_HUNG_IN_C, 3600, 2, 130), ("stop.wait(60)", 3600, 1, 0)],
    ids=["at exit", "in C", "second signal", "nothing hangs"],
)
def test_an_end_is_bounded_whatever_hangs(hangs: str, limit_s: float, signals: int, code: int) -> None:
    program = f"""if True:
        import threading
        from pdplane.cli.process import StopSignal
        stop = StopSignal({limit_s})
        with stop.listening():
            print("up", flush=True)
            {hangs}
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            if signals > 1:  # two that are pending at one time would be one
                _wait_taken(process.pid)
        _out, log = process.communicate(timeout=30)
    assert process.returncode == code
    assert ("Threads that still run: MainThread" in log) == (code == 1)


def _wait_taken(pid: int) -> None:
    """Wait until no signal is pending, or the process has ended."""
    while True:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        pending = [line.split()[1] for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
        if all(int(mask, 16) == 0 for mask in pending):
            return
