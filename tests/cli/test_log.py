"""A log that nobody reads, or whose words a peer chooses."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import logging
import os
import subprocess
from collections.abc import Iterator

import pytest

from pdplane.cli import log
from pdplane.cli.log import JsonFormatter, LineFormatter, QueuedLog
from pdplane.ids import Endpoint
from pdplane.net import Complaints
from tests.cli.daemons import PATIENCE_S, command

_SET_PIPE_SIZE = 1031


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, _SET_PIPE_SIZE, 4096)
    with open(reader, "rb", buffering=0), open(writer, "wb", buffering=0):
        yield reader, writer


def record(text: str, *values: object) -> logging.LogRecord:
    return logging.LogRecord("pdplane.x", logging.WARNING, __file__, 1, text, values, None)


def test_who_logs_waits_for_no_reader_and_learns_what_was_dropped(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    queued = QueuedLog(writer)
    for number in range(log.MAX_LINES + 500):
        queued.emit(record("line %d", number))
    queued.close()  # which gives up soon
    text = b""
    while b"were dropped" not in text:
        text += os.read(reader, 1 << 16)
    lines = text.decode().splitlines()
    assert lines[:-1] == [f"line {number}" for number in range(len(lines) - 1)]
    assert log.MAX_LINES <= len(lines) - 1 == log.MAX_LINES + 500 - int(lines[-1].split()[0])
    queued.emit(record("later"))
    queued.close()
    assert os.read(reader, 1 << 16) == b"later\n"


def test_long_lines_are_bounded_together(pipe: tuple[int, int]) -> None:
    queued = QueuedLog(pipe[1])
    for _ in range(100):
        queued.emit(record("x" * (log.MAX_CHARACTERS // 10)))
    assert queued.kept <= log.MAX_CHARACTERS
    os.set_blocking(pipe[0], False)
    with contextlib.suppress(BlockingIOError):
        while queued.kept:
            os.read(pipe[0], 1 << 20)


@pytest.mark.parametrize("word", ["a\nb", "a\r\x1b[2Jb", "a\x9b2Jb", "a\u2028b", "a\0b"])
def test_a_peers_word_stays_inside_its_line(word: str) -> None:
    for formatter in (LineFormatter(), JsonFormatter()):
        line = formatter.format(record("it said %s", word))
        assert line.isprintable()
    assert json.loads(line)["message"] == f"it said {word}"


def test_the_same_complaint_is_written_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints(logging.getLogger("pdplane.test"), interval_s=3600)
    for number in range(50):
        complaints.tell("one", "one is wrong: %d", number)
    assert caplog.messages == ["one is wrong: 0"]
    for number in range(50):
        complaints.tell(number, "%d is wrong", number)
    assert len(caplog.messages) == 20  # of all peers together
    complaints = Complaints(logging.getLogger("pdplane.test"), interval_s=0)
    caplog.clear()
    complaints.tell("one", "one is wrong")
    complaints.tell("one", "one is wrong again")
    assert caplog.messages == ["one is wrong", "one is wrong again"]


def test_a_daemon_whose_log_nobody_reads_goes_on_and_ends() -> None:
    words = command("prefill", "--model", "toy", "--port", "0", "--bootstrap-port", "0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert daemon.stderr is not None
        fcntl.fcntl(daemon.stderr.fileno(), _SET_PIPE_SIZE, 4096)
        where = Endpoint.parse(json.loads(daemon.stdout.readline())["http"])
        connection = http.client.HTTPConnection(where.host, where.port, timeout=PATIENCE_S)
        for _ in range(200):
            connection.request("POST", "/generate", b'{"text": 1}', {"Content-Type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 400
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        daemon.terminate()
        assert daemon.wait(PATIENCE_S) == 0
        assert len(daemon.stderr.read()) >= 3072  # it was full: another line did not fit
