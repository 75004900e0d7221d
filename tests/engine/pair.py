"""A prefill and a decode engine in one process, with their arenas joined by the planned copies."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np

from pdplane.api import GREEDY, EngineDecodeRequest, FinishReason, Sampling, Token
from pdplane.engine.decode import MlxDecodeEngine
from pdplane.engine.model import Prepare
from pdplane.engine.options import EngineOptions
from pdplane.engine.pages import Assembly, Blocks
from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.reference import single_process
from pdplane.engine.sampling import RowToken
from pdplane.ids import Rank
from pdplane.kv.arena import Pool
from pdplane.kv.copies import Copies, plan_block_copies, plan_route, window_runs
from pdplane.kv.manifest import blocks_behind, build_manifest, chunk_blocks

BLOCK_TOKENS = 8
STEP_SIZE = 24
GARBAGE = 0xFF  # NaN in every float type: a byte that is read by mistake shows


@attrs.frozen
class Run:
    """One disaggregated sequence."""

    tokens: tuple[Token, ...]
    reason: FinishReason
    kept: int = 0
    """How many of the prompt's tokens decode had already, and was not sent."""


class Pair:
    """Two started engines; each has its own MLX thread and its own weights, as in two processes."""

    def __init__(self, options: EngineOptions, prepare: Prepare | None = None) -> None:
        self.options = options
        self.prefill = MlxPrefillEngine(options, prepare)
        self.decode = MlxDecodeEngine(options, prepare)
        self.prefill.start()
        self.decode.start()
        self.parts: list[tuple[range, range]] = []
        """What the last prompt was told in: (steps, tokens)."""
        self._pools = Pool(self.prefill.layout), Pool(self.decode.layout)

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()

    def run(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        sampling: Sampling = GREEDY,
    ) -> Run:
        """Prefill, move, decode; blocks are scattered, full of garbage before, and garbage again once assembled."""
        prefix = self.decode.hold(prompt)
        kept = prefix.tokens if prefix else 0
        with self._blocks(0, len(prompt), 0) as ours, self._blocks(1, len(prompt), kept) as theirs:
            self.prefill.arena.bytes.fill(GARBAGE)
            self.decode.arena.bytes.fill(GARBAGE)
            assembly = self.decode.assemble(len(prompt), theirs, prefix)
            first = self.stream(prompt, ours, theirs, assembly, sampling, kept)
            request = EngineDecodeRequest(
                tuple(prompt), theirs, first, max_tokens, stop_ids, sampling, assembly, prefix
            )
            return attrs.evolve(self.finish(request), kept=kept)

    def stream(
        self,
        prompt: Sequence[int],
        ours: Blocks,
        theirs: Blocks,
        assembly: Assembly,
        sampling: Sampling = GREEDY,
        kept: int = 0,
    ) -> Token:
        """Prefill, and move what is told at the moment when it is told; each byte must be told once."""
        landed = np.zeros(self.decode.arena.nbytes, np.uint8)

        def on_step(steps: range, chunk: range) -> None:
            self.parts.append((steps, chunk))
            copies = self._plan(ours, theirs, range(kept, len(prompt)), steps, chunk)
            self._copy(copies)
            assembly.landed(copies.destination, copies.length)
            for target, length in zip(copies.destination, copies.length, strict=True):
                landed[target : target + length] += 1

        self.parts = []
        first = self.prefill.prefill(prompt, ours, on_step, sampling=sampling, keep_row=True).result(60)
        manifest = build_manifest(self.decode.layout, theirs, kept, len(prompt))
        expected = np.zeros(self.decode.arena.nbytes, np.uint8)
        for start, length in zip(*window_runs(self.decode.layout, manifest), strict=True):
            expected[start : start + length] = 1
        assert np.array_equal(landed, expected)
        return first

    def move(self, ours: Blocks, theirs: Blocks, prompt_len: int) -> None:
        """Copy the pages between the arenas, the way a transport is told to."""
        self._copy(
            self._plan(ours, theirs, range(prompt_len), range(len(self.prefill.layout.steps)), range(prompt_len))
        )

    def _plan(self, ours: Blocks, theirs: Blocks, wanted: range, steps: range, chunk: range) -> Copies:
        zero, source, target = Rank(0), self.prefill.layout, self.decode.layout
        route = plan_route(source, target, 1, zero, 1, zero)
        assert route is not None
        fields = {field for step in steps for field in source.steps[step]}
        behind = blocks_behind(source, ours, wanted.start, wanted.stop)
        from_, to = (chunk_blocks(target, blocks, wanted.start, wanted.stop, chunk) for blocks in (behind, theirs))
        return plan_block_copies(route, source, from_, target, to, fields)

    def _copy(self, copies: Copies) -> None:
        for source, target, length in zip(copies.source, copies.destination, copies.length, strict=True):
            self.decode.arena.bytes[target : target + length] = self.prefill.arena.bytes[source : source + length]

    def finish(self, request: EngineDecodeRequest) -> Run:
        tokens: list[Token] = []
        assembled: list[None] = []

        def on_assembled() -> None:
            assembled.append(None)
            if request.prefix is not None:
                request.prefix.release()
            self.decode.arena.bytes.fill(GARBAGE)  # the blocks have other owners now

        reason = self.decode.decode(request, tokens.append, on_assembled, keep_rows=True).result(60)
        assert len(assembled) == 1
        assert tokens[0] is request.first
        return Run(tuple(tokens), reason)

    def reference(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop_ids: frozenset[int] = frozenset(),
        sampling: Sampling = GREEDY,
    ) -> list[RowToken]:
        """The same by mlx-lm alone, with the decode engine's weights."""
        model, kept = self.decode.opened.model, self.decode.kept
        return self.decode.thread.call(
            lambda: single_process(
                model, prompt, max_tokens, self.options, stop_ids=stop_ids, sampling=sampling, kept=kept
            )
        )

    def check(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling = GREEDY) -> None:
        """Assert that ids and whole rows of log-probabilities are equal, bit for bit."""
        got = self.run(prompt, max_tokens, sampling=sampling).tokens
        wanted = self.reference(prompt, max_tokens, sampling=sampling)
        assert [token.id for token in got] == [token.id for token in wanted]
        for place, (ours, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert ours.logprob == theirs.logprob, f"log-probability of token {place}"
            assert isinstance(ours, RowToken)
            assert np.array_equal(ours.row.view(np.uint32), theirs.row.view(np.uint32)), f"row {place}"

    @contextmanager
    def _blocks(self, side: int, prompt_len: int, kept: int) -> Iterator[Blocks]:
        pool = self._pools[side]
        blocks = pool.allocate(self.prefill.blocks_needed(prompt_len, kept))
        order = random.Random(side)
        yield {group_id: tuple(order.sample(ids, len(ids))) for group_id, ids in blocks.items()}
        pool.release(blocks)


def options(model: str, **changes: int | str | None) -> EngineOptions:
    """Small chunks, small blocks and a small arena, so that short prompts cover every border."""
    small = EngineOptions(
        model,
        prefill_step_size=STEP_SIZE,
        block_tokens=BLOCK_TOKENS,
        arena_bytes=2 << 20,
        assemble_ahead_bytes=1,
        exact=True,
    )
    return attrs.evolve(small, **changes)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    order = random.Random(seed)
    return [order.randrange(2, 300) for _ in range(length)]
