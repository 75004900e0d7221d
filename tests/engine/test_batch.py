"""Sequences that take each step together: each has the tokens that it would have alone, whoever comes and goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager

import attrs
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from pdplane.api import GREEDY, EngineDecodeRequest, FinishReason, Sampling, Token
from pdplane.engine import batch
from pdplane.engine.batch import FREE_PADDING, Batch, BatchMember, padding, why_alone
from pdplane.engine.caches import joined, keep
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.sampling import RowToken, Sampler
from pdplane.engine.thread import Job, Turns
from pdplane.errors import ConfigError, InternalError
from pdplane.kv.arena import Pool
from tests.engine import pair as pairs
from tests.engine.pair import Pair, prompt_of
from tests.waiting import until


def options(model: str, **changes: int | str | None) -> EngineOptions:
    """The options of a pair, with batches."""
    return pairs.options(model, **{"exact": False, **changes})


COUNT = 12  # tokens of an answer
PATIENCE_S = 60
LENGTHS = (5, 40, 17, 64, 30, 31, 32, 100)  # shorter, equal and longer than a block, a chunk and the window

FAMILIES = {
    "llama": options("tiny:llama"),
    "qwen3": options("tiny:qwen3"),
    "qwen3_moe": options("tiny:qwen3_moe"),
    "mixtral": options("tiny:mixtral"),
    "gemma3": options("tiny:gemma3"),
    "mamba2": options("tiny:mamba2"),
    "lfm2": options("tiny:lfm2"),
    "qwen3_next": options("tiny:qwen3_next"),
    "deepseek_v3": options("tiny:deepseek_v3"),
    "falcon_h1": options("tiny:falcon_h1"),
    "llama-bf16": options("tiny:llama-bf16"),
    "llama-q4": options("tiny:llama-q4"),
}
OTHER_BITS = {"gemma3"}
"""Families whose rows differ in a batch, in the last bits: a merge puts their ring in another order."""


@attrs.define(eq=False)
class Answered:
    """One request that was put to the decode engine."""

    tokens: list[Token] = attrs.field(factory=list)
    job: Job[FinishReason] | BatchMember | None = None

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def wait(self) -> FinishReason:
        assert self.job is not None
        return self.job.result(PATIENCE_S)


class Crowd:
    """Prompts whose caches lie in the decode engine's arena, and what became of them."""

    def __init__(self, pair: Pair, lengths: Sequence[int] = LENGTHS, samplings: Sequence[Sampling] = ()) -> None:
        self.pair, self.samplings = pair, list(samplings) or [GREEDY] * len(lengths)
        self.prompts = [prompt_of(length, seed=place) for place, length in enumerate(lengths)]
        ours, theirs = Pool(pair.prefill.layout), Pool(pair.decode.layout)
        self.requests = []
        for prompt, sampling in zip(self.prompts, self.samplings, strict=True):
            needed = pair.prefill.blocks_needed(len(prompt))
            source, target = ours.allocate(needed), theirs.allocate(needed)
            job = pair.prefill.prefill(prompt, source, lambda *_: None, sampling=sampling, keep_row=True)
            first = job.result(PATIENCE_S)
            pair.move(source, target, len(prompt))
            ours.release(source)
            self.requests.append(EngineDecodeRequest(tuple(prompt), target, first, COUNT, sampling=sampling))
        self.answers = [Answered() for _ in self.requests]

    def begin(self, number: int, hear: Callable[[Token], None] = lambda _: None) -> None:
        """Put one request to the engine; `hear` is told each token after it was noted."""
        answer = self.answers[number]

        def on_token(token: Token) -> None:
            answer.tokens.append(token)
            hear(token)

        answer.job = self.pair.decode.decode(self.requests[number], on_token, lambda: None, keep_rows=True)

    def run(self, every: int = 0) -> None:
        """Begin all, each one as the one before it has `every` tokens, and wait for their ends."""

        def begin(number: int) -> None:
            if number == len(self.requests):
                return
            answer = self.answers[number]
            self.begin(number, lambda _: begin(number + 1) if len(answer.tokens) == every else None)
            if every == 0:
                begin(number + 1)

        self.answers = [Answered() for _ in self.requests]
        begin(0)
        for answer in self.answers:
            assert answer.wait() == "length"

    def wanted(self, number: int) -> list[RowToken]:
        return self.pair.reference(self.prompts[number], COUNT, sampling=self.samplings[number])

    def check(self, wanted: Sequence[Sequence[RowToken]], *, bits: bool) -> None:
        """Assert equal ids, and whole rows bit for bit if so wished."""
        for answer, alone in zip(self.answers, wanted, strict=True):
            assert answer.ids == [token.id for token in alone]
            for got, expected in zip(answer.tokens, alone, strict=True):
                assert isinstance(got, RowToken)
                assert not bits or np.array_equal(got.row.view(np.uint32), expected.row.view(np.uint32))


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    found = Pair(options("tiny:llama"))
    yield found
    found.close()


