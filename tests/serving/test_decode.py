"""Decode's /generate: whole and streamed answers, stops, logprobs, failures with their status, clients that leave."""

from __future__ import annotations

import json
import socket
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest

from pdplane.api import DecodeRequest, Finished, Token
from pdplane.control.http_thread import HttpThread
from pdplane.errors import (
    Cause,
    ConfigError,
    InternalError,
    LocalProtocolError,
    PoolExhausted,
    RoomFailed,
    SessionLost,
    TransferError,
)
from pdplane.ids import Endpoint, Room
from pdplane.serving.errors import STATUSES
from pdplane.serving.routes import decode_app
from tests.http_client import ask, stream
from tests.rows import rows
from tests.serving.bodies import chat, completion, generate
from tests.serving.fake_node import FakeNode, Leg, answers, fails


def test_answers_in_the_shape_of_sglang(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("abc", transfer_ms=1.5)
    body = generate("hi", max_tokens=3, return_logprob=True, rid="chat/1:#\u20ac")
    answer = ask(decode, "POST", "/generate", body)
    assert answer.status == 200
    assert answer.json["text"] == "abc"
    assert answer.json["output_ids"] == [97, 98, 99]
    meta = answer.json["meta_info"]
    assert meta["id"] == "chat/1:#\u20ac"
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 3, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert meta["output_token_logprobs"] == [[-0.5, 97, None], [-1.5, 98, None], [-2.5, 99, None]]
    assert meta["pdplane"]["transfer_ms"] == 1.5
    assert meta["e2e_latency"] >= 0


def test_the_node_is_asked_what_the_client_asked(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("a")
    sampling = {"max_new_tokens": 9, "temperature": 0, "ignore_eos": True, "stop_token_ids": [5, 6]}
    body = generate(None, input_ids=[1, 2, 3], sampling_params=sampling, bootstrap_host="[::1]", bootstrap_port=None)
    assert ask(decode, "POST", "/generate", body).status == 200
    asked = node.next_leg().request
    assert asked == DecodeRequest(Room(7), (1, 2, 3), Endpoint("::1", 8998), 9, True, frozenset({5, 6}))


def test_a_conversation_goes_through_the_template(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("a")
    body = generate(None, messages=[{"role": "user", "content": "hi"}])
    assert ask(decode, "POST", "/generate", body).status == 200
    assert bytes(node.next_leg().request.tokens) == b"user: hi\nassistant: "


def test_streams_growing_text_and_ends_with_done(node: FakeNode, decode: Endpoint) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    lines = stream(decode, "/generate", generate(stream=True, return_logprob=True))
    events = [json.loads(next(lines))]
    leg = node.next_leg()
    for token in b"bc":
        leg.on_token(Token(token, -2.0))
        events.append(json.loads(next(lines)))
    leg.done.set_result(Finished("length", 5, 3))
    events.append(json.loads(next(lines)))
    assert [event["text"] for event in events] == ["a", "ab", "abc", "abc"]
    assert [event["meta_info"]["finish_reason"] for event in events] == [None] * 3 + [{"type": "length", "length": 3}]
    for event in events:
        assert [row[1] for row in event["meta_info"]["output_token_logprobs"]] == event["output_ids"]
    assert list(lines) == ["[DONE]"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_max_tokens_is_the_number_of_tokens(node: FakeNode, decode: Endpoint, count: int, streamed: bool) -> None:
    node.script = answers("x" * count)
    last = last_body(decode, generate(max_tokens=count, stream=streamed, return_logprob=True))
    assert node.next_leg().request.max_tokens == count
    assert last["meta_info"]["completion_tokens"] == len(last["meta_info"]["output_token_logprobs"]) == count
    assert last["meta_info"]["finish_reason"]["type"] == "length"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("made", "sampling", "text", "finish"),
    [
        ("\0", {}, "", {"type": "stop", "matched": 0}),
        ("ab\0", {}, "ab", {"type": "stop", "matched": 0}),
        ("abc", {"stop_token_ids": [99]}, "ab", {"type": "stop", "matched": 99}),
        ("c", {"stop_token_ids": [99]}, "", {"type": "stop", "matched": 99}),
    ],
)
def test_stop_tokens_add_no_text(
    node: FakeNode, decode: Endpoint, made: str, sampling: dict[str, Any], text: str, finish: object, streamed: bool
) -> None:
    node.script = answers(made, "stop")
    last = last_body(decode, generate(sampling_params=sampling, stream=streamed))
    assert (last["text"], last["meta_info"]["finish_reason"]) == (text, finish)
    assert last["meta_info"]["completion_tokens"] == len(made)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "matched", "count"),
    [("a", "", "a", 1), ("cd", "ab", "cd", 4), (["zz", "e", "de"], "abc", "de", 5), ("xyz", "abcdef", None, 6)],
)
def test_stop_strings_end_the_leg(
    node: FakeNode, decode: Endpoint, stop: object, text: str, matched: str | None, count: int, streamed: bool
) -> None:
    node.script = answers("abcdef")
    last = last_body(decode, generate(sampling_params={"stop": stop}, stream=streamed))
    assert last["text"] == text
    assert last["meta_info"]["completion_tokens"] == count
    if matched is not None:
        assert last["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert node.next_leg().cancelled() == "a stop string was found"


def test_no_event_shows_the_beginning_of_a_stop_string(node: FakeNode, decode: Endpoint) -> None:
    node.script = lambda leg: leg.on_token(Token(ord("a"), -1.0))
    lines = stream(decode, "/generate", generate(stream=True, sampling_params={"stop": "bcd"}))
    texts = [json.loads(next(lines))["text"]]
    leg = node.next_leg()
    for token in b"bcxbcd":
        leg.on_token(Token(token, -1.0))
        texts.append(json.loads(next(lines))["text"])
    assert texts == ["a", "a", "a", "abcx", "abcx", "abcx", "abcx"]
    assert list(lines) == ["[DONE]"]


def test_half_characters_wait_for_their_end(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("\u20ac!")
    assert last_body(decode, generate())["text"] == "\u20ac!"


def test_a_logprob_that_json_cannot_say_is_null(node: FakeNode, decode: Endpoint) -> None:
    def script(leg: Leg) -> None:
        leg.on_token(Token(97, float("-inf")))
        leg.done.set_result(Finished("length", 1, 1))

    node.script = script
    answer = ask(decode, "POST", "/generate", generate(return_logprob=True))
    assert answer.json["meta_info"]["output_token_logprobs"] == [[None, 97, None]]


FAILURES = [
    (ConfigError("the prompt needs 9 blocks, the pool has 8"), 400, "bad_request"),
    (LocalProtocolError("room 7 is live", Cause.LIVE), 503, "room_is_live"),
    (LocalProtocolError("decode is shutting down", Cause.CLOSING), 503, "closing"),
    (LocalProtocolError("it is live for 3 s"), 500, "internal"),
    (PoolExhausted(9, 3), 503, "full"),
    (SessionLost("h:1", "it fell silent"), 502, "peer_lost"),
    (TransferError("h:1", 1, 2, "cut"), 502, "transfer"),
    (InternalError("this cannot happen"), 500, "internal"),
    (ZeroDivisionError("bug"), 500, "internal"),
    (CancelledError(), 503, "closing"),
    *((RoomFailed(7, cause, "why"), status, cause.value) for cause, status in STATUSES.items()),
    # What the other side says of itself decides nothing.
    (
        RoomFailed(7, Cause.PEER_FAILED, "prefill: prefill failed: the adapter did not finish within 3 s"),
        502,
        "peer_failed",
    ),
    (RoomFailed(7, Cause.PEER_FAILED, "prefill: prefill failed: the adapter wanted 3 blocks"), 502, "peer_failed"),
    (RoomFailed(7, Cause.TIMED_OUT, "the disk fell silent for 6 s: room 8 is live"), 503, "timed_out"),
    (RoomFailed(7, Cause.PEER_LOST, "prefill fell silent for 6 s"), 502, "peer_lost"),
]
KEPT_BY_GATEWAYS = {200, 400, 404, 502, 503}


def test_every_cause_has_a_status_that_gateways_hand_on() -> None:
    assert STATUSES.keys() == set(Cause)
    assert {status for cause, status in STATUSES.items() if cause is not Cause.INTERNAL} <= KEPT_BY_GATEWAYS


@pytest.mark.parametrize("streamed", [False, True])
@rows(("error", "status", "code"), FAILURES)
def test_a_failure_before_the_first_byte_has_its_status(
    node: FakeNode, decode: Endpoint, error: BaseException, status: int, code: str, streamed: bool
) -> None:
    node.script = fails(error)
    answer = ask(decode, "POST", "/generate", generate(stream=streamed))
    assert answer.status == status
    assert answer.json["error"]["message"] == (str(error) or "CancelledError")
    assert answer.json["error"]["code"] == code
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert ("Retry-After" in answer.headers) == (status == 503)


def test_a_failure_after_the_first_byte_is_the_last_event(node: FakeNode, decode: Endpoint) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    lines = stream(decode, "/generate", generate(stream=True))
    assert json.loads(next(lines))["text"] == "a"
    node.next_leg().done.set_exception(RoomFailed(7, Cause.PEER_LOST, "prefill is gone: it fell silent"))
    rest = [json.loads(line) for line in lines]
    assert len(rest) == 1
    assert rest[0]["error"]["code"] == "peer_lost"
    assert "fell silent" in rest[0]["error"]["message"]


def test_a_failure_after_tokens_is_no_answer(node: FakeNode, decode: Endpoint) -> None:
    def script(leg: Leg) -> None:
        leg.on_token(Token(97, -1.0))
        leg.done.set_exception(RoomFailed(7, Cause.PEER_FAILED, "prefill: gone"))

    node.script = script
    assert ask(decode, "POST", "/generate", generate()).status == 502


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_cancels_its_leg(node: FakeNode, decode: Endpoint, streamed: bool) -> None:
    with socket.create_connection((decode.host, decode.port)) as client:
        payload = json.dumps(generate(stream=streamed)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        client.sendall(head.encode() + payload)
        leg = node.next_leg()
    assert "closed the connection" in leg.cancelled()


def test_a_client_that_leaves_in_mid_stream_cancels_its_leg(node: FakeNode, decode: Endpoint) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    lines = stream(decode, "/generate", generate(stream=True))
    next(lines)
    lines.close()
    assert "closed the connection" in node.next_leg().cancelled()


def test_closing_the_server_cancels_every_leg(http: HttpThread, node: FakeNode, decode: Endpoint) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    lines = stream(decode, "/generate", generate(stream=True))
    next(lines)
    http.close()
    assert "closed the connection" in node.next_leg().cancelled()
    lines.close()


def test_a_node_that_drains_tells_the_other_half_of_what_it_refuses(node: FakeNode, decode: Endpoint) -> None:
    node.ready = False
    answer = ask(decode, "POST", "/generate", generate())
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert node.legs.empty()
    ((request, why),) = node.refused
    assert (request.room, request.tokens, why.cause) == (7, tuple(b"hello"), Cause.CLOSING)


def test_a_node_that_has_not_started_reads_nothing(node: FakeNode, decode: Endpoint) -> None:
    node.ready = node.alive = False
    assert ask(decode, "POST", "/generate", generate()).status == 503
    assert not node.refused


def test_decode_needs_to_know_its_prefill(decode: Endpoint) -> None:
    answer = ask(decode, "POST", "/generate", generate(bootstrap_host=None))
    assert answer.status == 400
    assert "bootstrap_host" in answer.json["error"]["message"]


def test_many_at_once_do_not_mix(node: FakeNode, decode: Endpoint) -> None:
    node.script = lambda leg: answers(chr(leg.request.tokens[0]) * 5)(leg)
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda letter: last_body(decode, generate(letter, rid="same"))["text"], "abcdefgh" * 4))
    assert texts == [letter * 5 for letter in "abcdefgh" * 4]


def last_body(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the last event before [DONE] of a stream."""
    answer = ask(endpoint, "POST", "/generate", body)
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        return dict(answer.json)
    assert answer.events[-1] == "[DONE]"
    return dict(answer.events[-2])


@pytest.mark.parametrize(("prompt", "asked", "given"), [(10, None, 90), (99, None, 1), (10, 90, 90), (100, None, None)])
def test_an_open_max_tokens_fits_the_context(
    node: FakeNode, decode: Endpoint, prompt: int, asked: int | None, given: int | None
) -> None:
    node.script = answers("x")
    answer = ask(decode, "POST", "/generate", generate(None, input_ids=[1] * prompt, max_tokens=asked))
    if given is None:
        assert answer.status == 400
    else:
        assert node.next_leg().request.max_tokens == given


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_only_an_allowed_prefill_may_be_named(http: HttpThread, node: FakeNode, path: str) -> None:
    app = decode_app(node, allows=lambda prefill: prefill == Endpoint("127.0.0.1", 9000))
    decode, bodies = http.serve(app, "127.0.0.1", 0), {"/generate": generate, "/v1/completions": completion}
    make = bodies.get(path, chat)
    node.script = answers("ab")
    assert ask(decode, "POST", path, make()).status == 200
    for change in ({"bootstrap_port": 9001}, {"bootstrap_host": "localhost"}, {"bootstrap_port": None}):
        answer = ask(decode, "POST", path, make(**change))
        assert (answer.status, answer.json["error"]["param"]) == (400, "bootstrap_host")
    assert node.legs.qsize() == 1
