"""A pair of daemons with a tiny MLX model: many prompts, both orders, cancelled requests, a killed prefill."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import pytest

from pdplane.engine.model import load_model
from pdplane.engine.options import EngineOptions
from pdplane.engine.reference import single_process
from pdplane.engine.thread import EngineThread
from pdplane.ids import Endpoint, Room, new_room
from pdplane.toy.model import ToyOptions, toy_answer
from tests import waiting
from tests.cli.daemons import Daemon, Served
from tests.cli.processes import descendants, wait_gone
from tests.http_client import Answer, ask
from tests.waiting import until

MODEL = "tiny:llama"
# Small chunks, so that prompts of a few hundred tokens take several; an arena that eight prompts have to share.
STEP, BLOCK, ARENA = 64, 16, 2 << 20
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4  # keys and values, layers, heads, width, f32
ALERT = ("--ping-interval", "300ms", "--bootstrap-timeout", "5s")
FLAGS = (
    "--model", MODEL, "--prefill-step-size", str(STEP), "--block-tokens", str(BLOCK), "--arena-bytes", str(ARENA),
    *ALERT,
)  # fmt: skip
PATIENCE_S = 300  # eight prompts of the real model stand in line
Pair = tuple[Daemon, Daemon]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with Daemon("prefill", *FLAGS) as prefill, Daemon("decode", *FLAGS) as decode:
        both((prefill, decode), [5, 6, 7], 2)  # they register with each other, and that stays
        yield prefill, decode
        everybody = {daemon.process.pid for daemon in (prefill, decode)}
        everybody |= {pid for daemon in (prefill, decode) for pid in descendants(daemon.process.pid)}
    for daemon in (prefill, decode):
        assert daemon.process.returncode == 0, "".join(daemon.log)
        assert not [line for line in daemon.log if "Traceback" in line], "".join(daemon.log)
    wait_gone(everybody)


class Request:
    """One room: its two requests, sent in any order."""

    def __init__(self, prefill: Daemon, tokens: list[int], max_tokens: int) -> None:
        bootstrap = Endpoint.parse(prefill.ready["bootstrap"])
        self.room: Room = new_room()
        self.body: dict[str, Any] = {
            "input_ids": tokens,
            "max_tokens": max_tokens,
            "bootstrap_host": bootstrap.host,
            "bootstrap_port": bootstrap.port,
            "bootstrap_room": self.room,
        }

    def send(self, daemon: Daemon) -> HTTPConnection:
        """Send one leg and do not wait."""
        connection = HTTPConnection(daemon.http.host, daemon.http.port, timeout=PATIENCE_S)
        connection.request("POST", "/generate", json.dumps(self.body))
        return connection


def receive(connection: HTTPConnection) -> Answer:
    with closing(connection):
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read().decode())


def both(pair: Pair, tokens: list[int], max_tokens: int) -> Answer:
    """Decode's answer to a pair of requests."""
    request = Request(pair[0], tokens, max_tokens)
    legs = [request.send(daemon) for daemon in pair]
    first, answer = (receive(leg) for leg in legs)
    assert first.status == 200, first.body
    return answer


def statistics(daemon: Daemon) -> dict[str, Any]:
    return dict(ask(daemon.http, "GET", "/statistics").json)


def settled(daemon: Daemon, start: dict[str, Any]) -> dict[str, Any]:
    """Nothing, once what does not only grow is as it was at the start; else what differs when patience ends."""
    wanted, deadline = _levels(start), time.monotonic() + waiting.PATIENCE_S
    while (now := _levels(statistics(daemon))) != wanted:
        if time.monotonic() > deadline:
            return {key: (wanted.get(key), now.get(key)) for key in wanted | now if wanted.get(key) != now.get(key)}
        time.sleep(0.005)
    return {}


def _levels(counts: dict[str, Any]) -> dict[str, Any]:
    """Counts of what is there now, by path; zeros are the same as nothing.

    Without totals, tombstones, which time ends, and the caches of prompts, which their bound ends.
    """
    found: dict[str, Any] = {}
    for key, value in counts.items():
        if key in ("totals", "rejected", "tombstones", "prompt_caches") or key.startswith(("refused", "malformed")):
            continue
        if isinstance(value, dict):
            found |= {f"{key}.{name}": count for name, count in _levels(value).items()}
        elif value:
            found[key] = value
    return found


