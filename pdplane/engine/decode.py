"""The decode engine: pages in the arena and a first token in, tokens out."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from pdplane.api import EngineDecodeRequest, FinishReason, Token
from pdplane.engine.answer import Answer
from pdplane.engine.engine import MlxEngine
from pdplane.engine.forward import Forward
from pdplane.engine.pages import Assembly, Blocks
from pdplane.engine.sampling import Row, Sampler
from pdplane.engine.thread import Job, Turns
from pdplane.errors import ConfigError, InternalError


class MlxDecodeEngine(MlxEngine):
    """Continues sequences, one token a turn each, each alone in its batch: that keeps the bits of a single process."""

    def assemble(self, prompt_len: int, blocks: Blocks) -> Assembly:
        """Begin a sequence before its prompt's KV is whole; for `EngineDecodeRequest.assembly`, or to be dropped.

        Raises ConfigError for a prompt or blocks that cannot work.
        """
        self.check_prompt_len(prompt_len)
        opened = self.opened
        opened.pages.check(blocks, self.blocks_needed(prompt_len))
        ahead_bytes = self.options.assemble_ahead_bytes
        return Assembly(self.thread, opened.pages, opened.layout, opened.leaves, blocks, prompt_len, ahead_bytes)

    def decode(
        self,
        request: EngineDecodeRequest,
        on_token: Callable[[Token], None],
        on_assembled: Callable[[], None],
        *,
        keep_rows: bool = False,
    ) -> Job[FinishReason]:
        """Report every token, the first one included, and end with the reason.

        Both callbacks run on the MLX thread; an exception from one fails the job. `on_assembled` is called once, when
        the arena's blocks are no longer needed. A job that failed or was cancelled needs them no longer either. With
        `keep_rows` the tokens but the first are `RowToken`. Raises ConfigError at once for a request that cannot work.
        """
        self.check_prompt_len(len(request.prompt))
        self.check_sampling(request.sampling)
        self.check_token(request.first.id)
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {request.max_tokens}")
        self.opened.pages.check(request.blocks, self.blocks_needed(len(request.prompt)))
        answer = Answer(
            request, self._limit(request), on_token, on_assembled, lambda: self._assemble(request), self.kept, keep_rows
        )
        mark = (
            f"{len(request.prompt)} tokens, then {request.first.id}, {request.max_tokens} at most, {request.sampling}"
        )
        return self.thread.share(lambda: _turns(answer), request.key, mark)

    def _limit(self, request: EngineDecodeRequest) -> int:
        """Tokens that the sequence may have: the last one is never run, so the context may be passed by one."""
        context = self.context_length
        return request.max_tokens if context is None else min(request.max_tokens, context - len(request.prompt) + 1)

    def _assemble(self, request: EngineDecodeRequest) -> Forward:
        assembly = request.assembly or self.assemble(len(request.prompt), request.blocks)
        if not isinstance(assembly, Assembly):
            raise InternalError(f"a {type(assembly).__name__} is of another engine")
        forward = Forward(self.opened.model, self.options)
        forward.prepare(self.opened.leaves)
        assembly.finish(forward.caches)
        return forward


def _turns(answer: Answer) -> Turns[FinishReason]:
    """One sequence by itself, a token a turn."""
    reason = answer.begin()
    if reason is not None:
        return reason
    forward, sampler = answer.resume()
    yield
    row = _step(forward, sampler, mx.array(answer.request.first.id))
    while True:
        # The next step is queued before this one's token is read, as mlx-lm does: the device never waits for us.
        ahead = _step(forward, sampler, row.token) if answer.missing > 1 else None
        reason = answer.add(row.read(keep_row=answer.keep_rows))
        if reason is not None or ahead is None:
            return reason or "length"
        row = ahead
        yield


def _step(forward: Forward, sampler: Sampler, token: mx.array) -> Row:
    sampler.follow(token)
    return forward.step(token, sampler)
