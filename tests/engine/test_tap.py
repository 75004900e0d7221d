"""Layerwise streaming: what is told when, with the bits of one process at every interval."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import attrs
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from pdplane.engine.layout import KV
from pdplane.engine.tap import Tap
from pdplane.engine.thread import Turns
from pdplane.errors import ConfigError
from pdplane.kv.arena import Pool
from tests.engine.pair import BLOCK_TOKENS, GARBAGE, STEP_SIZE, Pair, options, prompt_of

LENGTH = 2 * STEP_SIZE + 12  # two whole chunks, a third one that ends inside a block, the last token
CHUNKS = [range(STEP_SIZE), range(STEP_SIZE, 2 * STEP_SIZE), range(2 * STEP_SIZE, LENGTH - 1)]

LAYERS = 7

MODELS = {
    "llama": options("tiny:llama"),
    "gemma3": options("tiny:gemma3"),
    "gemma3 for legacy": options("tiny:gemma3", page_layout="nhd"),
    "nested caches": options("tiny:falcon_h1"),
    "no history": options("tiny:mamba2"),
    "8-bit cache beside states": options("tiny:qwen3_next", kv_bits=8, kv_group_size=32),
}


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    found = Pair(options("tiny:llama"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def deep() -> Iterator[Pair]:
    found = Pair(options(f"tiny:qwen3@{LAYERS}"))
    yield found
    found.close()


@pytest.mark.parametrize("interval", [0, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_every_interval_has_the_bits_of_one_process(model: str, interval: int) -> None:
    pair = Pair(attrs.evolve(MODELS[model], layerwise_interval=interval))
    try:
        for length in (1, BLOCK_TOKENS, STEP_SIZE + 1, LENGTH):
            pair.check(prompt_of(length), max_tokens=3)
            if interval == 0:
                assert {chunk for _, chunk in pair.parts} == {range(length)}
    finally:
        pair.close()


def test_each_layer_is_told_once_a_chunk(llama: Pair) -> None:
    llama.check(prompt_of(LENGTH), max_tokens=1)
    assert llama.parts == [
        *((range(step, step + 1), chunk) for chunk in CHUNKS for step in range(2)),
        (range(2), range(LENGTH - 1, LENGTH)),
    ]


def test_a_chunk_that_completes_no_block_is_told_with_the_next(llama: Pair) -> None:
    llama.check(prompt_of(BLOCK_TOKENS), max_tokens=1)
    assert llama.parts == [(range(2), range(BLOCK_TOKENS))]


def test_layers_without_a_history_come_at_the_end() -> None:
    pair = Pair(options("tiny:gemma3"))  # the odd layers have a history
    pair.check(prompt_of(LENGTH), max_tokens=1)
    pair.close()
    assert pair.parts == [
        *((range(step, step + 1), chunk) for chunk in CHUNKS for step in (1, 3)),
        (range(4), range(LENGTH - 1, LENGTH)),
    ]


def test_a_layer_is_told_before_those_behind_it_are_cut(deep: Pair) -> None:
    layout, arena = deep.prefill.layout, deep.prefill.arena
    blocks = Pool(layout).allocate(deep.prefill.blocks_needed(STEP_SIZE + 1))
    arena.bytes.fill(GARBAGE)
    cut: list[tuple[range, list[bool]]] = []

    def on_step(steps: range, chunk: range) -> None:
        first = np.array(blocks[KV][:1], np.uint64)
        starts = [int(layout.page_offsets(fields[0], first)[0]) for fields in layout.steps]
        cut.append((steps, [bool((arena.bytes[start : start + 64] != GARBAGE).any()) for start in starts]))

    deep.prefill.prefill(prompt_of(STEP_SIZE + 1), blocks, on_step).result(60)
    assert cut[:LAYERS] == [
        (range(step, step + 1), [layer <= step for layer in range(LAYERS)]) for step in range(LAYERS)
    ]


@pytest.mark.parametrize("interval", [1, 4])
def test_a_deep_model_keeps_its_bits(deep: Pair, interval: int) -> None:
    pair = deep if interval == 1 else Pair(attrs.evolve(deep.options, layerwise_interval=interval))
    pair.check(prompt_of(LENGTH), max_tokens=3)
    assert [steps for steps, chunk in pair.parts if chunk == CHUNKS[1]] == [
        range(step, min(step + interval, LAYERS)) for step in range(0, LAYERS, interval)
    ]
    if pair is not deep:
        pair.close()


def test_long_prompts_are_told_in_a_bounded_number_of_parts(llama: Pair) -> None:
    tap = Tap([(0, llama.prefill.opened.leaves[0])], llama.prefill.opened.pages, {}, _nothing, options("tiny:llama"), 9)
    tap.attach([KVCache()], chunks=1000)
    assert tap.interval == 4


def test_a_prompt_cancelled_between_chunks_tells_and_writes_nothing_more(llama: Pair) -> None:
    told: list[range] = []
    blocks = Pool(llama.prefill.layout).allocate(llama.prefill.blocks_needed(LENGTH))

    def on_step(steps: range, chunk: range) -> None:
        told.append(chunk)
        job.cancel()

    llama.prefill.arena.bytes.fill(GARBAGE)
    gate = threading.Event()
    holding = llama.prefill.thread.submit(lambda: _hold(gate))  # until `job` is known
    job = llama.prefill.prefill(prompt_of(LENGTH), blocks, on_step)
    gate.set()
    holding.result(60)
    with pytest.raises(CancelledError):
        job.result(60)
    assert told == [CHUNKS[0], CHUNKS[0]]
    before = llama.prefill.arena.bytes.copy()
    llama.prefill.thread.call(lambda: None)
    assert (llama.prefill.arena.bytes == before).all()
    llama.check(prompt_of(LENGTH), max_tokens=2)


def test_an_exception_from_the_callback_fails_the_prompt_in_mid_chunk(llama: Pair) -> None:
    blocks = Pool(llama.prefill.layout).allocate(llama.prefill.blocks_needed(LENGTH))

    def broken(steps: range, chunk: range) -> None:
        raise LookupError(f"no room for {chunk}")

    with pytest.raises(LookupError, match=r"no room for range\(0, 24\)"):
        llama.prefill.prefill(prompt_of(LENGTH), blocks, broken).result(60)
    llama.check(prompt_of(LENGTH), max_tokens=2)


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match="layerwise_interval must be at least 0"):
        options("tiny:llama", layerwise_interval=-1)


def _hold(gate: threading.Event) -> Turns[None]:
    gate.wait(60)
    yield


def _nothing(steps: range, chunk: range) -> None:
    """A callback that takes no notice."""