def of_lengths(*lengths: int) -> list[list[int]]:
    chance = random.Random(7)
    return [[chance.randrange(2, 320) for _ in range(length)] for length in lengths]


def reference(prompts: list[list[int]], max_tokens: int, name: str = MODEL) -> list[list[int]]:
    """The ids of one mlx-lm process, which stops at the model's own end."""
    thread = EngineThread()
    thread.start()
    try:
        model = thread.call(lambda: load_model(name))
        options = EngineOptions(model=name, prefill_step_size=STEP)

        def answer(prompt: list[int]) -> list[int]:
            stop_ids = model.tokenizer.eos_ids
            return [token.id for token in single_process(model, prompt, max_tokens, options, stop_ids=stop_ids)]

        return [thread.call(lambda prompt=prompt: answer(prompt)) for prompt in prompts]  # type: ignore[misc]
    finally:
        thread.close()


def test_32_prompts_eight_at_a_time_are_those_of_one_process(pair: Pair) -> None:
    edges = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, STEP, STEP + 1, STEP + 2, 2 * STEP + 1, 300)
    prompts = of_lengths(*edges, *range(20, 20 + 11 * 22, 11))
    assert len(prompts) == 32
    starts = [statistics(daemon) for daemon in pair]
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: both(pair, prompt, 12), prompts))
    assert [answer.status for answer in answers] == [200] * 32
    assert [answer.json["output_ids"] for answer in answers] == reference(prompts, 12)
    assert [settled(daemon, start) for daemon, start in zip(pair, starts, strict=True)] == [{}, {}]


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_the_second_request_may_come_when_the_first_has_long_waited(pair: Pair, first: str) -> None:
    (prompt,) = of_lengths(40)
    request = Request(pair[0], prompt, 6)
    early, late = pair if first == "prefill" else reversed(pair)
    waiting = request.send(early)
    until(lambda: any(statistics(early)["rooms"].values()), "the first leg")
    if first == "decode":  # prefill holds the offer without a thread and without a request
        until(lambda: statistics(late)["rooms"].get("early"), "its offer")
    legs = {early: waiting, late: request.send(late)}
    answers = {daemon: receive(leg) for daemon, leg in legs.items()}
    assert answers[pair[1]].json["output_ids"] == reference([prompt], 6)[0]
    assert answers[pair[0]].json["output_ids"] == answers[pair[1]].json["output_ids"][:1]


def test_200_requests_some_of_them_cancelled_leave_every_count_as_it_was(pair: Pair) -> None:
    starts = [statistics(daemon) for daemon in pair]
    prompts = of_lengths(*(1 + number % 150 for number in range(200)))

    def one(number: int) -> int:
        request = Request(pair[0], prompts[number], 4)
        kind = number % 20
        if kind < 4:  # the whole request is given up at once
            for daemon in pair:
                request.send(daemon).close()
            return 0
        if kind == 4:  # only decode's client stays, and is told
            request.send(pair[0]).close()
            return receive(request.send(pair[1])).status
        if kind == 5:  # only prefill's client stays, and is told
            request.send(pair[1]).close()
            return receive(request.send(pair[0])).status
        return both(pair, prompts[number], 4).status

    with ThreadPoolExecutor(8) as clients, ThreadPoolExecutor(20) as patient:  # who stays alone waits for a deadline
        begun = [(patient if number % 20 in (4, 5) else clients).submit(one, number) for number in range(200)]
        codes = [found.result() for found in begun]
    assert all(code == 200 for number, code in enumerate(codes) if number % 20 > 5), codes
    assert set(codes[4::20] + codes[5::20]) <= {200, 502, 503}  # a leg may have been over before its peer left
    assert [settled(daemon, start) for daemon, start in zip(pair, starts, strict=True)] == [{}, {}]
    assert both(pair, prompts[199], 4).json["output_ids"] == reference([prompts[199]], 4)[0]


