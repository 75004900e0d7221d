"""Prompts that begin alike: what is reused, what is computed, and that the answer is one process's."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

import attrs
import mlx.core as mx
import pytest

from pdplane.api import DecodeRequest, EngineDecodeRequest, FinishReason, PrefillRequest, Token
from pdplane.engine.batch import BatchMember
from pdplane.engine.blas import blas_in_use
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.options import EngineOptions
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.prompts import CUT_TOKENS, WHY_WHOLE, PromptCaches
from pdplane.engine.reference import single_process
from pdplane.engine.thread import Job
from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, Room
from pdplane.kv.arena import Pool
from pdplane.node.decode import DecodeLeg, DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from tests.engine.pair import Pair, options, prompt_of
from tests.waiting import PATIENCE_S, until

REUSING = ["llama", "qwen3_moe", "deepseek_v3", "llama-bf16", "llama-q4"]
HISTORIES = [*REUSING, "qwen3", "mixtral", "gemma3", "lfm2", "qwen3_next", "falcon_h1"]
"""Families that decode can keep rows of, whatever else it is sent anew: the states of some are snapshots."""
CACHES = {
    **{family: (f"tiny:{family}", {}) for family in HISTORIES},
    "8-bit cache": ("tiny:llama", {"kv_bits": 8}),
    "legacy pages": ("tiny:llama", {"page_layout": "nhd"}),
    "latent legacy pages": ("tiny:deepseek_v3", {"page_layout": "nhd"}),
}
NEVER_KEPT = {"mamba2": ("tiny:mamba2", {}), "legacy gemma3": ("tiny:gemma3", {"page_layout": "nhd"})}
COUNT = 6  # tokens of an answer, the last of which is never run


@contextmanager
def pair_of(model: str, **changes: int | str | None) -> Iterator[Pair]:
    pair = Pair(options(model, **{"exact": False, **changes}))
    try:
        yield pair
    finally:
        pair.close()


def ask(pair: Pair, prompt: list[int], count: int = COUNT) -> tuple[list[int], int, int]:
    """Run a prompt, whose ids must be one process's; gives the answer, and what prefill and decode reused.

    The pair asserts that each byte that decode asked for is sent once, and no other.
    """
    before = pair.prefill.prompt_caches().get("reused_tokens", 0)
    run, wanted = pair.run(prompt, count), pair.reference(prompt, count)
    answer = [token.id for token in run.tokens]
    assert answer == [token.id for token in wanted]
    return answer, pair.prefill.prompt_caches().get("reused_tokens", 0) - before, run.kept


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


@pytest.mark.parametrize(("family", "interval"), [*((family, 1) for family in REUSING), ("llama", 0)])
def test_equal_beginnings_are_computed_once(family: str, interval: int) -> None:
    with pair_of(f"tiny:{family}", layerwise_interval=interval) as pair:
        for prompt, reused in turns_of():
            assert ask(pair, prompt)[1:] == (reused, reused)


@pytest.mark.parametrize("cache", CACHES)
def test_decode_is_sent_what_it_lacks_of_a_conversation(cache: str) -> None:
    """Its own answer is part of what it has, and prefill computes that part again."""
    model, changes = CACHES[cache]
    with pair_of(model, **changes) as pair:
        prompt = prompt_of(2 * CUT_TOKENS - 3)
        for turn in range(3):
            answer, reused, kept = ask(pair, prompt)
            # The answer's last token is never run, so its row does not exist.
            known = len(prompt) + COUNT - 1
            assert kept == (0, 2 * CUT_TOKENS, 3 * CUT_TOKENS)[turn]
            assert reused == (0 if not pair.prefill.prompt_caches() else (0, CUT_TOKENS, 3 * CUT_TOKENS)[turn])
            prompt = prompt + answer + prompt_of(3 * CUT_TOKENS + 2 - known, seed=turn)
        kept = pair.decode.prompt_caches()
        assert (kept["prompts"], kept["reused_tokens"]) == (1, 5 * CUT_TOKENS)  # the longest has all of it


@pytest.mark.parametrize(("model", "changes"), NEVER_KEPT.values(), ids=NEVER_KEPT.keys())
def test_what_cannot_be_kept_is_sent_whole(model: str, changes: dict[str, str]) -> None:
    with pair_of(model, **changes) as pair:
        assert [ask(pair, prompt)[1:] for prompt, _ in turns_of()] == [(0, 0)] * 6
        assert pair.prefill.prompt_caches() == pair.decode.prompt_caches() == {}
        for engine in (pair.prefill, pair.decode):
            assert engine.facts()["nothing_reused_because"] == WHY_WHOLE


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    with pair_of("tiny:llama") as pair:
        yield pair


@pytest.mark.parametrize("known", [CUT_TOKENS - 1, CUT_TOKENS, CUT_TOKENS + 1])
def test_borders_of_what_is_kept(llama: Pair, known: int) -> None:
    prompt = prompt_of(known - COUNT + 1, seed=known)
    answer, _, _ = ask(llama, prompt)
    whole = prompt + answer
    expected = known // CUT_TOKENS * CUT_TOKENS
    assert ask(llama, whole[:known], 1)[2] == (CUT_TOKENS if known > CUT_TOKENS else 0)  # a last token is left to send
    assert ask(llama, [*whole[:known], 5])[2] == expected
    assert ask(llama, whole)[2] == expected


def test_a_block_that_does_not_divide_the_cut() -> None:
    with pair_of("tiny:llama", block_tokens=24) as pair:
        prompt = prompt_of(200)
        ask(pair, prompt)
        assert ask(pair, prompt + prompt_of(20, seed=1))[1:] == (192, 192)
        assert ask(pair, prompt[:190] + prompt_of(20, seed=2))[1:] == (128, 0)  # 128 is no border of a block


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "deepseek_v3"])
def test_members_of_a_batch_are_kept_and_continued(family: str) -> None:
    """Sequences of unequal lengths that leave a running batch one by one, and come back to it."""
    with pair_of(f"tiny:{family}") as pair:
        running: list[Token] = []
        job = begin(pair, prompt_of(30, seed=9), 60, running)
        for turn, length in enumerate((70, 131, 64)):
            prompt = prompt_of(length, seed=turn)
            answer, _, kept = ask(pair, prompt)
            assert kept == 0
            assert ask(pair, prompt + answer + [7])[2] == (length + COUNT - 1) // CUT_TOKENS * CUT_TOKENS
        assert job.result(60) == "length"
        assert [token.id for token in running] == [t.id for t in pair.reference(prompt_of(30, seed=9), 60)]


def begin(pair: Pair, prompt: list[int], count: int, tokens: list[Token]) -> BatchMember | Job[FinishReason]:
    """Begin a sequence and return when its cache no longer needs the arena."""
    blocks = Pool(pair.decode.layout).allocate(pair.decode.blocks_needed(len(prompt)))
    first = pair.prefill.prefill(prompt, blocks, lambda _steps, _chunk: None).result(60)
    pair.move(blocks, blocks, len(prompt))
    assembled = threading.Event()
    job = pair.decode.decode(EngineDecodeRequest(tuple(prompt), blocks, first, count), tokens.append, assembled.set)
    assert assembled.wait(60)
    return job


@pytest.mark.parametrize("exact", [False, True])
def test_a_cancelled_sequence_is_kept_as_far_as_it_came(*, exact: bool) -> None:
    with pair_of("tiny:llama", exact=exact) as pair:
        prompt, tokens = prompt_of(100), list[Token]()
        job = begin(pair, prompt, 2000, tokens)
        until(lambda: len(tokens) > CUT_TOKENS, "the answer is long enough")
        job.cancel()
        assert isinstance(job.future.exception(60), CancelledError)
        if not exact or blas_in_use().is_reference:
            # Under `exact` an answer's rows are of no use, since they were computed one by one.
            until(lambda: pair.decode.prompt_caches()["prompts"] == 1, "it is kept")
            both = prompt + [token.id for token in tokens[:CUT_TOKENS]] + prompt_of(64, seed=1)
            assert ask(pair, both)[2] == (CUT_TOKENS if exact else 2 * CUT_TOKENS)
        else:
            assert pair.decode.prompt_caches()["prompts"] == 0


@pytest.mark.parametrize("family", REUSING)
def test_exact_keeps_the_bits_in_every_turn(family: str) -> None:
    with pair_of(f"tiny:{family}", exact=True, prefill_step_size=256) as pair:
        for prompt, _ in turns_of():
            pair.check(prompt, 4)
        for engine in (pair.prefill, pair.decode):
            assert (engine.prompt_caches()["reused_tokens"] > 0) == blas_in_use().is_reference
            assert (engine.facts()["nothing_reused_because"] is None) == blas_in_use().is_reference


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
        assert (kept["prompts"], kept["reused_tokens"], kept["bytes"]) == (3, 192, 3 * nbytes)
        assert reused_by(engine, prompt_of(200, seed=4)) == 0
        assert [reused_by(engine, prompt) for prompt in (prompts[0], prompts[1])] == [192, 0]
        longer = prompts[1] + prompt_of(1, seed=9)
        assert reused_by(engine, longer) == 192
        assert engine.prompt_caches()["prompts"] <= 3  # the shorter one is part of the longer
    with MlxPrefillEngine(attrs.evolve(one, prompt_cache_bytes=0)) as engine:
        assert [reused_by(engine, prompts[0]) for _ in range(2)] == [0, 0]
        assert engine.facts()["nothing_reused_because"] == "--prompt-cache-bytes is 0"


def test_what_is_held_is_not_forgotten() -> None:
    def rows() -> list[dict[str, mx.array]]:
        return [{"k": mx.zeros((1, 1, 256, 64)), "v": mx.zeros((1, 1, 256, 0))}]

    one, two, three = (prompt_of(200, seed=seed) for seed in range(3))
    caches = PromptCaches(EngineOptions("x", prompt_cache_bytes=2 * 256 * 64 * 4))
    assert caches.hold(one) is None
    caches.keep(one, rows())
    held = caches.hold([*one, 5])
    assert held is not None
    assert held.tokens == 192
    for other in (two, three, [*one, 6, 7]):
        caches.keep(other, rows())
    assert caches.counts() == {"prompts": 2, "bytes": 2 * 256 * 64 * 4, "reused_tokens": 0}
    assert [caches.reusable([*prompt, 5]) for prompt in (one, two, three)] == [192, 0, 0]
    caches.keep(two, rows())
    for _ in range(2):  # a second release is not one of somebody else
        held.release()
    caches.keep(three, rows())
    assert [caches.reusable([*prompt, 5]) for prompt in (one, two, three)] == [0, 192, 192]


# ---- Through two nodes: what decode kept is asked for no more, whatever happens in between


@attrs.define(eq=False)
class Nodes:
    """Two nodes, and the conversations between them."""

    prefill: PrefillNode
    decode: DecodeNode
    engine: MlxDecodeEngine
    rooms: Iterator[int] = attrs.field(factory=itertools.count)

    def begin(self, prompt: list[int], count: int = 80) -> tuple[DecodeLeg, PrefillRequest, list[int]]:
        """Open decode's half and wait for its offer."""
        room, got = Room(next(self.rooms)), list[int]()
        where = Endpoint("127.0.0.1", int(self.prefill.info()["bootstrap_port"]))
        leg = self.decode.decode(DecodeRequest(room, tuple(prompt), where, count), lambda token: got.append(token.id))
        until(lambda: self.decode.statistics()["rooms"].get("waiting") or leg.done.done(), "the offer is out")
        return leg, PrefillRequest(room, tuple(prompt)), got

    def ask(self, prompt: list[int], count: int = 80) -> tuple[list[int], int, int, float]:
        """Ask both halves; gives the answer, the tokens not computed, those decode had, and the blocks it was sent."""
        before = self.decode.statistics()["prompt_caches"]["reused_tokens"]
        return self.finish(*self.begin(prompt, count), before=before)

    def finish(
        self, leg: DecodeLeg, request: PrefillRequest, got: list[int], *, before: int
    ) -> tuple[list[int], int, int, float]:
        works = self.prefill.prefill(request)
        works.done.result(PATIENCE_S)
        finished = leg.done.result(PATIENCE_S)
        model, options = self.engine.opened.model, self.engine.options
        wanted = self.engine.thread.call(lambda: single_process(model, request.tokens, leg.request.max_tokens, options))
        assert got == [token.id for token in wanted][: len(got)]
        assert finished.cached_tokens == works.cached_tokens
        kept = self.decode.statistics()["prompt_caches"]["reused_tokens"] - before
        return got, finished.cached_tokens, kept, leg.timings["transfer_mb"] * 1e6 / self.engine.layout.lcm_block_bytes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    chosen = EngineOptions(
        "tiny:llama", arena_bytes=16 << 20, prompt_cache_bytes=2 << 20
    )  # two sequences or four prompts
    engine = MlxDecodeEngine(chosen)
    prefill = PrefillNode(MlxPrefillEngine(chosen), PrefillConfig(bootstrap_port=0))
    decode = DecodeNode(engine, DecodeConfig())
    try:
        prefill.start()
        decode.start()
        until(lambda: prefill.ready, "prefill is registered")
        found = Nodes(prefill, decode, engine)
        found.ask([5], 2)  # opens what stays open until the end
        yield found
    finally:
        decode.close()
        prefill.close()


