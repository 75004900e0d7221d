"""The `openai` client through real gateways: answers, refusals, and daemons that leave and come back."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import openai
import pytest

from pdplane.toy.model import ToyOptions, toy_answer
from tests.gateways.fleet import CALM, DEADLINE_S, GATEWAYS, Fleet
from tests.http_client import ask
from tests.waiting import PATIENCE_S, until

USER: Any = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"model": "toy", "messages": USER, "max_tokens": 6}
TEXT: dict[str, Any] = {"model": "toy", "max_tokens": 6}


def _missing(name: str) -> pytest.MarkDecorator:
    package = GATEWAYS[name][0].partition(".")[0]
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{name} is not installed: the extra gateways")


NAMES = [pytest.param(name, marks=_missing(name)) for name in GATEWAYS]
gateways = pytest.mark.parametrize("name", NAMES)
shared = pytest.mark.parametrize("fleet", NAMES, indirect=True, scope="module")


def letters(prompt: str, count: int = 6) -> str:
    """What one process with the toy's model answers."""
    return bytes(token for token, _logprob in toy_answer(ToyOptions(), tuple(prompt.encode()), count)).decode()


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with Fleet(request.param, *CALM) as running:
        yield running


@shared
def test_answers(fleet: Fleet) -> None:
    said, one, two = letters("user: hi\nassistant: "), letters("one"), letters("two")
    with fleet.client() as client:
        make, complete = client.chat.completions.create, client.completions.create
        assert make(**CHAT).choices[0].message.content == said
        assert [choice.message.content for choice in make(**CHAT, n=2).choices] == [said] * 2
        assert [choice.text for choice in complete(**TEXT, prompt="one").choices] == [one]
        assert [choice.text for choice in complete(**TEXT, prompt="one", n=2).choices] == [one] * 2
        assert [choice.text for choice in complete(**TEXT, prompt=["one"]).choices] == [one]
        assert [choice.text for choice in complete(**TEXT, prompt=["one", "two"], n=2).choices] == [one, one, two, two]
        stopped = make(**CHAT, stop=[said[3]]).choices[0]
        assert (stopped.message.content, stopped.finish_reason) == (said[: said.index(said[3])], "stop")
        told = make(**CHAT, logprobs=True, top_logprobs=2).choices[0].logprobs
        assert told is not None
        assert "".join(row.token for row in told.content or []) == said
        assert all(row.top_logprobs[0].token == row.token for row in told.content or []), "the first one's too"
        seeded = [make(**CHAT, temperature=0.8, seed=seed).choices[0].message.content for seed in (3, 3)]
        assert seeded[0] == seeded[1]
    fleet.wait_idle()


@shared
def test_streams(fleet: Fleet) -> None:
    said, one, two = letters("user: hi\nassistant: "), letters("one"), letters("two")
    with fleet.client() as client:
        with client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}) as events:
            found = list(events)
        deltas = [choice.delta.content or "" for event in found for choice in event.choices]
        assert "".join(deltas) == said
        assert found[-1].usage is not None
        assert found[-1].usage.completion_tokens == 6
        texts = ["", ""]
        with client.completions.create(**TEXT, prompt=["one", "two"], stream=True) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        assert texts == [one, two]
    fleet.wait_idle()


@shared
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 70000}, "context"),
        ({"max_tokens": 6000}, "bytes of cache"),  # decode's alone: prefill's half ends with it
    ],
)
def test_a_refusal_reaches_the_client_whole(fleet: Fleet, more: dict[str, Any], words: str, streamed: bool) -> None:
    answer = fleet.post("/v1/chat/completions", {**CHAT, **more, "stream": streamed})
    assert answer.status == 400
    assert words in answer.body
    fleet.wait_idle()


@shared
def test_a_client_that_leaves_ends_both_legs(fleet: Fleet) -> None:
    with fleet.client() as client, client.chat.completions.create(**CHAT | {"max_tokens": 4000}, stream=True) as events:
        next(iter(events))
    fleet.wait_idle()


