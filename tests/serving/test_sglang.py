"""What /generate accepts and refuses, field by field; any bytes give a request or a ConfigError in every dialect."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.api import GREEDY, Sampling
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint, Room
from pdplane.serving.asked import Asked, AskedAnswer, Meeting
from pdplane.serving.fields import BadField
from pdplane.serving.routes import DIALECTS
from pdplane.serving.sglang import Sglang
from tests.http_client import ask
from tests.rows import rows
from tests.serving import bodies
from tests.serving.bodies import TOY, generate
from tests.serving.fake_node import FakeNode

BAD = [
    ({"text": None}, "give one"),
    ({"input_ids": [1]}, "give one"),
    ({"text": ""}, "empty"),
    ({"text": ["a", "b"]}, "text"),
    ({"text": None, "input_ids": []}, "empty"),
    ({"text": None, "input_ids": [[1], [2]]}, "input_ids"),
    ({"text": None, "input_ids": [1, True]}, "input_ids"),
    ({"text": None, "input_ids": [1.0]}, "input_ids"),
    ({"text": None, "input_ids": [-1]}, "input_ids"),
    ({"text": None, "input_ids": [256]}, "256"),
    ({"text": None, "input_ids": [1] * 98, "max_tokens": 3}, "context"),
    ({"text": None, "messages": []}, "messages"),
    ({"text": None, "messages": [{"role": "user"}]}, "messages[0].content"),
    ({"text": "\ud800"}, "surrogate"),
    ({"bootstrap_room": None}, "bootstrap_room"),
    ({"bootstrap_room": -1}, "bootstrap_room"),
    ({"bootstrap_room": 2**63}, "bootstrap_room"),
    ({"bootstrap_room": True}, "bootstrap_room"),
    ({"bootstrap_room": 7.0}, "bootstrap_room"),
    ({"bootstrap_room": "7"}, "bootstrap_room"),
    ({"bootstrap_room": [7, 8]}, "bootstrap_room"),
    ({"bootstrap_host": "a b"}, "bootstrap_host"),
    ({"bootstrap_host": ["h", "i"]}, "bootstrap_host"),
    ({"bootstrap_host": "h/x?"}, "bootstrap_host"),
    ({"bootstrap_port": 0}, "bootstrap_port"),
    ({"bootstrap_port": 70000}, "bootstrap_port"),
    ({"bootstrap_port": True}, "bootstrap_port"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2.0}, "max_tokens"),
    ({"max_tokens": [1]}, "max_tokens"),
    ({"max_tokens": 2, "sampling_params": {"max_new_tokens": 3}}, "differ"),
    ({"sampling_params": [{}, {}]}, "sampling_params"),
    ({"sampling_params": {"temperature": -0.7}}, "temperature"),
    ({"sampling_params": {"temperature": False}}, "temperature"),
    ({"sampling_params": {"n": 0}}, "n 0"),
    ({"n": 3}, "n is not"),
    ({"temperature": 1}, "temperature"),
    ({"max_new_tokens": 1}, "max_new_tokens"),
    ({"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num"),
    ({"colour": 1}, "colour"),
    ({"sampling_params": {"min_new_tokens": 4}}, "min_new_tokens"),
    ({"sampling_params": {"top_p": 0}}, "top_p"),
    ({"sampling_params": {"regex": "a*"}}, "regex"),
    ({"sampling_params": {"frequency_penalty": "0.5"}}, "frequency_penalty"),
    ({"sampling_params": {"stop": [""]}}, "stop"),
    ({"sampling_params": {"stop": ["a"] * 17}}, "stop"),
    ({"sampling_params": {"stop_token_ids": ["a"]}}, "stop_token_ids"),
    ({"sampling_params": {"ignore_eos": 1}}, "ignore_eos"),
    ({"stream": "yes"}, "stream"),
    ({"return_logprob": 1}, "return_logprob"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"top_logprobs_num": 5}, "top_logprobs_num"),
    ({"logprob_start_len": 0}, "logprob_start_len"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"echo": True}, "echo"),
    ({"image_data": "x"}, "image_data"),
    ({"rid": 7}, "rid"),
    ({"rid": "x" * 5000}, "rid"),
]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@rows(("changes", "words"), BAD)
def test_a_bad_request_is_400_and_names_the_field(
    request: pytest.FixtureRequest, node: FakeNode, role: str, changes: dict[str, Any], words: str
) -> None:
    answer = ask(request.getfixturevalue(role), "POST", "/generate", {"max_tokens": 4} | generate(**changes))
    assert answer.status == 400, answer.body
    assert words in answer.json["error"]["message"]
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert node.legs.empty()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a":' + b"9" * 5000 + b"}"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadField, match="the body is not"):
        Sglang().read(body, TOY)


def test_a_full_request_of_sglang() -> None:
    sampling = {
        "max_new_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "n": 1, "stop": ["a", "b"],
        "stop_token_ids": [3], "ignore_eos": False, "skip_special_tokens": True, "min_new_tokens": 0,
        "frequency_penalty": 0.5, "presence_penalty": 1, "repetition_penalty": 1.1, "json_schema": None,
        "spaces_between_special_tokens": True, "no_stop_trim": False, "regex": None, "sampling_seed": 4,
    }  # fmt: skip
    body = generate("x", rid="r", sampling_params=sampling, stream=True, return_logprob=True, log_metrics=True)
    body |= {"logprob_start_len": -1, "top_logprobs_num": 2, "return_text_in_logprobs": False, "return_bytes": False}
    how = Sampling(
        temperature=0.5, top_p=0.9, min_p=0.1, frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=1.1,
        seed=4, top_logprobs=2,
    )  # fmt: skip
    assert Sglang().read(json.dumps(body).encode(), TOY) == Asked(
        request_id="r",
        answers=(
            AskedAnswer(
                prompt=(120,), meeting=Meeting(Room(7), Endpoint("127.0.0.1", 9000)), max_tokens=5, sampling=how
            ),
        ),
        n=1,
        stop=("a", "b"),
        stop_ids=frozenset({3}),
        ignore_eos=False,
        stream=True,
        logprobs=True,
    )


def test_defaults() -> None:
    asked = Sglang().read(json.dumps({"text": "x", "bootstrap_room": 0}).encode(), TOY)
    (answer,) = asked.answers
    assert (answer.max_tokens, asked.stream, asked.logprobs, answer.meeting.prefill) == (99, False, False, None)
    assert answer.sampling == GREEDY
    assert asked.request_id


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = [
    "text", "input_ids", "messages", "sampling_params", "stream", "return_logprob", "rid", "bootstrap_host", "prompt",
    "bootstrap_port", "bootstrap_room", "max_tokens", "n", "echo", "logprobs", "tools", "chat_template_kwargs", "stop",
    "logit_bias", "top_logprobs", "stream_options", "response_format", "role_mapping", "temperature", "seed",
]  # fmt: skip
_SAMPLING = ["max_new_tokens", "temperature", "stop", "stop_token_ids", "ignore_eos", "n", "top_p", "top_k", "other"]


@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON), st.dictionaries(st.sampled_from(_SAMPLING), _JSON))
def test_any_fields_give_a_request_or_a_config_error(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    for body in (fields, generate(sampling_params=sampling), generate() | fields, bodies.chat() | fields):
        for dialect in DIALECTS:
            with contextlib.suppress(ConfigError):
                dialect.read(json.dumps(body).encode(), TOY)
