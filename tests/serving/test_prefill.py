"""Prefill's /generate: its first token once the room is done, headers of a stream at once, refusals with a status."""

from __future__ import annotations

import json
from contextlib import closing
from http.client import HTTPConnection

import pytest

from pdplane.api import FirstToken, PrefillRequest
from pdplane.errors import Cause, LocalProtocolError, RoomFailed
from pdplane.ids import Endpoint, Room
from tests.http_client import TIMEOUT_S, ask, stream
from tests.serving.bodies import generate
from tests.serving.fake_node import FakeNode, fails, first


def test_answers_with_its_first_token(node: FakeNode, prefill: Endpoint) -> None:
    node.script = first("q")
    answer = ask(prefill, "POST", "/generate", generate("hi", max_tokens=20, return_logprob=True, rid="r"))
    assert answer.status == 200
    assert answer.json["text"] == "q"
    assert answer.json["output_ids"] == [ord("q")]
    meta = answer.json["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 1}
    assert meta["output_token_logprobs"] == [[-0.5, ord("q"), None]]
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("r", 2, 1)
    assert node.next_leg().request == PrefillRequest(Room(7), tuple(b"hi"))


def test_needs_no_address_of_itself(node: FakeNode, prefill: Endpoint) -> None:
    node.script = first("q")
    assert ask(prefill, "POST", "/generate", generate(bootstrap_host=None, bootstrap_port=None)).status == 200


def test_a_stream_has_its_headers_before_the_room_is_done(node: FakeNode, prefill: Endpoint) -> None:
    with closing(HTTPConnection(prefill.host, prefill.port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/generate", json.dumps(generate(stream=True)))
        response = connection.getresponse()
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream"
        node.next_leg().done.set_result(FirstToken(ord("q"), -0.5))
        lines = [line for line in response.read().decode().split("\n") if line]
    assert json.loads(lines[0].removeprefix("data: "))["text"] == "q"
    assert lines[1:] == ["data: [DONE]"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_live_room_is_named_by_its_code(node: FakeNode, prefill: Endpoint, streamed: bool) -> None:
    node.script = fails(LocalProtocolError("room 7 is live", Cause.LIVE))
    answer = ask(prefill, "POST", "/generate", generate(stream=streamed))
    assert answer.status == 503
    error = {"message": "room 7 is live", "type": "unavailable", "param": None, "code": "room_is_live"}
    assert answer.json["error"] == error


def test_a_late_failure_is_the_only_event(node: FakeNode, prefill: Endpoint) -> None:
    with closing(HTTPConnection(prefill.host, prefill.port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/generate", json.dumps(generate(stream=True)))
        response = connection.getresponse()
        node.next_leg().done.set_exception(RoomFailed(7, Cause.CANCELLED, "cancelled by decode: bad stop"))
        lines = [line for line in response.read().decode().split("\n") if line]
    assert len(lines) == 1
    assert "bad stop" in json.loads(lines[0].removeprefix("data: "))["error"]["message"]


def test_a_room_that_no_decode_joins_is_503(node: FakeNode, prefill: Endpoint) -> None:
    node.script = fails(RoomFailed(7, Cause.UNMATCHED, "no decode rank offered blocks in 1 s"))
    assert ask(prefill, "POST", "/generate", generate()).status == 503


def test_a_client_that_leaves_cancels_its_leg(node: FakeNode, prefill: Endpoint) -> None:
    with closing(HTTPConnection(prefill.host, prefill.port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/generate", json.dumps(generate()))
        leg = node.next_leg()
    assert "closed the connection" in leg.cancelled()


def test_a_client_that_leaves_a_stream_cancels_its_leg(node: FakeNode, prefill: Endpoint) -> None:
    with closing(HTTPConnection(prefill.host, prefill.port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/generate", json.dumps(generate(stream=True)))
        response = connection.getresponse()
        response.close()
    assert "closed the connection" in node.next_leg().cancelled()


def test_a_node_that_drains_tells_the_other_half_of_what_it_refuses(node: FakeNode, prefill: Endpoint) -> None:
    node.ready = False
    assert ask(prefill, "POST", "/generate", generate()).status == 503
    assert node.legs.empty()
    ((request, why),) = node.refused
    assert (request.room, why.cause) == (7, Cause.CLOSING)


def test_streams_of_many_rooms(node: FakeNode, prefill: Endpoint) -> None:
    node.script = first("z")
    for room in range(20):
        lines = list(stream(prefill, "/generate", generate(bootstrap_room=room, stream=True)))
        assert lines[-1] == "[DONE]"
