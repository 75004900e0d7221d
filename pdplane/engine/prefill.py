"""The prefill engine: a prompt in, pages in the arena and the first token out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from pdplane.api import GREEDY, OnReused, Sampling, Token
from pdplane.engine.caches import Leaf
from pdplane.engine.engine import MlxEngine
from pdplane.engine.forward import Forward, count_chunks
from pdplane.engine.layout import carried
from pdplane.engine.model import Prepare
from pdplane.engine.options import EngineOptions, Progress, no_progress
from pdplane.engine.pages import Blocks
from pdplane.engine.prompts import WHY_WHOLE, PromptCaches, PromptLine
from pdplane.engine.ranks import RankGroup
from pdplane.engine.sampling import Sampler
from pdplane.engine.tap import OnStep, Tap
from pdplane.engine.thread import Job, Turns
from pdplane.engine.untyped import Cache

SHORT_END = 128
"""Tokens; for more the output layer, which is computed for each of them, costs more than it saves."""


def _ignore(_tokens: int) -> None:
    """Take no notice."""


class MlxPrefillEngine(MlxEngine):
    """Computes prompts one chunk a turn, in the order of a `PromptLine`."""

    def __init__(self, options: EngineOptions, prepare: Prepare | None = None, group: RankGroup | None = None) -> None:
        super().__init__(options, prepare, group)
        self._line: PromptLine[Job[Any]] = PromptLine()
        self._caches: PromptCaches | None = None

    def start(self, progress: Progress = no_progress) -> None:
        super().start(progress)
        # Ranks could keep different prompts, and a cache without a row for each token cannot be cut.
        if self._caches is None and self._group is None and all(leaf.cache_class is KVCache for leaf in self._leaves):
            self._caches = PromptCaches(self.options)

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Blocks,
        on_step: OnStep,
        key: int = 0,
        sampling: Sampling = GREEDY,
        on_reused: OnReused = _ignore,
        *,
        keep_row: bool = False,
    ) -> Job[Token]:
        """Compute a prompt into `blocks`, which hold `blocks_needed(len(tokens))` ids of each group in slot order.

        `on_step(steps, chunk)` is called on the MLX thread when the pages that these tokens complete are in the arena,
        in the fields of those layout steps: each (step, token) once, in the tokens' order, all of them before the job
        ends well. An exception from it fails the job. Before the first chunk `on_reused` gets the number of tokens that
        come from the cache of another prompt. `key` is the job's name on all ranks of a split model. With
        `keep_row` the token is a `RowToken`. Raises ConfigError at once for what cannot work.
        """
        prompt = tuple(tokens)
        self.check_prompt_len(len(prompt))
        for token in {min(prompt), max(prompt)}:
            self.check_token(token)
        self.check_sampling(sampling)
        self.opened.pages.check(blocks, self.blocks_needed(len(prompt)))
        owned = {group_id: tuple(ids) for group_id, ids in blocks.items()}
        return self.thread.share(
            lambda: self._turns(prompt, owned, on_step, sampling, on_reused, keep_row=keep_row),
            key,
            f"{len(prompt)} tokens, {sampling}",
            self._line,
            self._count_chunks(len(prompt) - (self._caches.reusable(prompt) if self._caches else 0)),
        )

    def _turns(
        self,
        prompt: tuple[int, ...],
        blocks: Blocks,
        on_step: OnStep,
        sampling: Sampling,
        on_reused: OnReused,
        *,
        keep_row: bool,
    ) -> Turns[Token]:
        forward = Forward(self.opened.model, self.options)
        reused = self._reuse(prompt, forward.caches)
        on_reused(reused)
        tap = Tap(self._leaves_by_step(), self.opened.pages, blocks, on_step, self.options, len(prompt))
        tap.attach(forward.caches, self._count_chunks(len(prompt) - reused))
        if reused:  # its pages can leave at once
            tap.begin(reused)
            tap.end(forward.caches)
        chunks, done = forward.prefill_chunks(prompt, tap.begin, reused), reused
        while done < len(prompt) - 1 and not self._ends_at_once(len(prompt) - done, reused):
            done = next(chunks)
            tap.end(forward.caches)
            if done < len(prompt) - 1:
                yield
        row = forward.step(mx.array(prompt[done:]), Sampler(sampling, prompt, self.kept))
        token = row.read(keep_row=keep_row)
        tap.finish(forward.caches)
        if self._caches:
            self._caches.keep(prompt, [leaf.kind.take(leaf.find(forward.caches)) for leaf in self._leaves])
        return token

    def _ends_at_once(self, rest: int, reused: int) -> bool:
        """Say whether so many last tokens are computed in one step: a short end, while others wait or after a reuse.

        mlx-lm computes the last token by itself, which reads all weights once more; the bits of the two ways differ as
        those of pieces do. A model with windows or states has more to do at the chunk's end.
        """
        return (
            rest <= SHORT_END
            and (reused or len(self._line)) > 0
            and self._caches is not None  # so that all layers have plain rows
            and not self.options.exact
        )

    def _reuse(self, prompt: Sequence[int], caches: list[Cache]) -> int:
        """Give fresh caches the beginning of the prompt, if it is kept; return how many tokens that is."""
        prefix = self._caches.hold(prompt) if self._caches else None
        if prefix is None:
            return 0
        for leaf, tensors in zip(self._leaves, prefix.rows, strict=True):  # shared until one side grows
            cut = {name: array[..., : prefix.tokens, :] for name, array in tensors.items()}
            leaf.kind.give(leaf.find(caches), cut, prefix.tokens)
        prefix.count()
        prefix.release()
        return prefix.tokens

    @property
    def _leaves(self) -> Sequence[Leaf]:
        return self.opened.leaves

    def facts(self) -> Mapping[str, str | int | None]:
        why = self._caches.why_none() if self._caches else WHY_WHOLE
        return {**super().facts(), "nothing_reused_because": why}

    def prompt_caches(self) -> dict[str, int]:
        """Return what is kept of prompts, and how many tokens were reused so far."""
        return self._caches.counts() if self._caches else {}

    def _count_chunks(self, tokens: int) -> int:
        return count_chunks(tokens, self.options.prefill_step_size)

    def _leaves_by_step(self) -> list[tuple[int, Leaf]]:
        """Return all leaves that have bytes with their layout steps, ascending."""
        order = {name: number for number, step in enumerate(self.layout.steps) for name in step}
        leaves = [leaf for leaf in self.opened.leaves if carried(leaf)]
        return sorted(
            ((order[self.opened.pages.first_field(leaf)], leaf) for leaf in leaves), key=lambda found: found[0]
        )
