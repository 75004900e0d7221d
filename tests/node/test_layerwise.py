"""Pages leave while prefill computes and are assembled while the rest is on its way: right answers, no leftovers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import attrs
import numpy as np
import pytest

from pdplane.api import GREEDY, DecodeRequest, PrefillRequest, Sampling, Token
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.reference import single_process
from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, new_room
from pdplane.node.decode import DecodeLeg, DecodeNode
from pdplane.node.prefill import PrefillLeg, PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.toy.engine import ToyAssembly, ToyPrefillEngine
from tests.node.conftest import SHORT, Daemons, Decode, Prefill, call, idle, prompt
from tests.waiting import PATIENCE_S, until

SMALL = EngineOptions("", prefill_step_size=24, block_tokens=8, arena_bytes=4 << 20, assemble_ahead_bytes=1, exact=True)


class Turnstile(threading.Event):
    """Lets a toy engine take as many turns as it was allowed."""

    def __init__(self) -> None:
        super().__init__()
        self._turns = threading.Semaphore(0)

    def allow(self, turns: int) -> None:
        self._turns.release(turns)

    def wait(self, timeout: float | None = None) -> bool:
        return self._turns.acquire(timeout=timeout)


def turnstile(daemons: Daemons) -> tuple[Prefill, Turnstile]:
    """A prefill daemon that stands before its first chunk."""
    gate = Turnstile()
    node = PrefillNode(ToyPrefillEngine(daemons.options, hold=gate), PrefillConfig(**SHORT | {"bootstrap_port": 0}))
    daemons.stack.callback(node.close)
    node.start()
    until(lambda: node.ready, "prefill's readiness")
    return Prefill(node, gate, node.statistics()["blocks"]["free_parents"], node.info()["bootstrap_port"]), gate


def test_pages_land_before_the_prompt_is_computed(daemons: Daemons) -> None:
    (prefill, gate), decode = turnstile(daemons), daemons.decode()
    running = call(prefill, decode, prompt(1, 30))
    for turns in (1, 2, 3):
        gate.allow(1)
        until(lambda turns=turns: len(_copies(running.decode)) == turns * 2 * 3 * 2)  # blocks, layers, keys and values
        assert not running.decode.done.done()
    gate.allow(100)
    assert running.is_right(daemons.options)
    until(lambda: idle(prefill, decode))


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_a_cancel_in_mid_prefill_leaves_nothing(daemons: Daemons, who: str) -> None:
    (prefill, gate), decode = turnstile(daemons), daemons.decode()
    running = call(prefill, decode, prompt(1, 60))
    gate.allow(2)
    until(lambda: len(_copies(running.decode)) == 2 * 2 * 3 * 2)
    for leg in (running.prefill, running.decode):
        if leg is not None and (who == "both" or leg is getattr(running, who)):
            leg.cancel("the client left")
    assert all("the client left" in cause for cause in running.causes())
    until(lambda: idle(prefill, decode), "every count's start value")
    assert _copies(running.decode) == {}
    gate.allow(100)
    assert call(prefill, decode, prompt(2, 60)).is_right(daemons.options)  # in the same blocks


def test_aborts_in_mid_prefill_and_reuse_of_the_blocks(daemons: Daemons) -> None:
    options = attrs.evolve(daemons.options, num_lcm_blocks=16)
    prefill, decode = daemons.pair(options)
    for seed in range(60):
        running = call(prefill, decode, prompt(seed, 100))
        if seed % 3:
            assert running.decode is not None
            until(lambda leg=running.decode: leg.done.done() or bool(_copies(leg)))
            running.cancel()
        else:
            assert running.is_right(options)
    until(lambda: idle(prefill, decode), "every count's start value")


def _copies(leg: object) -> dict[object, bytes]:
    assembly = getattr(leg, "assembly", None)
    return dict(assembly.copies) if isinstance(assembly, ToyAssembly) else {}


@attrs.frozen
class Nodes:
    """Two daemons with the same real model."""

    prefill: PrefillNode
    decode: DecodeNode
    engine: MlxDecodeEngine

    def call(self, tokens: tuple[int, ...], sampling: Sampling = GREEDY) -> tuple[DecodeLeg, PrefillLeg, list[Token]]:
        room, got = new_room(), list[Token]()
        address = Endpoint("127.0.0.1", int(self.prefill.info()["bootstrap_port"]))
        request = DecodeRequest(room, tokens, address, 6, ignore_eos=True, sampling=sampling)
        leg = self.decode.decode(request, got.append)
        return leg, self.prefill.prefill(PrefillRequest(room, tokens, sampling)), got

    def blocks_are_back(self) -> bool:
        counts = self.prefill.statistics()["blocks"], self.decode.statistics()["blocks"]
        return not any(found["used_blocks"] or found["waiting"] for found in counts)


@pytest.fixture(scope="module", params=["tiny:llama@6", "tiny:gemma3", "tiny:falcon_h1"])
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    options = attrs.evolve(SMALL, model=request.param)
    engine = MlxDecodeEngine(options)
    prefill = PrefillNode(MlxPrefillEngine(options), PrefillConfig(bootstrap_port=0))
    decode = DecodeNode(engine, DecodeConfig())
    try:
        prefill.start()
        decode.start()
        until(lambda: prefill.ready)
        found = Nodes(prefill, decode, engine)
        leg, work, _ = found.call(prompt(0, 30))  # connects them, and that stays
        leg.done.result(PATIENCE_S)
        work.done.result(PATIENCE_S)
        yield found
    finally:
        prefill.close()
        decode.close()


def test_real_models_answer_as_one_process(nodes: Nodes) -> None:
    running, engine = [], nodes.engine
    drawn = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, seed=5, top_logprobs=2)
    for seed, length in enumerate((1, 8, 25, 61, 140)):
        tokens, sampling = prompt(seed, length), drawn if seed % 2 else GREEDY
        running.append((tokens, sampling, *nodes.call(tokens, sampling)))
    for tokens, sampling, leg, work, got in running:
        finished = leg.done.result(PATIENCE_S)
        assert work.done.result(PATIENCE_S).timings["transfer_ms"] >= 0
        assert finished.timings["assembly_ms"] >= 0
        reference = partial(single_process, engine.opened.model, tokens, 6, SMALL, sampling=sampling)
        wanted = engine.thread.call(reference)
        assert [(token.id, token.logprob) for token in got] == [(token.id, token.logprob) for token in wanted]
        assert {len(token.top) for token in got} == {sampling.top_logprobs}


def test_a_real_prompt_can_be_cancelled_in_mid_prefill(nodes: Nodes) -> None:
    for seed in range(8):
        leg, work, _ = nodes.call(prompt(seed, 200))
        (leg if seed % 2 else work).cancel("the client left")
        for handle in (leg, work):
            error = handle.done.exception(PATIENCE_S)
            assert error is None or isinstance(error, RoomFailed)  # None: it was quicker than the cancel
    until(nodes.blocks_are_back, "the blocks' return")


def test_decode_is_told_of_whole_pages_only(nodes: Nodes) -> None:
    """What another prompt left in the blocks is not this one's: a page that was copied too early would show."""
    leg, work, _ = nodes.call(prompt(9, 200))
    leg.done.result(PATIENCE_S)
    work.done.result(PATIENCE_S)
    until(nodes.blocks_are_back, "the blocks' return")
    test_real_models_answer_as_one_process(nodes)


def test_the_toy_notices_a_page_that_changes(daemons: Daemons) -> None:
    decode: Decode = daemons.decode()
    engine = decode.engine
    blocks = {group: tuple(range(1, count + 1)) for group, count in engine.blocks_needed(4).items()}
    assembly = engine.assemble(4, blocks)
    layout = engine.layout
    start = layout.page_offsets(layout.fields[0].field_id, np.array([1], np.uint64))
    assembly.landed(start, np.array([layout.fields[0].payload_bytes], np.uint64))
    engine.arena.bytes[int(start[0])] ^= 1
    with pytest.raises(RuntimeError, match=r"block 1 of layer\.0\.k changed after it was final"):
        assembly.check()
