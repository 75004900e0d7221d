"""Requests that are too long, or take long to read: refused at once by name, and nobody else waits for them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import attrs
import pytest

from pdplane.control.http_thread import HttpThread
from pdplane.ids import Endpoint
from pdplane.serving.asked import Served
from pdplane.serving.fields import BadField
from pdplane.serving.reading import SMALL_BODY
from pdplane.serving.routes import decode_app
from pdplane.toy.engine import ToyTokenizer
from tests.http_client import ask
from tests.serving.bodies import TOY, chat, completion, generate
from tests.serving.fake_node import FakeNode, first
from tests.waiting import PATIENCE_S

LONG = "x" * 101  # one more than the context of 100 tokens
LONGEST_BODY = TOY.longest_body
DEEP = b"[" * 100_000 + b"]" * 100_000


def _place(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()[:-1]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", generate(LONG), "text"),
        ("/generate", generate(None, messages=[{"role": "user", "content": LONG}]), "messages"),
        ("/v1/completions", completion(LONG), "prompt[0]"),
        ("/v1/completions", completion(["hi", LONG]), "prompt[1]"),
        ("/v1/chat/completions", chat(LONG), "messages"),
        ("/v1/chat/completions", chat(messages=[{"role": "user", "content": ""}] * 101), "messages"),
        ("/v1/chat/completions", chat(chat_template_kwargs={"x": LONG}), "messages"),
        ("/v1/chat/completions", _place(chat()) + b', "tools": ' + DEEP + b"}", "body"),
        ("/generate", _place(generate(None)) + b', "input_ids": ' + b"[" * 70 + b"]" * 70 + b"}", "input_ids"),
        ("/generate", b'{"n": [' + b"[]," * 200_000 + b"[]]}", "body"),
        ("/generate", b"{" + b'"":1,' * 200_000 + b'"y":1}', "body"),
        ("/generate", b" " * (LONGEST_BODY + 1), "body"),
        ("/v1/completions", b" " * (LONGEST_BODY + 1), "body"),
        ("/v1/chat/completions", b" " * (LONGEST_BODY + 1), "body"),
    ],
)
def test_what_cannot_fit_is_refused_by_name(
    node: FakeNode, decode: Endpoint, path: str, body: dict[str, Any] | bytes, field: str
) -> None:
    answer = ask(decode, "POST", path, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, field), answer.body
    assert node.legs.empty()


def test_a_declared_length_is_refused_before_the_body_comes(decode: Endpoint) -> None:
    with closing(http.client.HTTPConnection(decode.host, decode.port, timeout=PATIENCE_S)) as client:
        client.putrequest("POST", "/generate")
        client.putheader("Content-Length", str(1 << 40))
        client.endheaders()
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["param"]) == (400, "body")


def test_the_bounds_follow_the_context() -> None:
    roomy = attrs.evolve(TOY, context_length=1000)
    assert roomy.longest_text == 10 * TOY.longest_text
    assert roomy.longest_body > TOY.longest_body


@attrs.frozen
class Words(ToyTokenizer):
    """An `a` is a token, up to 1,000 other characters are one; what it is given is counted."""

    longest_token: int = 1000
    given: list[int] = attrs.Factory(list)

    def encode(self, text: str) -> list[int]:
        self.given.append(len(text))
        return [1] * (len(text) if text[:1] == "a" else 1 + len(text) // 1000)


@pytest.mark.parametrize(("letter", "fits"), [("a", False), ("b", True)])
def test_a_text_is_read_no_further_than_to_where_it_cannot_fit(letter: str, fits: bool) -> None:
    words = Words()
    served = Served(name="w", tokenizer=words, vocab_size=None, context_length=1000, bootstrap_port=1)
    text = letter * 900_000
    if fits:
        assert len(served.encode(text, "text")) <= 1000
        return
    with pytest.raises(BadField, match="does not fit"):
        served.encode(text, "text")
    assert sum(words.given) < 100_000


@attrs.frozen
class Slow(ToyTokenizer):
    """Texts that begin with `z` are tokenised when the test says so."""

    go: threading.Event = attrs.Factory(threading.Event)
    begun: threading.Semaphore = attrs.Factory(lambda: threading.Semaphore(0))

    def encode(self, text: str) -> list[int]:
        if text.startswith("z"):
            self.begun.release()
            self.go.wait(PATIENCE_S)
        return super().encode(text)


@pytest.fixture
def slow(node: FakeNode) -> Iterator[Slow]:
    node.tokenizer = tokenizer = Slow()
    node.extra = {"context_length": 4 * SMALL_BODY}
    node.script = first("a")
    yield tokenizer
    tokenizer.go.set()


def _send(at: Endpoint, text: str) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection(at.host, at.port, timeout=PATIENCE_S)
    client.request("POST", "/generate", json.dumps(generate(text, max_tokens=1)))
    return client


def test_long_texts_hold_up_nobody_else(slow: Slow, node: FakeNode, prefill: Endpoint) -> None:
    clients = [_send(prefill, "z" * 2 * SMALL_BODY) for _ in range(8)]
    for _ in range(2):
        assert slow.begun.acquire(timeout=PATIENCE_S)
    assert ask(prefill, "GET", "/health").status == 200
    assert ask(prefill, "GET", "/statistics").status == 200
    assert ask(prefill, "POST", "/generate", generate("hi", max_tokens=1)).status == 200
    assert not slow.begun.acquire(blocking=False), "two long ones at one time"
    for client in clients[:-1]:
        client.close()  # those that wait leave the line, and the two at work give their places back when they end
    slow.go.set()
    with closing(clients[-1]) as last:
        assert last.getresponse().status == 200


def test_closing_does_not_wait_for_a_long_text(slow: Slow, node: FakeNode) -> None:
    thread = HttpThread("pdplane-http-closing")
    thread.start()
    client = _send(thread.serve(decode_app(node), "127.0.0.1", 0), "z")
    assert slow.begun.acquire(timeout=PATIENCE_S)
    thread.close()  # raises when it is not over in time
    assert not slow.go.is_set()
    client.close()
