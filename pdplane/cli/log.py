"""The log of a command's process: lines or JSON on standard error, which nobody waits for."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")

MAX_LINES, MAX_CHARACTERS = 2000, 1 << 20  # that wait for a reader
_IDLE_S = 0.2  # a thread that has nothing to write ends
_PATIENCE_S = 0.5  # at the end, for a reader that takes nothing

# Peers choose some of the words; none of them may begin a line of its own or speak to a terminal.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))} | {0x2028: "\\u2028", 0x2029: "\\u2029"}


class LineFormatter(logging.Formatter):
    """One line of text: time, level, logger, message; a traceback may follow it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.translate(_ESCAPES)
        return super().formatMessage(record)


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


class QueuedLog(logging.Handler):
    """Hands lines over to a thread that writes them, so that who logs never waits for who reads.

    Of what nobody reads a bounded part is kept, and the number of the lines that were dropped is told behind it. The
    thread lives while there is something to write.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._characters = 0
        self._dropped = 0
        self._writing = False
        self._thread: threading.Thread | None = None

    @property
    def kept(self) -> int:
        """Characters that wait."""
        return self._characters

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001  (whatever a message's arguments raise; logging's own handlers do the same)
            self.handleError(record)
            return
        with self._changed:
            if len(self._lines) >= MAX_LINES or self._characters + len(line) > MAX_CHARACTERS:
                self._dropped += 1
                return
            self._lines.append(line)
            self._characters += len(line)
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def flush(self) -> None:
        """Wait until everything is written, but not for a reader that takes nothing."""
        with self._changed:
            left, until = len(self._lines), time.monotonic() + _PATIENCE_S
            while (self._lines or self._writing) and self._thread is not None and time.monotonic() < until:
                self._changed.wait(0.01)
                if len(self._lines) < left:
                    left, until = len(self._lines), time.monotonic() + _PATIENCE_S

    def close(self) -> None:
        self.flush()
        super().close()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="pdplane-log", daemon=True)
        with suppress(RuntimeError):  # no thread can start now: the lines wait for the next one
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        while (text := self._next()) is not None:
            with suppress(OSError):  # nobody can read any more
                self._write(text.encode("utf-8", "backslashreplace"))

    def _next(self) -> str | None:
        """Return a line, or the number of those that were dropped before the next one; None at the thread's end."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            if not self._lines and not self._dropped:
                self._changed.wait_for(lambda: self._lines, _IDLE_S)
            self._writing = True
            if self._lines:
                line = self._lines.popleft()
                self._characters -= len(line)
                return f"{line}\n"
            if self._dropped:
                count, self._dropped = self._dropped, 0
                record = logging.LogRecord(
                    __name__, logging.WARNING, __file__, 0, "%d lines were dropped: nobody read the log", (count,), None
                )
                return f"{self.format(record)}\n"
            self._thread, self._writing = None, False
            return None

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]


def set_up_logging(level: str, *, as_json: bool) -> None:
    """Log everything of `pdplane` from this level on, other packages from warning on."""
    handler: logging.Handler
    try:
        handler = QueuedLog(sys.stderr.fileno())
    except io.UnsupportedOperation:  # a program that runs a command inside itself has put something else there
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("pdplane").setLevel(level.upper())