def totals_of(pair: Pair) -> Mapping[str, int]:
    """What the decode engine counted since its start; nothing is left of it now."""
    until(lambda: not any(count for name, count in pair.decode.counts().items() if name != "totals"))
    totals = pair.decode.counts()["totals"]
    assert isinstance(totals, Mapping)
    return totals


def keeps_bits(pair: Pair, family: str) -> bool:
    """Whether a batch computes the bits of its members alone: with the wheel's BLAS a row's sums ignore the others."""
    return "OpenBLAS" not in dict(pair.decode.fingerprint.advisory)["blas"] and family not in OTHER_BITS


@pytest.mark.parametrize("family", FAMILIES)
def test_members_have_the_tokens_that_they_would_have_alone(family: str) -> None:
    pair = Pair(FAMILIES[family])
    try:
        crowd = Crowd(pair)
        wanted = [crowd.wanted(number) for number in range(len(LENGTHS))]
        for every in (0, 1, 3):  # all at once; staggered
            crowd.run(every)
            crowd.check(wanted, bits=keeps_bits(pair, family))
        totals = totals_of(pair)
        assert (totals["joined"], totals["alone"]) == (3 * len(LENGTHS), 0)
        assert totals["largest"] > 2
        assert pair.decode.facts()["sequences_alone_because"] is None
    finally:
        pair.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_lengths_need_no_padding(pair: Pair, size: int) -> None:
    crowd = Crowd(pair, [33] * size)
    crowd.run()
    crowd.check([crowd.wanted(number) for number in range(size)], bits=keeps_bits(pair, "llama"))


def test_a_batch_of_one_has_the_bits_of_one_process_even_after_others() -> None:
    pair = Pair(options("tiny:gemma3"))  # its ring would be in another order once it was merged
    try:
        crowd = Crowd(pair, (80, 40, 90))
        crowd.run()
        crowd.run(every=COUNT)
        crowd.check([crowd.wanted(number) for number in range(3)], bits=True)
    finally:
        pair.close()


def test_each_member_is_sampled_its_own_way(pair: Pair) -> None:
    samplings = [
        GREEDY,
        Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, logit_bias=((5, 3.0),), seed=3),
        Sampling(top_logprobs=5),
        Sampling(temperature=1.0, top_k=40, presence_penalty=0.5, frequency_penalty=0.4, seed=4, top_logprobs=2),
        Sampling(temperature=0.7, min_p=0.05, seed=9),
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=1.0, xtc_probability=0.4, seed=1),
        GREEDY,
    ]
    crowd = Crowd(pair, samplings=samplings)
    wanted = [crowd.wanted(number) for number in range(len(samplings))]
    for every in (0, 2):
        crowd.run(every)
        crowd.check(wanted, bits=keeps_bits(pair, "llama"))
        for answer, sampling in zip(crowd.answers, samplings, strict=True):
            assert {len(token.top) for token in answer.tokens} == {sampling.top_logprobs}


def test_a_stop_token_ends_its_member_only(pair: Pair) -> None:
    crowd = Crowd(pair)
    wanted = [[token.id for token in crowd.wanted(number)] for number in range(len(LENGTHS))]
    stops = {1: wanted[1][0], 3: wanted[3][4], 4: wanted[4][COUNT - 1]}
    for number, stop in stops.items():
        crowd.requests[number] = attrs.evolve(crowd.requests[number], stop_ids=frozenset({stop}))
    for number in range(len(LENGTHS)):
        crowd.begin(number)
    for number, (answer, alone) in enumerate(zip(crowd.answers, wanted, strict=True)):
        assert answer.wait() == ("stop" if number in stops else "length")
        assert answer.ids == (alone[: alone.index(stops[number]) + 1] if number in stops else alone)


