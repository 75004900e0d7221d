"""A disaggregated sequence equals one mlx-lm process: ids and whole rows of log-probabilities, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.pair import BLOCK_TOKENS, STEP_SIZE, Pair, options, prompt_of

WINDOW = 32  # of the tiny gemma3

LENGTHS = {
    "one token": 1,
    "shorter than a block": BLOCK_TOKENS - 3,
    "a block": BLOCK_TOKENS,
    "a block and a token": BLOCK_TOKENS + 1,
    "a chunk and its last token": STEP_SIZE + 1,
    "the window": WINDOW,
    "the window and a token": WINDOW + 1,
    "three windows, several chunks": 3 * WINDOW,
    "a token before the reserve": 255,
    "the reserve": 256,
    "a token after the reserve": 257,
}

PAIRS = {
    "llama": options("tiny:llama"),
    "qwen3": options("tiny:qwen3"),
    "qwen3_moe": options("tiny:qwen3_moe"),
    "mixtral": options("tiny:mixtral"),
    "gemma3": options("tiny:gemma3"),
    "mamba2": options("tiny:mamba2"),
    "lfm2": options("tiny:lfm2"),
    "qwen3_next": options("tiny:qwen3_next"),
    "unequal widths": options("tiny:deepseek_v3"),
    "nested caches": options("tiny:falcon_h1"),
    "bf16": options("tiny:llama-bf16"),
    "4-bit weights": options("tiny:llama-q4"),
    "8-bit cache": options("tiny:llama", kv_bits=8),
    "4-bit cache": options("tiny:llama", kv_bits=4, kv_group_size=32),
    "8-bit cache beside states": options("tiny:qwen3_next", kv_bits=8, kv_group_size=32),
}


@pytest.fixture(scope="module", params=list(PAIRS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(PAIRS[request.param])
    yield found
    found.close()


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_equals_one_process(pair: Pair, length: int) -> None:
    pair.check(prompt_of(length), max_tokens=5)


@pytest.mark.parametrize("pair", ["llama", "gemma3", "8-bit cache"], indirect=True, scope="module")
def test_a_long_answer_outgrows_the_reserved_rows(pair: Pair) -> None:
    pair.check(prompt_of(250), max_tokens=270)


def test_the_arena_may_be_reused_in_any_order(pair: Pair) -> None:
    for length in (130, 3, 60):
        pair.check(prompt_of(length, seed=length), max_tokens=3)
