"""The real `openai` client: scripted answers with thoughts and calls, and two daemons with toy engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from pdplane.api import Finished, Token
from pdplane.control.http_thread import HttpThread
from pdplane.engine.text import MlxTokenizer
from pdplane.ids import Endpoint, new_room
from pdplane.serving.routes import decode_app, prefill_app
from pdplane.toy.model import ToyOptions, toy_answer
from tests.engine.talking import talking_tokenizer
from tests.http_client import ask
from tests.node.conftest import Daemons, idle
from tests.node.conftest import daemons as daemons  # a fixture
from tests.serving.fake_node import FakeNode, Leg
from tests.waiting import until

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
USER: Any = [{"role": "user", "content": "hi"}]
PLACE = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9000, "bootstrap_room": 7}
SPOKEN = 'so</think>well<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> MlxTokenizer:
    return talking_tokenizer(tmp_path_factory.mktemp("talking"))


def client_of(endpoint: Endpoint) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{endpoint}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(decode: Endpoint) -> Iterator[openai.OpenAI]:
    with client_of(decode) as made:
        yield made


@pytest.fixture
def talking(node: FakeNode, tokenizer: MlxTokenizer) -> FakeNode:
    """Answers everything with a thought, some words and a call."""

    def script(leg: Leg) -> None:
        tokens = tokenizer.encode(SPOKEN, special_tokens=False)
        for token in tokens:
            leg.on_token(Token(token, -0.5))
        leg.done.set_result(Finished("stop", len(leg.request.tokens), len(tokens)))

    node.extra = {"vocab_size": None, "context_length": None}
    node.tokenizer, node.script = tokenizer, script  # type: ignore[assignment]  # another tokenizer than the toy's
    return node


def test_thoughts_and_calls(talking: FakeNode, client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="toy", messages=USER, tools=TOOLS, extra_body=PLACE)
    (choice,) = made.choices
    assert (choice.message.content, choice.finish_reason) == ("well", "tool_calls")
    assert choice.message.reasoning_content == choice.message.reasoning == "so"  # type: ignore[attr-defined]
    (call,) = choice.message.tool_calls or []
    assert (call.type, call.function.name, call.function.arguments) == ("function", "f", '{"a": 1}')
    again: Any = [*USER, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "1"}]
    assert client.chat.completions.create(model="toy", messages=again, tools=TOOLS, extra_body=PLACE).choices
    first, second = talking.next_leg().request.tokens, talking.next_leg().request.tokens
    assert len(second) > len(first)


def test_streamed_thoughts_and_calls(talking: FakeNode, client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    content, thought, calls, reasons, usage = "", "", [], [], None
    with client.chat.completions.create(
        model="toy", messages=USER, tools=TOOLS, stream=True, stream_options=options, extra_body=PLACE
    ) as events:
        for event in events:
            usage = event.usage or usage
            for choice in event.choices:
                content += choice.delta.content or ""
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                calls += choice.delta.tool_calls or []
                reasons.append(choice.finish_reason)
    assert (content, thought, reasons[-1]) == ("well", "so", "tool_calls")
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "f", '{"a": 1}')]
    assert usage is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_errors_are_the_clients_own(node: FakeNode, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="toy", messages=USER, tool_choice="required", extra_body=PLACE)
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="pdplane serve"):
        client.completions.create(model="toy", prompt="hi")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    node.ready = False
    with pytest.raises(openai.InternalServerError, match="not ready"):
        client.completions.create(model="toy", prompt="hi", extra_body=PLACE, stream=True)


def test_a_failure_in_a_stream_is_raised(node: FakeNode, client: openai.OpenAI) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    with client.completions.create(model="toy", prompt="hi", stream=True, extra_body=PLACE) as events:
        assert next(iter(events)).choices[0].text == "a"
        node.next_leg().done.set_exception(ZeroDivisionError("gone"))
        with pytest.raises(openai.APIError, match="gone"):
            list(events)


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id.lstrip("/")) == model


@pytest.fixture
def pair(daemons: Daemons, http: HttpThread) -> Iterator[Pair]:
    with ThreadPoolExecutor(8) as senders:
        prefill, decode = daemons.pair()
        yield Pair(
            http.serve(prefill_app(prefill.node), "127.0.0.1", 0),
            http.serve(decode_app(decode.node), "127.0.0.1", 0),
            prefill.port,
            senders,
        )
        until(lambda: idle(prefill, decode), "every count's start value")


class Pair:
    """Two daemons; `both` sends prefill its half, and gives what decode's needs beside the client's own fields."""

    def __init__(self, prefill: Endpoint, decode: Endpoint, port: int, senders: ThreadPoolExecutor) -> None:
        self.decode, self._prefill, self._port, self._senders = decode, prefill, port, senders

    def both(self, path: str, body: dict[str, Any], rooms: int | None = None) -> dict[str, Any]:
        numbers: Any = new_room() if rooms is None else [new_room() for _room in range(rooms)]
        place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": self._port, "bootstrap_room": numbers}
        self._senders.submit(ask, self._prefill, "POST", path, body | place)
        return {**body, "extra_body": place}


def letters(prompt: str, count: int) -> str:
    """What one process with the toy's model answers."""
    return bytes(token for token, _logprob in toy_answer(ToyOptions(), tuple(prompt.encode()), count)).decode()


def test_a_pair_answers_a_plain_client(pair: Pair) -> None:
    body: dict[str, Any] = {"model": "toy", "messages": USER, "max_tokens": 6, "logprobs": True}
    text = letters("user: hi\nassistant: ", 6)
    with client_of(pair.decode) as client:
        made = client.chat.completions.create(**pair.both("/v1/chat/completions", body))
        assert (made.choices[0].message.content, made.choices[0].finish_reason) == (text, "length")
        assert made.choices[0].logprobs is not None
        assert "".join(row.token for row in made.choices[0].logprobs.content or []) == text
        body["stream"] = True
        with client.chat.completions.create(**pair.both("/v1/chat/completions", body)) as events:
            assert "".join(event.choices[0].delta.content or "" for event in events) == text
        body = {"model": "toy", "prompt": ["one", "two"], "max_tokens": 4, "n": 2}
        for rooms in (None, 2, 4):
            made = client.completions.create(**pair.both("/v1/completions", body, rooms))
            assert [choice.text for choice in made.choices] == [letters("one", 4)] * 2 + [letters("two", 4)] * 2
        body = {"model": "toy", "prompt": "one", "max_tokens": 1}
        assert client.completions.create(**pair.both("/v1/completions", body)).choices[0].text == letters("one", 1)


def test_many_async_clients(pair: Pair) -> None:
    async def ask_one(client: openai.AsyncOpenAI, prompt: str) -> str:
        body: dict[str, Any] = {"model": "toy", "prompt": prompt, "max_tokens": 5, "stream": True}
        events = await client.completions.create(**pair.both("/v1/completions", body))
        return "".join([event.choices[0].text async for event in events])

    async def ask_all(prompts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"http://{pair.decode}/v1", api_key="none", max_retries=0) as client:
            return list(await asyncio.gather(*(ask_one(client, prompt) for prompt in prompts)))

    prompts = [f"prompt {number}" for number in range(8)]
    assert asyncio.run(ask_all(prompts)) == [letters(prompt, 5) for prompt in prompts]
