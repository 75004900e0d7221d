"""The prefill engine: a prompt in, pages in the arena and the first token out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx

from pdplane.engine.caches import Leaf
from pdplane.engine.engine import Engine
from pdplane.engine.forward import Forward
from pdplane.engine.layout import carried
from pdplane.engine.pages import Blocks
from pdplane.engine.thread import Job, Turns
from pdplane.engine.views import Numbers, row_of


@attrs.frozen(eq=False)
class FirstToken:
    """The token after the prompt and its log-probability; `logprobs` is the whole row when it was asked for."""

    token: int
    logprob: float
    logprobs: Numbers | None = None


class PrefillEngine(Engine):
    """Computes prompts one chunk a turn, so that a cancelled or a short prompt waits for one chunk at most."""

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Blocks,
        on_step: Callable[[range], None],
        *,
        keep_row: bool = False,
    ) -> Job[FirstToken]:
        """Compute a prompt into `blocks`, which hold `blocks_needed(len(tokens))` ids of each group in slot order.

        `on_step(steps)` is called on the MLX thread when the pages of those layout steps are in the arena: ascending,
        each step once, all of them before the job ends well. An exception from it fails the job. Raises ConfigError at
        once for a prompt or blocks that cannot work.
        """
        prompt = tuple(tokens)
        self.check_prompt_len(len(prompt))
        for token in {min(prompt), max(prompt)}:
            self.check_token(token)
        self.opened.pages.check(blocks, self.blocks_needed(len(prompt)))
        owned = {group_id: tuple(ids) for group_id, ids in blocks.items()}
        return self.thread.submit(lambda: self._turns(prompt, owned, on_step, keep_row=keep_row))

    def _turns(
        self, prompt: tuple[int, ...], blocks: Blocks, on_step: Callable[[range], None], *, keep_row: bool
    ) -> Turns[FirstToken]:
        forward = Forward(self.opened.model, self.options)
        for _ in forward.prefill_chunks(prompt):
            yield
        row = forward.step(mx.array(prompt[-1]))
        token, logprob = row.wait()
        forward.settle()
        yield  # a cancelled job writes no page
        for leaf in self._leaves_in_step_order():
            self.opened.pages.cut(leaf, leaf.find(forward.caches), blocks, len(prompt))
        on_step(range(len(self.layout.steps)))
        return FirstToken(token, logprob, row_of(row.logprobs) if keep_row else None)

    def _leaves_in_step_order(self) -> list[Leaf]:
        order = {name: number for number, step in enumerate(self.layout.steps) for name in step}
        leaves = [leaf for leaf in self.opened.leaves if carried(leaf)]
        return sorted(leaves, key=lambda leaf: order[self.opened.pages.first_field(leaf)])
