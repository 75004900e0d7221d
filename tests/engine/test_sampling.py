"""Sampled tokens over a pair are those of one mlx-lm process with the same seed, bits of log-probabilities included."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from pdplane.api import MAX_TOP_LOGPROBS, Sampling
from pdplane.engine.sampling import RowToken
from pdplane.engine.views import Numbers
from tests.engine.pair import Pair, options, prompt_of

SEED = 7
KINDS = {
    "temperature, top_p, bias, repetition": Sampling(
        temperature=0.8, top_p=0.9, logit_bias=((5, 3.0), (7, -2.0)), repetition_penalty=1.3, seed=SEED
    ),
    "temperature, top_k, presence, frequency": Sampling(
        temperature=1.1, top_k=20, presence_penalty=0.6, frequency_penalty=0.4, seed=SEED
    ),
    "temperature, min_p": Sampling(temperature=0.7, min_p=0.05, seed=SEED),
    "xtc": Sampling(temperature=0.9, xtc_probability=0.5, xtc_threshold=0.1, seed=SEED),
    "all bounds": Sampling(temperature=2.0, top_p=0.5, top_k=3, min_p=0.01, xtc_probability=0.3, seed=2**40 + 1),
    "the whole history": Sampling(
        temperature=1.0,
        frequency_penalty=0.3,
        frequency_context_size=0,
        presence_penalty=0.2,
        presence_context_size=3,
        seed=SEED,
    ),
    "greedy with a penalty": Sampling(repetition_penalty=1.2, repetition_context_size=5),
    "greedy with a seed": Sampling(seed=SEED),
    "bounds that bound nothing": Sampling(temperature=1.0, top_p=0.0, top_k=2**31 - 1, repetition_penalty=0, seed=0),
}


@pytest.fixture(scope="module", params=["tiny:llama", "tiny:llama-bf16"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(options(request.param))
    yield found
    found.close()


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS.keys())
def test_a_seed_gives_the_tokens_of_one_process(pair: Pair, sampling: Sampling) -> None:
    if sampling.top_k > 320:  # mlx-lm itself refuses what bounds nothing
        wanted = pair.reference(prompt_of(30), 12, sampling=attrs.evolve(sampling, top_k=0))
        got = pair.run(prompt_of(30), 12, sampling=sampling).tokens
        assert [(token.id, token.logprob) for token in got] == [(token.id, token.logprob) for token in wanted]
        return
    pair.check(prompt_of(30), 12, sampling)


def test_without_a_seed_answers_differ(pair: Pair) -> None:
    answers = [pair.run(prompt_of(30), 12, sampling=Sampling(temperature=1.5)).tokens for _ in range(2)]
    assert len({tuple(token.id for token in answer) for answer in answers}) == 2


@pytest.mark.parametrize("count", [1, 5, MAX_TOP_LOGPROBS])
def test_the_likeliest_tokens_come_with_each_token(pair: Pair, count: int) -> None:
    run = pair.run(prompt_of(30), 4, sampling=Sampling(top_logprobs=count))
    for token in run.tokens:
        assert isinstance(token, RowToken)
        assert len(token.top) == count
        assert token.top[0] == (token.id, token.logprob), "the greedy token is the likeliest"
        row = _floats(token.row)
        assert [logprob for _, logprob in token.top] == sorted(row.tolist(), reverse=True)[:count]
        assert all(row[one] == logprob for one, logprob in token.top)


def _floats(row: Numbers) -> Numbers:
    """The numbers of a row; numpy has no bfloat16, which is the upper half of a float32."""
    return (row.astype(np.uint32) << 16).view(np.float32) if row.dtype == np.uint16 else row