def test_answers_of_many_lengths(pair: Pair) -> None:
    crowd = Crowd(pair)
    crowd.requests = [attrs.evolve(one, max_tokens=number + 1) for number, one in enumerate(crowd.requests)]
    crowd.run()
    for number, answer in enumerate(crowd.answers):
        assert answer.ids == [token.id for token in crowd.wanted(number)][: number + 1]


def test_a_cancelled_member_leaves_at_once_and_alone(pair: Pair) -> None:
    crowd = Crowd(pair)

    def cancel(_: Token) -> None:
        for number in (0, 2, 7):
            job = crowd.answers[number].job
            if len(crowd.answers[2].tokens) == 4 and job is not None:
                job.cancel()

    for number in range(len(LENGTHS)):
        crowd.begin(number, cancel if number == 2 else lambda _: None)
    for number, answer in enumerate(crowd.answers):
        if number in (0, 2, 7):
            with pytest.raises(CancelledError):
                answer.wait()
        else:
            assert answer.wait() == "length"
        wanted = [token.id for token in crowd.wanted(number)]
        assert answer.ids == wanted[: len(answer.ids)]
    assert len(crowd.answers[2].tokens) == 4
    assert len(crowd.answers[0].tokens) < COUNT


def test_what_one_member_breaks_is_its_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    bounded = Sampler._bounded

    def broken(sampler: Sampler, logprobs: mx.array) -> mx.array:
        if sampler._sampling.seed == 13:
            raise ValueError("no such bound")
        return bounded(sampler, logprobs)

    def refuse(token: Token) -> None:
        if len(crowd.answers[1].tokens) == 3:
            raise LookupError("nobody listens")

    crowd = Crowd(pair, LENGTHS[:4], [GREEDY, GREEDY, Sampling(temperature=1.0, seed=13), GREEDY])
    crowd.requests[3] = attrs.evolve(crowd.requests[3], assembly=Foreign())
    monkeypatch.setattr(Sampler, "_bounded", broken)
    for number in range(4):
        crowd.begin(number, refuse if number == 1 else lambda _: None)
    assert crowd.answers[0].wait() == "length"
    assert crowd.answers[0].ids == [token.id for token in crowd.wanted(0)]
    for number, error, words in [
        (1, LookupError, "nobody listens"),
        (2, ValueError, "no such bound"),
        (3, InternalError, "of another engine"),
    ]:
        with pytest.raises(error, match=words):
            crowd.answers[number].wait()


class Foreign:
    """An assembly that no MLX engine made."""

    def landed(self, offsets: object, lengths: object) -> None: ...

    def drop(self) -> None: ...


def test_a_step_that_fails_ends_all_with_its_cause_and_the_next_ones_live(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, calls = Batch._begin, list[int]()

    def broken(batch: Batch) -> list[mx.array]:
        calls.append(len(batch))
        if len(calls) == 5:
            raise RuntimeError("out of memory")
        return begin(batch)

    monkeypatch.setattr(Batch, "_begin", broken)
    crowd = Crowd(pair, LENGTHS[:3])
    for number in range(3):
        crowd.begin(number)
    for answer in crowd.answers:
        with pytest.raises(RuntimeError, match="out of memory"):
            answer.wait()
    crowd.run()
    crowd.check([crowd.wanted(number) for number in range(3)], bits=False)


@pytest.mark.parametrize(("nbytes", "steps"), [(128 << 20, COUNT), (1, COUNT + 7)])
def test_those_that_wait_together_join_together(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, nbytes: int, steps: int
) -> None:
    """As many as cost the others little: else one a step, and the last begins seven steps after the first."""
    monkeypatch.setattr(batch, "JOIN_BYTES", nbytes)
    crowd, before = Crowd(pair, [33] * 8), totals_of(pair)["steps"]
    with held(pair):
        for number in range(8):
            crowd.begin(number)
    assert [answer.wait() for answer in crowd.answers] == ["length"] * 8
    until(lambda: not pair.decode.counts()["members"], "all have left")
    assert totals_of(pair)["steps"] - before == steps
    crowd.check([crowd.wanted(number) for number in range(8)], bits=False)


@contextmanager
def held(pair: Pair) -> Iterator[None]:
    """Hold decode's MLX thread, so that what is begun inside begins together."""
    gate = threading.Event()

    def wait() -> Turns[None]:
        gate.wait(PATIENCE_S)
        yield

    pair.decode.thread.submit(wait)
    yield
    gate.set()


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="a GPU computes while tokens go out")
def test_on_the_cpu_a_token_goes_out_before_the_next_step_is_computed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened, compute = list[str](), batch.evaluate_later
    crowd = Crowd(pair, [33])
    monkeypatch.setattr(batch, "evaluate_later", lambda *arrays: (happened.append("step"), compute(*arrays)))
    crowd.begin(0, lambda _: happened.append("token"))
    assert crowd.answers[0].wait() == "length"
    # The first token is prefill's. The second step is built before the second token is read, and computed behind it.
    assert happened[:5] == ["token", "step", "token", "step", "token"]
    assert happened.count("token") == COUNT