def test_the_second_turn_of_a_chat_costs_what_is_new(pair: Pair) -> None:
    """Through `pdplane serve`, also when a client leaves the turn halfway: only new tokens are computed and sent."""
    served = Served("--prefill", pair[0].url, "--decode", pair[1].url)
    try:
        served.wait_healthy()
        said = [{"role": "user", "content": "tell me of prefixes, " * 8}]
        status, first = served.ask("/v1/chat/completions", {"messages": said, "max_tokens": 5})
        assert (status, first["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
        answer = first["choices"][0]["message"]["content"]
        said += [{"role": "assistant", "content": answer}, {"role": "user", "content": "and then?"}]
        leave(served, pair[1], {"messages": said, "max_tokens": 500, "stream": True})
        before, arrived = [statistics(daemon) for daemon in pair], arrived_bytes(pair[1])
        status, second = served.ask("/v1/chat/completions", {"messages": said, "max_tokens": 5})
        assert status == 200
        prompt, cached = second["usage"]["prompt_tokens"], second["usage"]["prompt_tokens_details"]["cached_tokens"]
        after = [statistics(daemon) for daemon in pair]
        computed, sent = (
            prompt - (now["prompt_caches"]["reused_tokens"] - then["prompt_caches"]["reused_tokens"])
            for now, then in zip(after, before, strict=True)
        )
        # The client that left had asked for the same prompt.
        assert prompt - cached == computed == sent == prompt - (prompt - 1) // 64 * 64
        assert arrived_bytes(pair[1]) - arrived == -(-sent // BLOCK) * BLOCK * TOKEN_BYTES
    finally:
        served.end()


def leave(served: Served, decode: Daemon, body: dict[str, Any]) -> None:
    """Begin a stream and leave it at its first token; return when the sequence is over."""
    connection = HTTPConnection(served.at.host, served.at.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    assert connection.getresponse().read(1)
    connection.close()
    until(lambda: not statistics(decode)["sequences"]["members"], "it is over")


def arrived_bytes(decode: Daemon) -> int:
    metrics = ask(decode.http, "GET", "/metrics").body
    found = re.search(r"^pdplane_kv_transfer_total_mb_sum (\S+)", metrics, re.MULTILINE)
    assert found
    return round(float(found[1]) * 1e6)


def test_a_killed_prefill_costs_its_rooms_and_nothing_else() -> None:
    prompt = list(b"tokens of the toy")
    with Daemon("decode", *ALERT) as decode:
        before = statistics(decode)
        with Daemon("prefill", *ALERT) as doomed:
            assert both((doomed, decode), prompt, 3).status == 200
            start = statistics(decode)
            waiting = Request(doomed, prompt, 3).send(decode)  # prefill's request never comes
            until(lambda: statistics(doomed)["rooms"].get("early"), "decode's offer of its blocks, its window open")
            assert statistics(decode)["blocks"]["used_blocks"] > 0
            bootstrap = Endpoint.parse(doomed.ready["bootstrap"])
            doomed.process.send_signal(signal.SIGKILL)
            told = receive(waiting)
            assert told.status in (502, 503)
            assert "prefill" in told.json["error"]["message"]
            assert statistics(decode)["blocks"] == start["blocks"]
        with Daemon("prefill", *ALERT, "--bootstrap-port", str(bootstrap.port)) as restarted:
            answer = both((restarted, decode), prompt, 3)
            assert answer.json["output_ids"] == [token for token, _logprob in toy_answer(ToyOptions(), prompt, 3)]
        assert settled(decode, before) == {}  # nothing of the peers that have left is kept


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_32_prompts_of_the_real_model() -> None:
    flags = (*FLAGS, "--model", "smollm2", "--arena-bytes", "64MiB", "--bootstrap-timeout", "300s")
    prompts = [[100 + token for token in prompt] for prompt in of_lengths(*range(1, 33))]
    with Daemon("prefill", *flags) as prefill, Daemon("decode", *flags) as decode, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda prompt: both((prefill, decode), prompt, 6), prompts))
    assert [answer.json["output_ids"] for answer in answers] == reference(prompts, 6, "smollm2")
