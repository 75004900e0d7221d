"""Prompts that begin alike: what is reused, what is computed, and that the answer is one process's."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import pytest

from pdplane.api import DecodeRequest, PrefillRequest
from pdplane.engine.blas import blas_in_use
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.prompts import CUT_TOKENS, PromptCaches
from pdplane.ids import Endpoint, Room
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from tests.engine.pair import Pair, options, prompt_of
from tests.waiting import PATIENCE_S, until

REUSING = ["llama", "qwen3_moe", "deepseek_v3", "llama-bf16", "llama-q4"]
WHOLE = {"gemma3": {}, "mamba2": {}, "qwen3_next": {}, "falcon_h1": {}, "llama": {"kv_bits": 8}}


def reused_by(engine: MlxPrefillEngine, prompt: list[int]) -> int:
    """Compute a prompt; gives the tokens that came from another one's cache."""
    found: list[int] = []
    blocks = {group: range(1, 1 + count) for group, count in engine.blocks_needed(len(prompt)).items()}
    engine.prefill(prompt, blocks, lambda _steps, _chunk: None, on_reused=found.append).result(60)
    (tokens,) = found
    return tokens


def turns_of(first: int = 150) -> Iterator[tuple[list[int], int]]:
    """Prompts one after the other, each with the tokens that need no computing."""
    base = prompt_of(first)
    yield base, 0
    yield base + prompt_of(40, seed=1), first // CUT_TOKENS * CUT_TOKENS  # the next turn of a conversation
    yield base + prompt_of(40, seed=1), first // CUT_TOKENS * CUT_TOKENS  # again: its own last tokens are computed
    yield base[:100] + prompt_of(90, seed=2), CUT_TOKENS  # another branch
    yield base[:CUT_TOKENS], 0  # the last token is never reused
    yield prompt_of(100, seed=3), 0


@pytest.mark.parametrize("family", REUSING)
@pytest.mark.parametrize("interval", [0, 1])
def test_equal_beginnings_are_computed_once(family: str, interval: int) -> None:
    """Ids are those of one process in every turn; each byte still reaches decode once (asserted by the pair)."""
    pair = Pair(options(f"tiny:{family}", exact=False, layerwise_interval=interval))
    try:
        for prompt, reused in turns_of():
            before = pair.prefill.prompt_caches()["reused_tokens"]
            got, wanted = pair.run(prompt, 6).tokens, pair.reference(prompt, 6)
            assert [token.id for token in got] == [token.id for token in wanted]
            assert pair.prefill.prompt_caches()["reused_tokens"] - before == reused
    finally:
        pair.close()


@pytest.mark.parametrize(("family", "changes"), WHOLE.items())
def test_what_cannot_be_cut_is_computed_whole(family: str, changes: dict[str, int]) -> None:
    pair = Pair(options(f"tiny:{family}", exact=False, **changes))
    try:
        for prompt, _ in turns_of():
            pair.check(prompt, 4)
        assert pair.prefill.prompt_caches() == {"prompts": 0, "bytes": 0, "reused_tokens": 0}
    finally:
        pair.close()


@pytest.mark.parametrize("family", REUSING)
def test_exact_keeps_the_bits_in_every_turn(family: str) -> None:
    pair = Pair(options(f"tiny:{family}", exact=True, prefill_step_size=256))
    try:
        for prompt, _ in turns_of():
            pair.check(prompt, 4)
        assert (pair.prefill.prompt_caches()["reused_tokens"] > 0) == blas_in_use().is_reference
    finally:
        pair.close()


def test_exact_reuses_only_between_long_pieces() -> None:
    base, both = prompt_of(200), 2 * CUT_TOKENS if blas_in_use().is_reference else 0
    with MlxPrefillEngine(
        EngineOptions("tiny:llama", exact=True, arena_bytes=32 << 20, prefill_step_size=256)
    ) as engine:
        assert reused_by(engine, base) == 0
        assert reused_by(engine, base[:130] + prompt_of(10, seed=1)) == 0  # 12 tokens to compute: other kernels
        assert reused_by(engine, base[:130] + prompt_of(100, seed=2)) == both
        assert reused_by(engine, base[:130] + prompt_of(256 + 20, seed=3)) == 0  # a last chunk of few tokens


def test_the_bound_in_bytes_holds_and_what_was_used_last_stays() -> None:
    one = EngineOptions("tiny:llama", arena_bytes=32 << 20)
    prompts = [prompt_of(200, seed=seed) for seed in range(3)]
    with MlxPrefillEngine(one) as engine:
        reused_by(engine, prompts[0])
        nbytes = engine.prompt_caches()["bytes"]
    with MlxPrefillEngine(attrs.evolve(one, prompt_cache_bytes=3 * nbytes)) as engine:
        assert [reused_by(engine, prompt) for prompt in (*prompts[:2], prompts[0], prompts[2])] == [0, 0, 192, 0]
        kept = engine.prompt_caches()
        assert (kept["prompts"], kept["reused_tokens"], kept["bytes"] <= 3 * nbytes) == (2, 192, True)
        assert [reused_by(engine, prompt) for prompt in (prompts[0], prompts[1])] == [192, 0]
        longer = prompts[1] + prompt_of(1, seed=9)
        assert reused_by(engine, longer) == 192
        assert engine.prompt_caches()["prompts"] <= 2  # the shorter one is part of the longer
    with MlxPrefillEngine(attrs.evolve(one, prompt_cache_bytes=0)) as engine:
        assert [reused_by(engine, prompts[0]) for _ in range(2)] == [0, 0]


def test_a_cache_of_caches_begins_empty() -> None:
    assert PromptCaches(EngineOptions("x")).take([1] * 200) == (None, 0)


def test_both_nodes_report_what_was_reused() -> None:
    chosen = EngineOptions("tiny:llama", arena_bytes=16 << 20)
    prefill = PrefillNode(MlxPrefillEngine(chosen), PrefillConfig(bootstrap_port=0))
    decode = DecodeNode(MlxDecodeEngine(chosen), DecodeConfig())
    try:
        prefill.start()
        decode.start()
        until(lambda: prefill.ready, "prefill is registered")
        where = Endpoint("127.0.0.1", int(prefill.info()["bootstrap_port"]))
        found = []
        for number, prompt in enumerate((prompt_of(150), prompt_of(150) + prompt_of(30, seed=1))):
            room, tokens = Room(number), tuple(prompt)
            leg = decode.decode(DecodeRequest(room, tokens, where, 3), lambda _token: None)
            prefill.prefill(PrefillRequest(room, tokens)).done.result(PATIENCE_S)
            found.append(leg.done.result(PATIENCE_S).cached_tokens)
        assert found == [0, 128]
        assert prefill.statistics()["prompt_caches"]["reused_tokens"] == 128
    finally:
        decode.close()
        prefill.close()
