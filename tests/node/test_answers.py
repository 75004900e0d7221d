"""The answers of two daemons with toy engines are those of one process."""

from __future__ import annotations

import pytest

from pdplane.api import DecodeRequest, PrefillRequest, Sampling, Token
from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Room
from pdplane.toy.model import EOS, ToyOptions, toy_answer
from tests.node.conftest import Daemons, call, idle, prompt
from tests.waiting import PATIENCE_S, until


@pytest.mark.parametrize("state", [False, True], ids=["history", "history and state"])
def test_many_prompts_at_once(daemons: Daemons, state: bool) -> None:
    options = ToyOptions(with_state=state)
    prefill, decode = daemons.pair(options)
    calls = [call(prefill, decode, prompt(seed), max_tokens=8) for seed in range(60)]
    assert all(running.is_right(options) for running in calls)
    until(lambda: idle(prefill, decode), "every count's start value")


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 41])
def test_prompts_around_a_block_and_a_chunk(daemons: Daemons, length: int) -> None:
    prefill, decode = daemons.pair()
    assert call(prefill, decode, prompt(length, length)).is_right(daemons.options)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16])
def test_as_many_tokens_as_were_asked_for(daemons: Daemons, max_tokens: int) -> None:
    prefill, decode = daemons.pair()
    running = call(prefill, decode, prompt(1), max_tokens=max_tokens)
    finished = running.finish()
    assert (finished.reason, finished.completion_tokens) == ("length", max_tokens)
    assert running.is_right(daemons.options)
    assert decode.engine.turns == max_tokens - 1  # the first token is prefill's
    until(lambda: idle(prefill, decode))


def test_an_answer_that_ends_with_its_first_token(daemons: Daemons) -> None:
    options = ToyOptions(eos_every=1)
    prefill, decode = daemons.pair(options)
    stopped = call(prefill, decode, prompt(1))
    finished = stopped.finish()
    assert (finished.reason, finished.completion_tokens, stopped.got) == ("stop", 1, [EOS])
    ignoring = call(prefill, decode, prompt(1), ignore_eos=True)
    assert (ignoring.finish().reason, ignoring.got) == ("length", [EOS] * 5)
    until(lambda: idle(prefill, decode))


def test_a_stop_id_ends_the_answer(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    expected = [token for token, _ in toy_answer(daemons.options, prompt(1), 5)]
    running = call(prefill, decode, prompt(1), stop_ids=frozenset({expected[0]}))
    assert running.finish().reason == "stop"
    assert running.got == expected[:1]


def test_each_answer_has_its_own_first_token_while_others_end_early(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(ToyOptions(num_lcm_blocks=24))
    calls = [call(prefill, decode, prompt(seed)) for seed in range(100)]
    cancelled = calls[::3]
    for running in cancelled:
        running.cancel()
    for running in calls:
        if running not in cancelled:
            assert running.is_right(daemons.options)
    until(lambda: idle(prefill, decode), "every count's start value")


def test_each_token_comes_with_the_likeliest_ones_the_first_too(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    room, got, sampling = Room(9), list[Token](), Sampling(top_logprobs=3, temperature=1.0, seed=4)
    request = DecodeRequest(room, prompt(1), prefill.rendezvous, 4, sampling=sampling)
    leg = decode.node.decode(request, got.append)
    first = prefill.node.prefill(PrefillRequest(room, prompt(1), sampling)).done.result(PATIENCE_S)
    leg.done.result(PATIENCE_S)
    assert first.top == got[0].top
    assert [len(token.top) for token in got] == [3] * 4
    assert all(token.top[0] == (token.id, token.logprob) for token in got)
    greedy = [token for token, _ in toy_answer(daemons.options, prompt(1), 4)]
    assert [token.id for token in got] != greedy


def test_the_handles_tell_what_happened(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    running = call(prefill, decode, prompt(3, 20))
    finished = running.finish()
    assert running.prefill is not None
    first = running.prefill.done.result()
    assert first.token == running.got[0]
    assert finished.prompt_tokens == 20
    assert {"bootstrap_ms", "alloc_ms", "prefill_ms", "transfer_ms", "transfer_mb"} <= first.timings.keys()
    assert {"alloc_ms", "transfer_wait_ms", "first_token_ms", "decode_ms"} <= finished.timings.keys()
    assert first.timings["transfer_mb"] == finished.timings["transfer_mb"]
    assert first.timings["transfer_mb"] * 1e6 == 5 * 3 * 2 * 2 * 4 * 8  # blocks, layers, k and v, heads, tokens, width
    assert all(value >= 0 for value in (*first.timings.values(), *finished.timings.values()))


@pytest.mark.parametrize("tokens", [(), (1, 256), (-1,), (2,) * 5000], ids=["none", "256", "-1", "too long"])
def test_a_prompt_that_cannot_be_served_is_refused_at_once(daemons: Daemons, tokens: tuple[int, ...]) -> None:
    prefill, decode = daemons.pair()
    with pytest.raises(ConfigError):
        call(prefill, None, tokens)
    with pytest.raises(ConfigError):
        call(None, decode, tokens, at=prefill.rendezvous)
    until(lambda: idle(prefill, decode))
    assert call(prefill, decode, prompt(1)).is_right(daemons.options)


def test_a_live_number_is_refused_and_free_at_once_after_its_end(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(tombstone_s=10)  # what is late must be known as late, however slow the machine
    prefill.hold.clear()
    first = call(prefill, decode, prompt(1), room=7)
    with pytest.raises(LocalProtocolError, match="room 7 is live"):
        call(None, decode, prompt(2), room=7, at=prefill.rendezvous)
    with pytest.raises(LocalProtocolError, match="room 7 is live"):
        call(prefill, None, prompt(2), room=7)
    prefill.hold.set()
    assert first.is_right(daemons.options)
    for seed in range(20):
        running = call(prefill, decode, prompt(seed), room=7)
        if seed % 4 == 3:
            running.cancel()
            assert all("the client left" in cause for cause in running.causes())
        else:
            assert running.is_right(daemons.options)
    assert prefill.node.statistics()["rooms"] == decode.node.statistics()["rooms"] == {}


def test_two_prompts_under_one_number_never_mix(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    waiting = call(None, decode, prompt(1, 12), room=7, at=prefill.rendezvous)
    work = call(prefill, None, prompt(2, 12), room=7)
    assert all("tokens differ" in cause for cause in (*waiting.causes(), *work.causes()))
    until(lambda: idle(prefill, decode))
    assert call(prefill, decode, prompt(3), room=7).is_right(daemons.options)


def test_an_engine_that_fails_is_named_on_both_sides(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(ToyOptions(poison=1))
    running = call(prefill, decode, (*prompt(1, 20), 1))
    assert running.causes() == {"prefill failed: token 1 is poison", "prefill: prefill failed: token 1 is poison"}
    until(lambda: idle(prefill, decode))
    assert call(prefill, decode, prompt(2)).is_right(daemons.options)
