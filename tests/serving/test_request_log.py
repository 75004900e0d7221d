"""What each request leaves in the log and in the metrics: one line, its id, how it ended."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

from pdplane.api import Token
from pdplane.cli.log import JsonFormatter
from pdplane.errors import Cause, RoomFailed
from pdplane.ids import Endpoint
from tests.http_client import ask, stream
from tests.serving.bodies import generate
from tests.serving.fake_node import FakeNode, Leg, answers, fails, first
from tests.waiting import until

LOGGER = "pdplane.serving.request_log"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The request lines so far, as an operator's JSON log has them."""
    return [json.loads(JsonFormatter().format(record)) for record in caplog.records if record.name == LOGGER]


def ends(endpoint: Endpoint) -> dict[str, float]:
    """How many requests ended in which way."""
    found = {}
    for line in ask(endpoint, "GET", "/metrics").body.splitlines():
        if line.startswith("pdplane_ended_reqs_total{"):
            found[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
    return found


FAILED = fails(RoomFailed(7, Cause.PEER_LOST, "prefill is gone"))
CASES: dict[str, tuple[Callable[[Leg], None] | None, dict[str, Any], int, str]] = {
    "whole": (answers("abc", alloc_ms=1.5), {}, 200, "length"),
    "streamed": (answers("abc", "stop"), {"stream": True}, 200, "stop"),
    "stopped": (answers("abc"), {"sampling_params": {"stop": ["b"]}}, 200, "stop"),
    "failed": (FAILED, {}, 502, "peer_lost"),
    "refused": (None, {"nonsense": 1}, 400, "bad_request"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_one_line(node: FakeNode, decode: Endpoint, caplog: pytest.LogCaptureFixture, case: str) -> None:
    caplog.set_level(logging.INFO, "pdplane")
    node.script, more, status, end = CASES[case]
    answer = ask(decode, "POST", "/generate", generate(**more), {"X-Request-Id": "mine"})
    assert (answer.status, answer.headers["X-Request-Id"]) == (status, "mine")
    (line,) = lines(caplog)
    assert (line["side"], line["id"], line["path"], line["status"], line["end"]) == (
        "decode",
        "mine",
        "/generate",
        status,
        end,
    )
    assert line["level"] == ("info" if status < 500 else "warning")
    assert line["total_ms"] > 0
    if case != "refused":
        assert (line["rooms"], line["prompt_tokens"]) == ("7", 5)
        assert line["tokens"] == {"stopped": 2, "failed": 0}.get(case, 3)
    assert ("error" in line) == (status != 200)
    assert (line.get("alloc_ms") == 1.5) == (case == "whole")
    assert ends(decode) == {end: 1.0}


def test_prefills_line_has_its_own_times(node: FakeNode, prefill: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdplane")
    node.script = first("a")
    answer = ask(prefill, "POST", "/generate", generate())
    (line,) = lines(caplog)
    assert (line["side"], line["end"], line["tokens"]) == ("prefill", "length", 1)
    assert line["id"] == answer.headers["X-Request-Id"]


def test_a_client_that_leaves_is_counted(node: FakeNode, decode: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdplane")
    node.script = lambda leg: leg.on_token(Token(97, -0.5))
    events = stream(decode, "/generate", generate(stream=True))
    next(events)
    events.close()
    node.next_leg().cancelled()
    until(lambda: ends(decode) == {"client_left": 1.0})
    (line,) = lines(caplog)
    assert (line["end"], line["tokens"], "status" in line) == ("client_left", 1, False)


@pytest.mark.parametrize("given", ["with space", "x" * 129, "caf\xe9", "a\tb"])
def test_an_id_that_cannot_stand_in_a_log_is_replaced(node: FakeNode, decode: Endpoint, given: str) -> None:
    node.script = answers("a")
    answer = ask(decode, "POST", "/generate", generate(), {"X-Request-Id": given})
    assert answer.headers["X-Request-Id"] != given
    assert answer.headers["X-Request-Id"].isalnum()


def test_a_peers_text_is_quoted(node: FakeNode, decode: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    node.script = fails(RoomFailed(7, Cause.PEER_FAILED, "one\nINFO forged \x1b[31m"))
    ask(decode, "POST", "/generate", generate())
    (record,) = (record for record in caplog.records if record.name == LOGGER)
    assert record.getMessage().isprintable()