def test_no_more_run_at_once_than_allowed() -> None:
    pair = Pair(options("tiny:llama", decode_concurrency=2))
    try:
        crowd = Crowd(pair)
        crowd.run()
        crowd.check([crowd.wanted(number) for number in range(len(LENGTHS))], bits=False)
        assert totals_of(pair)["largest"] == 2
        assert pair.decode.concurrency == 2
    finally:
        pair.close()


def test_very_different_lengths_run_in_batches_of_their_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdplane.engine.batch.FREE_PADDING", 16)
    lengths = (5, 60, 20, 130, 50)
    crowd, seen = Crowd(pair, lengths), list[int]()
    with held(pair):
        for number in range(len(lengths)):
            crowd.begin(number, lambda _: seen.append(pair.decode.counts()["batches"]))
    for number, answer in enumerate(crowd.answers):
        assert answer.wait() == "length"
        assert answer.ids == [token.id for token in crowd.wanted(number)]
    assert max(seen) == 3


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([7], 0),
        ([7, 7, 5], 2),
        ([1, 1 + FREE_PADDING], FREE_PADDING),
        ([1, 2 + FREE_PADDING], None),
        ([3000, 6000], 3000),
        ([3000, 6001], None),
        ([3000, 6000, 2999], None),
    ],
)
def test_padding_is_bounded(lengths: list[int], rows: int | None) -> None:
    assert padding(lengths) == rows


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (KVCache(), None),
        (RotatingKVCache(max_size=8), None),
        (ArraysCache(2), None),
        (CacheList(ArraysCache(2), KVCache()), None),
        (RotatingKVCache(max_size=8, keep=4), "keeps its first 4 tokens for good"),
        (CacheList(KVCache(), RotatingKVCache(max_size=8, keep=1)), "keeps its first 1 tokens for good"),
        (QuantizedKVCache(), "QuantizedKVCache"),
        (ChunkedKVCache(8), "ChunkedKVCache"),
        (ConcatenateKVCache(), "ConcatenateKVCache"),
        (None, "NoneType"),
    ],
)
def test_caches_that_cannot_be_merged_are_found(cache: object, reason: str | None) -> None:
    found = why_alone([KVCache(), cache])
    assert found == reason if reason is None else found is not None and found.startswith("layer 1") and reason in found


def keep_a_sink(model: Model) -> None:
    """Give a tiny model rings that keep their first tokens, as `max_kv_size` does."""
    model.network.make_cache = lambda: [RotatingKVCache(max_size=32, keep=4) for _ in model.network.layers]


