"""Processes that end with us: they print JSON lines on standard output and end with their standard input."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import attrs

from pdplane.errors import PdplaneError, WireError
from pdplane.net import JsonLines

_GRACE_S = 20.0  # for an orderly end, until SIGKILL
_TAIL_BYTES = 4096


@attrs.frozen(eq=False)
class ChildFailed(PdplaneError):
    """A process ended, or printed nothing in time, where a line was expected."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Child:
    """One running process; `close` ends it.

    It is in a process group of its own, so that Ctrl-C at the terminal reaches the parent alone, which then ends its
    children in order. They end with their standard input, which ends however the parent dies. Raises ChildFailed when
    it cannot be started.
    """

    def __init__(self, name: str, arguments: Sequence[str], *, own_log: bool = True, grace_s: float = _GRACE_S) -> None:
        """Start it; with `own_log` its standard error is kept for the reason of a failure, else it is ours.

        `grace_s` is how long `close` waits for an orderly end.
        """
        self.name, self._own_log, self._grace_s = name, own_log, grace_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `close`; it has no name to leave behind)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors if own_log else None,
                process_group=0,
            )
        except OSError as error:
            self._errors.close()
            raise ChildFailed(name, f"cannot be started: {error.strerror or error}") from error
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._lines = JsonLines(self._stdout, self._stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def hear(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return its next JSON line.

        Raises ChildFailed, with its last output, when it has ended, and after a silence.
        """
        try:
            said = self._lines.receive(timeout_s)
        except TimeoutError:
            raise ChildFailed(self.name, f"said nothing in {timeout_s:g} s") from None
        except EOFError:
            code = self._process.wait(_GRACE_S)
            raise ChildFailed(self.name, f"ended with exit code {code}: {self._last_words()}") from None
        except WireError as error:
            raise ChildFailed(self.name, error.reason) from error
        if not isinstance(said, dict):
            raise ChildFailed(self.name, f"said {str(said)[:80]!r}, which is no JSON object")
        return said

    def nudge(self) -> None:
        """Send a line without content (`null`); that the process is dead shows in the next `hear`."""
        with contextlib.suppress(BrokenPipeError):
            self._lines.send(None)

    def end(self) -> None:
        """Ask it to end, and return at once."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def close(self) -> None:
        """Ask it to end, wait, and kill it if it does not; idempotent."""
        self.end()
        try:
            self._process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._stdout.close()
            self._errors.close()

    def _last_words(self) -> str:
        if not self._own_log:
            return "its log says why"
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _TAIL_BYTES))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "no word on standard error"


class Children:
    """All processes of one command; leaving the `with` ends them together."""

    def __init__(self) -> None:
        self._running: list[Child] = []

    def start(self, name: str, arguments: Sequence[str]) -> Child:
        """Run `python -m ...`. Raises ChildFailed."""
        child = Child(name, arguments)
        self._running.append(child)
        return child

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._running:
            child.end()
        with contextlib.ExitStack() as every:  # also when the wait for one is interrupted
            for child in self._running:
                every.callback(child.close)
