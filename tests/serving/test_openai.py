"""What the two OpenAI dialects read and refuse, field by field, and what they write."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from pdplane.api import Finished, FirstToken, Sampling, Token
from pdplane.errors import Cause, RoomFailed
from pdplane.ids import Endpoint
from pdplane.serving.answer import Dialect
from pdplane.serving.errors import status_of
from pdplane.serving.fields import BadField
from pdplane.serving.openai import OpenaiCompletions
from pdplane.serving.openai_chat import OpenaiChat
from tests.http_client import ask, stream
from tests.rows import rows
from tests.serving.bodies import TOY, chat, completion
from tests.serving.fake_node import FakeNode, Leg, answers

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_USER = {"role": "user", "content": "hi"}
_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_ROOMY = attrs.evolve(TOY, context_length=4096)
_DEEP: Any = {}
for _depth in range(200):
    _DEEP = {"a": _DEEP}

# Fields of both dialects: the value, the status, and the field that an error names.
BOTH: list[tuple[dict[str, Any], int, str]] = [
    *(({name: "anything"}, 200, "") for name in ("model", "user", "metadata", "store", "service_tier", "priority")),
    ({"safety_identifier": "x", "prompt_cache_key": "y", "prediction": {"type": "content"}}, 200, ""),
    ({"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False, "ignore_eos": False}, 200, ""),
    ({"continue_final_message": False, "separate_reasoning": True, "stream_reasoning": True}, 200, ""),
    ({"temperature": 0.699999988079071, "top_p": 0.9, "top_k": 3, "min_p": 0.1}, 200, ""),
    ({"xtc_probability": 0.5, "xtc_threshold": 0.2, "seed": 0}, 200, ""),
    (
        {"repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2, "repetition_context_size": 5},
        200,
        "",
    ),
    ({"logit_bias": {"5": -100, "255": 1.5}}, 200, ""),
    ({"stop": None, "seed": None, "tools": None, "logprobs": None, "nothing": None}, 200, ""),
    ({"stop": ["a", "b", "c", "d", "e"], "stop_token_ids": [3]}, 200, ""),
    ({"max_tokens": 1}, 200, ""),
    ({"max_completion_tokens": 1}, 200, ""),
    ({"max_tokens": 3, "max_completion_tokens": 3}, 200, ""),
    ({"n": 2, "best_of": 2}, 200, ""),
    ({"response_format": {"type": "text"}}, 200, ""),
    ({"min_tokens": 0, "echo": False, "suffix": ""}, 200, ""),
    ({"colour": 1}, 400, "colour"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "0"}, 400, "temperature"),
    ({"temperature": True}, 400, "temperature"),
    ({"top_p": 1.1}, 400, "top_p"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": 1.5}, 400, "top_k"),
    ({"min_p": 2}, 400, "min_p"),
    ({"xtc_threshold": 0.9}, 400, "xtc_threshold"),
    ({"seed": -1}, 400, "seed"),
    ({"seed": 2**64}, 400, "seed"),
    ({"presence_penalty": "1"}, 400, "presence_penalty"),
    ({"logit_bias": {"256": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, 400, "logit_bias.1"),
    ({"logit_bias": [1]}, 400, "logit_bias"),
    ({"stop": ""}, 400, "stop"),
    ({"stop": ["a"] * 17}, 400, "stop"),
    ({"stop": 1}, 400, "stop"),
    ({"stop": "x" * 4097}, 400, "stop"),
    ({"stop_token_ids": ["1"]}, 400, "stop_token_ids"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_tokens": 5000}, 400, "max_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens"),
    ({"n": 0}, 400, "n"),
    ({"n": 129}, 400, "n"),
    ({"n": 1, "best_of": 2}, 400, "best_of"),
    ({"stream": 1}, 400, "stream"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"stream": True, "stream_options": {"other": True}}, 400, "stream_options.other"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"echo": True}, 400, "echo"),
    ({"suffix": "x"}, 400, "suffix"),
    ({"min_tokens": 2}, 400, "min_tokens"),
    ({"adapters": "x"}, 400, "adapters"),
    ({"max_new_tokens": 2}, 400, "max_new_tokens"),
    ({"return_hidden_states": True}, 400, "return_hidden_states"),
    ({"guided_json": {}}, 400, "guided_json"),
    ({"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": "yes"}, 400, "logprobs"),
    ({"bootstrap_room": None}, 400, "bootstrap_room"),
    ({"bootstrap_room": "7"}, 400, "bootstrap_room"),
    ({"bootstrap_room": [1, 2]}, 400, "bootstrap_room"),
    ({"bootstrap_room": [1, 2], "n": 2, "bootstrap_port": [9000]}, 400, "bootstrap_port"),
    ({"bootstrap_room": []}, 400, "bootstrap_room"),
]
CHAT: list[tuple[dict[str, Any], int, str]] = [
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, 200, ""),
    ({"messages": [{"role": "developer", "content": "x"}, _USER]}, 200, ""),
    ({"messages": [_USER, {"role": "assistant", "tool_calls": [_CALL]}, {"role": "tool", "content": "1"}]}, 200, ""),
    ({"messages": [_USER, {"role": "assistant", "content": "x", "reasoning_content": "r", "refusal": None}]}, 200, ""),
    ({"tools": [_TOOL], "tool_choice": "auto", "parallel_tool_calls": True}, 200, ""),
    ({"tools": [_TOOL], "tool_choice": "none"}, 200, ""),
    ({"chat_template_kwargs": {"enable_thinking": False}}, 200, ""),
    ({"role_mapping": {"user": "U"}}, 200, ""),
    ({"logprobs": True, "top_logprobs": 20}, 200, ""),
    ({"messages": None}, 400, "messages"),
    ({"messages": []}, 400, "messages"),
    ({"messages": "hi"}, 400, "messages"),
    ({"messages": ["hi"]}, 400, "messages[0]"),
    ({"messages": [{"content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]}, 400,
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "audio": {}}]}, 400, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "function"}]}]}, 400,
     "messages[0].tool_calls[0].function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, 400,
     "messages[0].tool_calls[0].function.arguments"),
    ({"tools": [_TOOL], "tool_choice": "required"}, 400, "tool_choice"),
    ({"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "tool_choice"),
    ({"tools": [_TOOL], "parallel_tool_calls": False}, 400, "parallel_tool_calls"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, 400, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": _DEEP}}]}, 400, "tools"),
    ({"chat_template_kwargs": _DEEP}, 400, "chat_template_kwargs"),
    ({"role_mapping": {"user": 1}}, 400, "role_mapping"),
    ({"logprobs": 2}, 400, "logprobs"),
    ({"separate_reasoning": False}, 400, "separate_reasoning"),
    ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
    ({"prompt": "x"}, 400, "prompt"),
]  # fmt: skip
COMPLETIONS: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": [1, 2, 3]}, 200, ""),
    ({"prompt": ["a", "b"], "bootstrap_room": [1, 2]}, 200, ""),
    ({"prompt": [[1, 2], "b"]}, 200, ""),
    ({"logprobs": 0}, 200, ""),
    ({"logprobs": True, "top_logprobs": 3}, 200, ""),
    ({"prompt": None}, 400, "prompt"),
    ({"prompt": ""}, 400, "prompt[0]"),
    ({"prompt": []}, 400, "prompt"),
    ({"prompt": [[]]}, 400, "prompt"),
    ({"prompt": [256]}, 400, "prompt"),
    ({"prompt": [1, "a"]}, 400, "prompt[0]"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": ["a"] * 129}, 400, "prompt"),
    ({"prompt": ["a"] * 3, "bootstrap_room": [1, 2]}, 400, "bootstrap_room"),
    ({"logprobs": 21}, 400, "logprobs"),
    ({"messages": [_USER]}, 400, "messages"),
]


@rows(("changes", "status", "field"), BOTH + CHAT)
def test_each_field_of_a_chat_is_used_or_refused_by_name(changes: dict[str, Any], status: int, field: str) -> None:
    _check(OpenaiChat(), chat() | changes, status, field)


@rows(("changes", "status", "field"), BOTH + COMPLETIONS)
def test_each_field_of_a_completion_is_used_or_refused_by_name(
    changes: dict[str, Any], status: int, field: str
) -> None:
    _check(OpenaiCompletions(), completion() | changes, status, field)


def _check(dialect: Dialect, body: dict[str, Any], status: int, field: str) -> None:
    data = json.dumps(body).encode()
    if status == 200:
        assert dialect.read(data, _ROOMY).answers
        return
    with pytest.raises(BadField) as refused:
        dialect.read(data, _ROOMY)
    assert (status_of(refused.value), refused.value.field) == (status, field)
    assert field in str(refused.value)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", completion())])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_has_the_shape_of_openai_and_is_chunked(
    request: pytest.FixtureRequest, node: FakeNode, role: str, path: str, body: dict[str, Any], streamed: bool
) -> None:
    answer = ask(request.getfixturevalue(role), "POST", path, body | {"colour": 1, "stream": streamed})
    message = "colour is not supported"
    assert answer.status == 400
    assert answer.json == {
        "error": {"message": message, "type": "invalid_request_error", "param": "colour", "code": "bad_request"}
    }
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert node.legs.empty()


def _first(leg: Leg) -> None:
    leg.done.set_result(FirstToken(ord("x"), -0.5))


def test_what_is_asked_reaches_both_nodes(node: FakeNode, prefill: Endpoint, decode: Endpoint) -> None:
    body = chat(
        temperature=0.5, top_p=0.9, top_k=300, seed=5, logit_bias={"7": 2}, xtc_probability=0.1, logprobs=True,
        top_logprobs=2, stop_token_ids=[9], ignore_eos=True, max_completion_tokens=4,
    )  # fmt: skip
    how = Sampling(
        temperature=0.5, top_p=0.9, top_k=0, seed=5, logit_bias=((7, 2.0),), xtc_probability=0.1, top_logprobs=2
    )
    node.script = answers("x")
    assert ask(decode, "POST", "/v1/chat/completions", body).status == 200
    asked = node.next_leg().request
    assert (asked.sampling, asked.max_tokens, asked.stop_ids, asked.ignore_eos) == (how, 4, {9}, True)
    node.script = _first
    assert ask(prefill, "POST", "/v1/chat/completions", body).status == 200
    request = node.next_leg().request
    assert (request.sampling, request.tokens) == (how, asked.tokens)


def test_a_plain_client_is_told_what_is_missing(decode: Endpoint, prefill: Endpoint) -> None:
    for endpoint in (decode, prefill):
        answer = ask(endpoint, "POST", "/v1/chat/completions", {"messages": [_USER]})
        assert answer.status == 400
        assert "pdplane serve" in answer.json["error"]["message"]


def test_tools_and_thoughts_of_a_conversation_are_in_the_prompt() -> None:
    messages = [
        _USER,
        {"role": "assistant", "reasoning": "so", "tool_calls": [_CALL]},
        {
            "role": "tool",
            "tool_call_id": "1",
            "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}],
        },
    ]
    body = {"messages": messages, "tools": [_TOOL], "bootstrap_room": 1, "max_tokens": 1}
    text = bytes(OpenaiChat().read(json.dumps(body).encode(), _ROOMY).answers[0].prompt).decode()
    for words in ("tools: ", '"arguments": {"a": 1}', 'reasoning_content: "so"', "tool: ok", 'tool_call_id: "1"'):
        assert words in text


def test_a_completion(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("abc")
    answer = ask(decode, "POST", "/v1/completions", completion("hi", max_tokens=3, logprobs=1)).json
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "/models/toy", "cmpl-")
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "abc", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [-0.5, -1.5, -2.5],
        "top_logprobs": [{}, {}, {}],
        "text_offset": [0, 1, 2],
    }
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_with_the_likeliest_tokens(node: FakeNode, decode: Endpoint) -> None:
    def script(leg: Leg) -> None:
        leg.on_token(Token(0xC3, -0.5, ((0xC3, -0.5), (97, float("-inf")))))
        leg.on_token(Token(0xA9, float("nan")))
        leg.done.set_result(Finished("stop", 2, 2, cached_tokens=4))

    node.script = script
    answer = ask(decode, "POST", "/v1/chat/completions", chat(logprobs=True, top_logprobs=2)).json
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "é"}
    assert choice["finish_reason"] == "stop"
    first, second = choice["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["logprob"]) == ("\ufffd", [0xC3], -0.5)
    assert [(row["bytes"], row["logprob"]) for row in first["top_logprobs"]] == [([0xC3], -0.5), ([97], -9999.0)]
    assert (second["bytes"], second["logprob"]) == ([0xA9], None)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("usage", [False, True])
def test_a_streamed_chat_sends_what_is_new(node: FakeNode, decode: Endpoint, usage: bool) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    body = chat(stream=True, logprobs=True, stream_options={"include_usage": usage})
    lines = stream(decode, "/v1/chat/completions", body)
    events = [json.loads(next(lines))]
    leg = node.next_leg()
    leg.on_token(Token(98, -2.0))
    events.append(json.loads(next(lines)))
    leg.done.set_result(Finished("length", 5, 2))
    *rest, done = list(lines)
    events += [json.loads(line) for line in rest]
    assert done == "[DONE]"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    told = [choice for event in events for choice in event["choices"]]
    assert [choice["delta"] for choice in told] == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]
    assert [choice["finish_reason"] for choice in told] == [None, None, "length"]
    assert [row["token"] for choice in told for row in (choice["logprobs"] or {"content": []})["content"]] == ["a", "b"]
    if usage:
        assert [event["usage"] for event in events[:-1]] == [None] * 3
        assert (events[-1]["choices"], events[-1]["usage"]["total_tokens"]) == ([], 22)
    else:
        assert not any("usage" in event for event in events)


def test_a_streamed_completion_holds_back_what_may_stop_it(node: FakeNode, decode: Endpoint) -> None:
    node.script = answers("abXYcd")
    body = completion(stream=True, stop="XY", logprobs=0)
    events = ask(decode, "POST", "/v1/completions", body).events
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "ab"
    assert choices[-1]["finish_reason"] == "stop"
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == ["a", "b", "X", "Y"]
    assert node.next_leg().cancelled() == "a stop string was found"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_first_token_that_ends_the_text_ends_it(node: FakeNode, decode: Endpoint, streamed: bool) -> None:
    node.script = answers("\0", "stop")
    answer = ask(decode, "POST", "/v1/chat/completions", chat(stream=streamed))
    choices = [event["choices"][0] for event in answer.events[:-1]] if streamed else answer.json["choices"]
    assert choices[-1]["finish_reason"] == "stop"
    if streamed:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    else:
        assert choices[0]["message"]["content"] == ""


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "rooms"),
    [
        ("/v1/chat/completions", chat(n=2, bootstrap_room=[11, 12]), [11, 12]),
        ("/v1/completions", completion(["a", "b"], n=2, bootstrap_room=[11, 12]), [11, None, 12, None]),
        ("/v1/completions", completion("a", n=2, bootstrap_room=11), [11, None]),
        ("/v1/completions", completion(["a"], bootstrap_room=[11], bootstrap_host=["h"], bootstrap_port=[1]), [11]),
    ],
)
def test_many_answers_have_an_index_and_a_room_each(
    node: FakeNode, decode: Endpoint, path: str, body: dict[str, Any], rooms: list[int | None], streamed: bool
) -> None:
    node.script = lambda leg: answers(chr(leg.request.tokens[0]) + str(leg.request.room % 10))(leg)
    answer = ask(decode, "POST", path, body | {"stream": streamed})
    legs = [node.next_leg().request for _room in rooms]
    assert [leg.room if room else None for leg, room in zip(legs, rooms, strict=True)] == rooms
    assert len({leg.room for leg in legs}) == len(rooms)
    texts = [chr(leg.tokens[0]) + str(leg.room % 10) for leg in legs]
    if not streamed:
        choices = answer.json["choices"]
        assert [choice.get("text") or choice["message"]["content"] for choice in choices] == texts
        assert [choice["index"] for choice in choices] == list(range(len(rooms)))
        assert answer.json["usage"]["completion_tokens"] == 2 * len(rooms)
        return
    choices = [choice for event in answer.events[:-1] for choice in event["choices"]]
    for index, text in enumerate(texts):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in mine) == text
        assert mine[-1]["finish_reason"] == "length"


def test_seeds_of_many_answers_differ() -> None:
    asked = OpenaiCompletions().read(json.dumps(completion(["a", "b"], n=2, seed=0)).encode(), TOY)
    assert [answer.sampling.seed for answer in asked.answers] == [0, 1, 0, 1]


def test_one_failure_ends_all_answers(node: FakeNode, decode: Endpoint) -> None:
    legs: list[Leg] = []

    def script(leg: Leg) -> None:
        legs.append(leg)
        if len(legs) == 3:
            leg.done.set_exception(RoomFailed(7, Cause.PEER_LOST, "prefill is gone"))

    node.script = script
    answer = ask(decode, "POST", "/v1/completions", completion("a", n=3))
    assert answer.status == 502
    assert all("another answer" in leg.cancelled() for leg in legs[:2])


def test_models(decode: Endpoint) -> None:
    (model,) = ask(decode, "GET", "/v1/models").json["data"]
    assert ask(decode, "GET", f"/v1/models/{model['id'].lstrip('/')}").json == model
    answer = ask(decode, "GET", "/v1/models/other/one")
    assert (answer.status, answer.json["error"]["type"]) == (404, "not_found_error")