@pytest.mark.parametrize(
    ("wish", "prepare", "reason"),
    [
        (options("tiny:llama"), keep_a_sink, "layer 0 keeps its first 4 tokens for good"),
        (options("tiny:llama", kv_bits=8), None, "layer 0 keeps a QuantizedKVCache"),
        (options("tiny:llama", exact=True), None, "--exact"),
    ],
    ids=["a sink", "quantised", "exact"],
)
def test_what_cannot_be_batched_runs_alone_in_turns(
    wish: EngineOptions, prepare: Callable[[Model], None] | None, reason: str
) -> None:
    pair = Pair(wish, prepare)
    try:
        crowd = Crowd(pair, LENGTHS[:4])
        crowd.run()
        crowd.check([crowd.wanted(number) for number in range(4)], bits=True)
        assert (totals_of(pair)["joined"], totals_of(pair)["alone"]) == (0, 4)
        assert reason in str(pair.decode.facts()["sequences_alone_because"])
    finally:
        pair.close()


def test_a_budget_of_bytes_can_be_kept(pair: Pair) -> None:
    row = 2 * 2 * 2 * 64 * 4  # layers, keys and values, heads, width, bytes
    assert [pair.decode.cache_nbytes(tokens) for tokens in (1, 256, 257)] == [256 * row, 256 * row, 512 * row]


def test_the_batch_needs_a_size() -> None:
    with pytest.raises(ConfigError, match="decode_concurrency must be at least 1, not 0"):
        options("tiny:llama", decode_concurrency=0)


# Joining and leaving, in mlx-lm's caches. When one of these fails, mlx-lm may have changed how caches are merged.


def filled_kv(rows: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(*(mx.random.normal((1, 2, rows, 4), key=mx.random.key(rows + n)) for n in range(2)))
    return cache


def filled_ring(rows: int) -> RotatingKVCache:
    cache = RotatingKVCache(max_size=8)
    for row in range(rows):
        cache.update_and_fetch(*(mx.random.normal((1, 2, 1, 4), key=mx.random.key(9 * row + n)) for n in range(2)))
    return cache


def filled_arrays(rows: int) -> ArraysCache:
    cache = ArraysCache(2)
    cache[0], cache[1] = (mx.random.normal((1, 3, 4), key=mx.random.key(rows + n)) for n in range(2))
    return cache


def filled_list(rows: int) -> CacheList:
    return CacheList(filled_kv(rows), filled_arrays(rows))


def tensors(cache: object) -> list[np.ndarray]:
    """What a cache holds, the oldest row first."""
    match cache:
        case CacheList():
            return [array for inner in cache.caches for array in tensors(inner)]
        case ArraysCache():
            return [np.array(array) for array in cache.cache]
        case RotatingKVCache():
            rows = min(cache.offset, cache.max_size)
            return [np.array(cache._temporal_order(array))[:, :, -rows:] for array in (cache.keys, cache.values)]
        case KVCache():
            return [np.array(array)[:, :, : cache.offset] for array in (cache.keys, cache.values)]
    raise AssertionError(type(cache))


def run_on(cache: object, keys: mx.array) -> None:
    """Append a row to every sequence, in every history."""
    match cache:
        case CacheList():
            for inner in cache.caches:
                run_on(inner, keys)
        case ArraysCache():
            pass
        case _:
            cache.update_and_fetch(keys, -keys)  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [(3, 11, 7, 12), (300, 4, 255, 256), (5, 255, 3, 520)], ids=str)
@pytest.mark.parametrize("fill", [filled_kv, filled_ring, filled_arrays, filled_list])
def test_caches_are_joined_and_left_row_by_row(fill: Callable[[int], object], lengths: Sequence[int]) -> None:
    single, batch = [fill(rows) for rows in lengths], fill(lengths[0])
    for number, rows in enumerate(lengths[1:], start=1):
        batch = joined(batch, fill(rows), is_merged=number > 1)
        news = mx.random.normal((number + 1, 2, 1, 4), key=mx.random.key(number))
        run_on(batch, news)
        for place in range(number + 1):
            run_on(single[place], news[place : place + 1])
    here = [0, 1, 2, 3]
    for leaves in (1, 2, 0):
        rest = [place for place in here if place != leaves]
        keep(batch, [here.index(place) for place in rest])
        here = rest
        news = mx.random.normal((len(here), 2, 1, 4), key=mx.random.key(len(here)))
        run_on(batch, news)
        for row, place in enumerate(here):
            run_on(single[place], news[row : row + 1])
            for got, wanted in zip(tensors(batch.extract(row)), tensors(single[place]), strict=True):
                assert np.array_equal(got, wanted), (here, place)
