"""Engine jobs: first tokens that end a sequence, cancelling, failing callbacks, many sequences, limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import attrs
import pytest

from pdplane.api import EngineDecodeRequest, Sampling, Token
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.errors import ConfigError, InternalError
from pdplane.kv.arena import Pool
from tests.engine.pair import GARBAGE, Pair, options, prompt_of


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair(attrs.evolve(options("tiny:llama"), arena_bytes=1 << 20))
    yield found
    found.close()


def nothing(*_: object) -> None:
    """A callback that takes no notice."""


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 16])
def test_max_tokens_counts_the_first_token(pair: Pair, max_tokens: int) -> None:
    run = pair.run(prompt_of(9), max_tokens)
    assert len(run.tokens) == max_tokens
    assert run.reason == "length"


def test_a_first_token_that_stops_needs_no_step(pair: Pair) -> None:
    first = pair.run(prompt_of(9), 1).tokens[0].id
    run = pair.run(prompt_of(9), 8, stop_ids=frozenset({first}))
    assert [token.id for token in run.tokens] == [first]
    assert run.reason == "stop"


def test_a_later_stop_token_is_the_last_one(pair: Pair) -> None:
    answer = [token.id for token in pair.run(prompt_of(9), 8).tokens]
    stop = frozenset({answer[4]})
    run = pair.run(prompt_of(9), 8, stop_ids=stop)
    assert [token.id for token in run.tokens] == answer[: answer.index(answer[4]) + 1]
    assert run.reason == "stop"
    assert [token.id for token in pair.reference(prompt_of(9), 8, stop_ids=stop)] == [t.id for t in run.tokens]


@pytest.fixture
def exact_pair() -> Iterator[Pair]:
    found = Pair(options("tiny:llama", arena_bytes=1 << 20, exact=True))
    yield found
    found.close()


def test_many_exact_sequences_keep_their_bits(exact_pair: Pair) -> None:
    pair = exact_pair
    prompts = [prompt_of(length, seed=length) for length in (3, 17, 30, 8, 50)]
    ours, theirs = Pool(pair.prefill.layout), Pool(pair.decode.layout)
    source = [ours.allocate(pair.prefill.blocks_needed(len(prompt))) for prompt in prompts]
    target = [theirs.allocate(pair.decode.blocks_needed(len(prompt))) for prompt in prompts]
    waiting = [pair.prefill.prefill(prompt, blocks, nothing) for prompt, blocks in zip(prompts, source, strict=True)]
    firsts = [job.result(60) for job in waiting]
    answers: list[list[Token]] = [[] for _ in prompts]
    jobs = []
    for prompt, from_, to, first, answer in zip(prompts, source, target, firsts, answers, strict=True):
        pair.move(from_, to, len(prompt))
        request = EngineDecodeRequest(tuple(prompt), to, first, 12)
        jobs.append(pair.decode.decode(request, answer.append, nothing))
    assert [job.result(60) for job in jobs] == ["length"] * len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = pair.reference(prompt, 12)
        assert [(t.id, t.logprob) for t in answer] == [(t.id, t.logprob) for t in wanted]


def test_a_cancelled_prompt_ends_between_chunks_and_writes_nothing(pair: Pair) -> None:
    gate = threading.Event()
    pair.prefill.arena.bytes.fill(GARBAGE)
    blocks = Pool(pair.prefill.layout).allocate(pair.prefill.blocks_needed(200))
    holding = pair.prefill.thread.submit(lambda: _hold(gate))
    job = pair.prefill.prefill(prompt_of(200), blocks, nothing)
    job.cancel()
    gate.set()
    with pytest.raises(CancelledError):
        job.result(60)
    holding.result(60)
    assert (pair.prefill.arena.bytes == GARBAGE).all()
    pair.check(prompt_of(5), 3)  # and the engine serves the next one


def _hold(gate: threading.Event) -> Iterator[None]:
    gate.wait(60)
    yield


def test_a_cancelled_answer_ends_between_tokens(pair: Pair) -> None:
    blocks = Pool(pair.decode.layout).allocate(pair.decode.blocks_needed(1))
    request = EngineDecodeRequest((5,), blocks, Token(7, -1.0), 4000)
    job = pair.decode.decode(request, lambda token: job.cancel() if token.id != 7 else None, nothing)
    with pytest.raises(CancelledError):
        job.result(60)


def test_an_exception_in_a_callback_is_the_jobs_error(pair: Pair) -> None:
    def broken(*_: object) -> None:
        raise LookupError("no such room")

    ours = Pool(pair.prefill.layout).allocate(pair.prefill.blocks_needed(9))
    with pytest.raises(LookupError, match="no such room"):
        pair.prefill.prefill(prompt_of(9), ours, broken).result(60)
    with pytest.raises(LookupError, match="no such room"):
        pair.decode.decode(EngineDecodeRequest(tuple(prompt_of(9)), ours, Token(7, -1.0), 4), broken, nothing).result(
            60
        )
    pair.check(prompt_of(9), 3)


def test_prompts_that_cannot_work_are_refused_at_once(pair: Pair) -> None:
    engine = pair.prefill
    blocks = {group_id: tuple(range(1, count + 1)) for group_id, count in engine.blocks_needed(9).items()}
    with pytest.raises(ConfigError, match="no token"):
        engine.prefill([], {}, nothing)
    with pytest.raises(ConfigError, match="has 4097 tokens, the model's context 4096"):
        engine.prefill([5] * 4097, {}, nothing)
    with pytest.raises(ConfigError, match="do not fit in an arena"):
        engine.check_prompt_len(2000)
    with pytest.raises(ConfigError, match="token id 320 is outside the vocabulary"):
        engine.prefill([3, 320], blocks, nothing)
    with pytest.raises(ConfigError, match="token id -1"):
        engine.prefill([-1, 3], blocks, nothing)
    with pytest.raises(ConfigError, match="needs 3 blocks of group 'kv', not 2"):
        engine.prefill(prompt_of(17), blocks, nothing)
    with pytest.raises(ConfigError, match=r"outside 1\.\."):
        engine.prefill(prompt_of(9), dict.fromkeys(blocks, (0, 1)), nothing)


def test_requests_that_cannot_work_are_refused_at_once(pair: Pair) -> None:
    blocks = dict.fromkeys(pair.decode.blocks_needed(3), (1,))
    good = EngineDecodeRequest((2, 3, 4), blocks, Token(7, -1.0), 2)
    for change, reason in [
        ({"first": Token(320, -1.0)}, "outside the vocabulary"),
        ({"first": Token(-1, -1.0)}, "outside the vocabulary"),
        ({"sampling": Sampling(logit_bias=((320, 1.0),))}, "outside the vocabulary"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"blocks": {}}, "needs 1 blocks"),
        ({"prompt": ()}, "no token"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            pair.decode.decode(attrs.evolve(good, **change), nothing, nothing)


def test_an_answer_ends_at_the_context() -> None:
    pair = Pair(options("tiny:mamba2", prefill_step_size=512))
    try:
        prompt = prompt_of(4094)
        assert pair.decode.context_length == 4096
        run = pair.run(prompt, 20)
        assert run.reason == "length"
        assert len(run.tokens) == 3  # the last one is never run, so it needs no place
    finally:
        pair.close()


def test_closing_ends_running_jobs() -> None:
    engine = MlxDecodeEngine(options("tiny:llama"))
    engine.start()
    reported = threading.Event()
    blocks = Pool(engine.layout).allocate(engine.blocks_needed(1))
    job = engine.decode(EngineDecodeRequest((5,), blocks, Token(7, -1.0), 4000), lambda _: reported.set(), nothing)
    assert reported.wait(60)
    engine.close()
    engine.close()
    with pytest.raises(CancelledError):
        job.result(0)
    with pytest.raises(InternalError):
        engine.decode(EngineDecodeRequest((5,), blocks, Token(7, -1.0), 4000), nothing, nothing)


def test_a_failed_start_leaves_no_thread() -> None:
    engine = MlxPrefillEngine(options("tiny:unicorn"))
    with pytest.raises(ConfigError, match="unknown tiny family 'unicorn'"):
        engine.start()
    with pytest.raises(InternalError, match="not started"):
        _ = engine.layout
    engine.close()
