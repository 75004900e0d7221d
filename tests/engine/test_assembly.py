"""Caches that are assembled while their pages are still landing: the same bits, and nothing of a room that failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from pdplane.api import EngineDecodeRequest, Token
from pdplane.engine.pages import Assembly, Blocks
from pdplane.engine.thread import Turns
from pdplane.errors import ConfigError
from pdplane.kv.arena import Pool
from pdplane.kv.copies import U64, window_runs
from pdplane.kv.manifest import build_manifest
from tests.engine.pair import GARBAGE, Pair, options, prompt_of

LENGTH = 61

MODELS = {
    "llama": options("tiny:llama"),
    "gemma3": options("tiny:gemma3"),
    "unequal widths": options("tiny:deepseek_v3"),
    "nested caches": options("tiny:falcon_h1"),
    "no history": options("tiny:mamba2"),
    "8-bit cache": options("tiny:llama", kv_bits=8),
    "latent for legacy": options("tiny:deepseek_v3", page_layout="nhd"),
    "gemma3 for legacy": options("tiny:gemma3", page_layout="nhd"),
}


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(MODELS[request.param])
    yield found
    found.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    found = Pair(options("tiny:llama"))
    yield found
    found.close()


class Moved:
    """A prompt whose pages lie in decode's arena; `pieces` are its bytes in the order in which they landed."""

    def __init__(self, pair: Pair, length: int = LENGTH, seed: int = 0) -> None:
        self.pair, self.prompt = pair, prompt_of(length, seed)
        self.ours = Pool(pair.prefill.layout).allocate(pair.prefill.blocks_needed(length))
        self.theirs: Blocks = Pool(pair.decode.layout).allocate(pair.decode.blocks_needed(length))
        pair.decode.arena.bytes.fill(GARBAGE)
        self.first: Token = pair.prefill.prefill(self.prompt, self.ours, _nothing, keep_row=True).result(60)
        pair.move(self.ours, self.theirs, length)

    def assembly(self) -> Assembly:
        return self.pair.decode.assemble(len(self.prompt), self.theirs)

    def pieces(self, nbytes: int) -> tuple[U64, U64]:
        """The room's bytes in runs of at most so many, in no order."""
        manifest = build_manifest(self.pair.decode.layout, self.theirs, 0, len(self.prompt))
        starts, lengths = [], []
        for start, length in zip(*window_runs(self.pair.decode.layout, manifest), strict=True):
            for offset in range(int(start), int(start + length), nbytes):
                starts.append(offset)
                lengths.append(min(nbytes, int(start + length) - offset))
        order = np.random.default_rng(1).permutation(len(starts))
        return np.array(starts, np.uint64)[order], np.array(lengths, np.uint64)[order]

    def check(self, assembly: Assembly | None) -> None:
        """Assert that it continues with the bits of one process."""
        run = self.pair.finish(EngineDecodeRequest(tuple(self.prompt), self.theirs, self.first, 4, assembly=assembly))
        wanted = self.pair.reference(self.prompt, 4)
        assert [(token.id, token.logprob) for token in run.tokens] == [(t.id, t.logprob) for t in wanted]


@pytest.mark.parametrize("nbytes", [100, 1 << 20])
def test_pieces_in_any_order_give_the_bits_of_one_process(pair: Pair, nbytes: int) -> None:
    moved = Moved(pair)
    assembly = moved.assembly()
    starts, lengths = moved.pieces(nbytes)
    for part in range(0, len(starts), 7):
        assembly.landed(starts[part : part + 7], lengths[part : part + 7])
    moved.check(assembly)


def test_what_is_not_told_is_copied_at_the_end(pair: Pair) -> None:
    moved = Moved(pair)
    assembly = moved.assembly()
    starts, lengths = moved.pieces(100)
    assembly.landed(starts[::2], lengths[::2])
    moved.check(assembly)
    Moved(pair).check(None)


def test_pages_that_have_landed_are_copied_ahead(llama: Pair) -> None:
    moved = Moved(llama)
    assembly = moved.assembly()
    assembly.landed(*moved.pieces(1 << 20))
    _settle(llama)
    llama.decode.arena.bytes.fill(GARBAGE)  # what comes from the arena now is wrong
    moved.check(assembly)


def test_little_is_left_for_the_end() -> None:
    pair = Pair(options("tiny:llama", assemble_ahead_bytes=1 << 20))
    moved = Moved(pair)
    assembly = moved.assembly()
    assembly.landed(*moved.pieces(1 << 20))
    _settle(pair)
    assert all(target.buffers is None for target in assembly._targets)
    moved.check(assembly)
    pair.close()


def test_a_dropped_assembly_copies_nothing_more(llama: Pair) -> None:
    moved = Moved(llama)
    assembly = moved.assembly()
    gate = threading.Event()
    holding = llama.decode.thread.submit(lambda: _hold(gate))
    assembly.landed(*moved.pieces(1 << 20))
    assembly.drop()
    gate.set()
    holding.result(60)
    _settle(llama)
    assembly.landed(*moved.pieces(1 << 20))
    _settle(llama)
    assert all(target.buffers is None for target in assembly._targets)


def test_many_assemblies_share_the_thread_with_sequences(llama: Pair) -> None:
    first = Moved(llama)
    answer: list[Token] = []
    request = EngineDecodeRequest(tuple(first.prompt), first.theirs, first.first, 40)
    job = llama.decode.decode(request, answer.append, lambda: None)
    assemblies = [first.assembly() for _ in range(3)]
    starts, lengths = first.pieces(64)
    for part in range(0, len(starts), 50):
        for assembly in assemblies:
            assembly.landed(starts[part : part + 50], lengths[part : part + 50])
    assert job.result(60) == "length"
    wanted = llama.reference(first.prompt, 40)
    assert [(token.id, token.logprob) for token in answer] == [(t.id, t.logprob) for t in wanted]
    for assembly in assemblies[:2]:
        assembly.drop()
    first.check(assemblies[2])


def test_an_answer_of_one_token_drops_the_assembly(llama: Pair) -> None:
    moved = Moved(llama)
    assembly = moved.assembly()
    request = EngineDecodeRequest(tuple(moved.prompt), moved.theirs, moved.first, 1, assembly=assembly)
    assert llama.decode.decode(request, _nothing, _nothing).result(60) == "length"
    assembly.landed(*moved.pieces(1 << 20))
    _settle(llama)
    assert all(target.buffers is None for target in assembly._targets)


def test_what_cannot_work_is_refused_at_once(llama: Pair) -> None:
    with pytest.raises(ConfigError, match="needs 8 blocks"):
        llama.decode.assemble(LENGTH, {})
    with pytest.raises(ConfigError, match="no token"):
        llama.decode.assemble(0, {})


def _settle(pair: Pair) -> None:
    """Wait until the decode engine has no job left: each job that goes on has its next turn behind ours."""
    queue = pair.decode.thread._executor._work_queue
    pair.decode.thread.call(lambda: None)
    while not queue.empty():
        pair.decode.thread.call(lambda: None)


def _hold(gate: threading.Event) -> Turns[None]:
    gate.wait(60)
    yield


def _nothing(*_: object) -> None:
    """A callback that takes no notice."""