def test_the_second_turn_sends_and_computes_what_is_new(nodes: Nodes) -> None:
    first = prompt_of(150)
    answer, *counts = nodes.ask(first)
    assert counts == [0, 0, 5]  # 150 tokens in blocks of 32
    second = first + answer + prompt_of(30, seed=1)
    _, *counts = nodes.ask(second)
    assert counts == [128, 192, 9 - 6]  # 260 tokens, of which decode has the answer too
    assert nodes.prefill.statistics()["prompt_caches"]["reused_tokens"] == 128


def test_a_cancelled_room_gives_back_what_it_held(nodes: Nodes) -> None:
    first = prompt_of(200, seed=2)
    nodes.ask(first, 2)
    leg, _, _ = nodes.begin([*first, 5])
    assert nodes.engine.prompt_caches()["prompts"] >= 1
    leg.cancel("the client left")
    assert isinstance(leg.done.exception(PATIENCE_S), RoomFailed)
    assert nodes.ask([*first, 6])[1:] == (192, 192, 1)
    assert nodes.decode.statistics()["blocks"]["used_blocks"] == 0


def test_nothing_is_forgotten_under_a_room(nodes: Nodes) -> None:
    """Others take its place in the cache while it waits; on prefill they do take it."""
    first = prompt_of(200, seed=3)
    nodes.ask(first, 2)
    before = nodes.decode.statistics()["prompt_caches"]["reused_tokens"]
    room = nodes.begin([*first, 5])
    for seed in range(4, 9):
        nodes.ask(prompt_of(200, seed=seed), 2)
    assert nodes.finish(*room, before=before)[1:] == (0, 192, 1)
    for seed in range(9, 14):
        nodes.ask(prompt_of(200, seed=seed), 2)
    assert nodes.ask([*first, 6])[1:] == (0, 0, 7)
    assert nodes.engine.prompt_caches()["bytes"] <= nodes.engine.options.prompt_cache_bytes
