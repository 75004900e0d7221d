"""`pdplane serve` as a process: one command, children that come back, nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.daemons import PATIENCE_S, Daemon, Served, command
from tests.cli.processes import descendants, wait_gone

PROMPT = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}


def test_one_command_serves_and_a_killed_daemon_is_started_again() -> None:
    served = Served("--model", "toy")
    children = descendants(served.process.pid)
    status, first = served.ask("/generate", PROMPT)
    assert (status, len(first["output_ids"])) == (200, 4)
    for child in sorted(children):
        os.kill(child, signal.SIGKILL)
        wait_gone({child})
        deadline = time.monotonic() + PATIENCE_S
        while (answer := served.ask("/generate", PROMPT))[0] != 200:
            assert answer[1]["error"]["message"]
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)
        assert answer[1]["output_ids"] == first["output_ids"]
    left = descendants(served.process.pid)
    code, log = served.end()
    wait_gone(left)
    assert (code, log.count("it is started again")) == (0, 2)
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_child_that_is_stopped_cannot_keep_it_alive() -> None:
    served = Served("--model", "toy", "--drain-timeout", "100ms")
    served.wait_healthy()
    children = descendants(served.process.pid)
    os.kill(max(children), signal.SIGSTOP)
    began = time.monotonic()
    code, log = served.end(signal.SIGTERM)
    assert code in (0, 1), log  # 1: its own limit came first, on a machine that is very busy
    wait_gone(children)
    assert time.monotonic() - began < PATIENCE_S, "and not after the patience of a child's default"


def test_a_client_that_leaves_a_stream_costs_no_error_in_the_log() -> None:
    served = Served("--model", "toy")
    served.wait_healthy()
    connection = http.client.HTTPConnection(served.at.host, served.at.port, timeout=PATIENCE_S)
    body = {"model": "toy", "prompt": "hi", "max_tokens": 3000, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert connection.getresponse().read(1)
    connection.close()
    assert served.ask("/v1/completions", {**body, "max_tokens": 4, "stream": False})[0] == 200
    code, log = served.end()
    assert (code, [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line]) == (0, []), log


def test_running_daemons_leave_selection_and_come_back() -> None:
    with Daemon("prefill") as prefill, Daemon("decode") as first, Daemon("decode") as second:
        served = Served("--prefill", prefill.url, "--decode", first.url, second.url)
        served.wait_healthy()
        assert [served.ask("/generate", PROMPT)[0] for _ in range(2)] == [200, 200]
        first.end(signal.SIGKILL)
        assert [served.ask("/generate", PROMPT)[0] for _ in range(4)] == [200] * 4
        reasons = {one["url"]: one["reason"] for one in served.ask("/status")[1]["daemons"]}
        assert reasons[first.url]
        assert reasons[second.url] is None
        shown = subprocess.run(
            command("top", "--once", str(served.at), second.url, "127.0.0.1:9"),
            capture_output=True, text=True, timeout=PATIENCE_S, check=True, env=os.environ | {"COLUMNS": "200"},
        ).stdout  # fmt: skip
        assert [shown.count(url) for url in (prefill.url, second.url)] == [1, 2]
        assert "does not answer" in shown
        assert served.end(signal.SIGTERM)[0] == 0


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--model", "/nowhere"], 1, "/nowhere"),
        ([], 1, "--model"),
        (["--prefill", "h:1"], 1, "--decode"),
        (["--model", "toy", "--draft-model", "x"], 2, "--draft-model"),
        (["--model", "toy", "--adapter-path", "x"], 2, "--adapter-path"),
        (["--model", "toy", "--trust-remote-code"], 2, "--trust-remote-code"),
        (["--model", "toy", "--quantized-kv-start", "5"], 2, "--quantized-kv-start"),
        (["--model", "toy", "--chat-template-args", "[]"], 2, "JSON object"),
    ],
)
def test_what_cannot_work_is_said_at_the_start(flags: list[str], code: int, says: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pdplane.cli.main", "serve", "--port", "0", *flags],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (ended.returncode, says in ended.stderr) == (code, True), ended.stderr
    assert "Traceback" not in ended.stderr