@shared
def test_many_at_once(fleet: Fleet) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    with fleet.client() as client, ThreadPoolExecutor(8) as senders:
        made = senders.map(lambda prompt: client.completions.create(**TEXT, prompt=prompt).choices[0].text, prompts)
        assert list(made) == [letters(prompt) for prompt in prompts]
    assert all(fleet.served()), "both decodes have served"
    fleet.wait_idle()


@shared
def test_probes_of_gateways_cost_no_line_in_the_log(fleet: Fleet) -> None:
    lines = [line for daemon in fleet.daemons for line in daemon.log]
    assert [line for line in lines if "ERROR" in line or "WARNING" in line or "Traceback" in line] == []


def hammer(fleet: Fleet, count: int) -> list[bool]:
    """Ask so many times, whole and streamed in turn; which got their answer, none of them later than its deadline."""
    got = []
    with fleet.client() as client:
        for number in range(count):
            began = time.monotonic()
            try:
                if number % 2:
                    with client.completions.create(**TEXT, prompt="one", stream=True) as events:
                        text = "".join(choice.text for event in events for choice in event.choices)
                else:
                    text = client.completions.create(**TEXT, prompt="one").choices[0].text
                assert text == letters("one")
                got.append(True)
            except openai.APIError:
                got.append(False)
            assert time.monotonic() - began < DEADLINE_S + PATIENCE_S
    return got


@pytest.mark.parametrize(
    ("name", "retries"),
    [
        pytest.param("smg", False, marks=_missing("smg")),
        pytest.param("smg", True, marks=[_missing("smg"), pytest.mark.slow]),
        pytest.param("sglang-router", False, marks=[_missing("sglang-router"), pytest.mark.slow]),
        pytest.param("sglang-router", True, marks=[_missing("sglang-router"), pytest.mark.slow]),
    ],
)
def test_daemons_that_die_and_come_back(name: str, retries: bool) -> None:
    with Fleet(name, *(CALM[1:] if retries else CALM)) as fleet:
        fleet.decodes[1].end(signal.SIGKILL)
        assert any(hammer(fleet, 4))
        fleet.decodes[1] = fleet.start("decode", 1)
        fleet.wait_serving()
        assert all(hammer(fleet, 4))
        fleet.prefill.end(signal.SIGKILL)
        assert not any(hammer(fleet, 2))
        fleet.prefill = fleet.start("prefill")
        fleet.wait_serving()
        assert all(hammer(fleet, 4))
        fleet.wait_idle()


@gateways
def test_a_decode_that_drains_finishes_what_runs(name: str) -> None:
    with Fleet(name, *CALM) as fleet, fleet.client() as client:
        fleet.wait_serving()
        before = fleet.served()
        with client.completions.create(model="toy", prompt="one", max_tokens=3000, stream=True) as events:
            text = next(iter(events)).choices[0].text
            (busy,) = (index for index, count in enumerate(fleet.served()) if count > before[index])
            fleet.decodes[busy].process.send_signal(signal.SIGTERM)
            assert any(hammer(fleet, 4)), "the other one serves"
            text += "".join(choice.text for event in events for choice in event.choices)
        assert text == letters("one", 3000)
        assert fleet.decodes[busy].end()[0] == 0
        assert any(hammer(fleet, 4))


@pytest.mark.slow
@gateways
@pytest.mark.parametrize("retries", [False, True])
def test_a_prefill_that_drains_refuses_at_once_on_both_sides(name: str, retries: bool) -> None:
    with Fleet(name, *(CALM[1:] if retries else CALM)) as fleet, ThreadPoolExecutor(1) as sender:
        room = {"bootstrap_room": 1, "bootstrap_host": "127.0.0.1", "bootstrap_port": fleet.ports[1]}
        alone = sender.submit(ask, fleet.prefill.http, "POST", "/v1/completions", {**TEXT, "prompt": "x", **room})
        until(lambda: fleet.statistics()[0]["legs"] == 1, "a half that makes the drain last")
        fleet.prefill.process.send_signal(signal.SIGTERM)
        assert not any(hammer(fleet, 4))
        assert alone.result().status == 503
        fleet.prefill.end()
        fleet.prefill = fleet.start("prefill")
        fleet.wait_serving()
        assert all(hammer(fleet, 4))
        fleet.wait_idle()
