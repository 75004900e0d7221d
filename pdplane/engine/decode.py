"""The decode engine: pages in the arena and a first token in, tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs
import mlx.core as mx

from pdplane.engine.engine import Engine
from pdplane.engine.forward import Forward
from pdplane.engine.pages import Assembly, Blocks
from pdplane.engine.thread import Job, Turns
from pdplane.engine.views import Numbers, row_of
from pdplane.errors import ConfigError

FinishReason = Literal["stop", "length"]


@attrs.frozen(eq=False)
class Token:
    """A token id and its log-probability; `logprobs` is the whole row when it was asked for."""

    token: int
    logprob: float
    logprobs: Numbers | None = None


@attrs.frozen
class DecodeRequest:
    """A sequence whose prompt lies in the arena.

    `max_tokens` counts the first token, which prefill made; a token of `stop_ids` is reported and ends the sequence.
    `assembly` is what `DecodeEngine.assemble` gave for this prompt and these blocks; without one all is copied now.
    """

    prompt: tuple[int, ...]
    blocks: Blocks
    first_token: int
    first_logprob: float
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    keep_rows: bool = False
    assembly: Assembly | None = None
    key: int = 0
    """The job's name on all ranks of a split model."""


class DecodeEngine(Engine):
    """Continues sequences, one token a turn each, each alone in its batch: that keeps the bits of a single process."""

    def assemble(self, prompt_len: int, blocks: Blocks) -> Assembly:
        """Begin a sequence before its prompt's KV is whole; for `DecodeRequest.assembly`, or to be dropped.

        Raises ConfigError for a prompt or blocks that cannot work.
        """
        self.check_prompt_len(prompt_len)
        opened = self.opened
        opened.pages.check(blocks, self.blocks_needed(prompt_len))
        ahead_bytes = self.options.assemble_ahead_bytes
        return Assembly(self.thread, opened.pages, opened.layout, opened.leaves, blocks, prompt_len, ahead_bytes)

    def decode(
        self, request: DecodeRequest, on_token: Callable[[Token], None], on_assembled: Callable[[], None]
    ) -> Job[FinishReason]:
        """Report every token, the first one included, and end with the reason.

        Both callbacks run on the MLX thread; an exception from one fails the job. `on_assembled` is called once, when
        the arena's blocks are no longer needed. A job that failed or was cancelled needs them no longer either. Raises
        ConfigError at once for a request that cannot work.
        """
        self.check_prompt_len(len(request.prompt))
        self.check_token(request.first_token)
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {request.max_tokens}")
        self.opened.pages.check(request.blocks, self.blocks_needed(len(request.prompt)))
        mark = f"{len(request.prompt)} tokens, then {request.first_token}, {request.max_tokens} at most"
        return self.thread.share(lambda: self._turns(request, on_token, on_assembled), request.key, mark)

    def _turns(
        self, request: DecodeRequest, on_token: Callable[[Token], None], on_assembled: Callable[[], None]
    ) -> Turns[FinishReason]:
        on_token(Token(request.first_token, request.first_logprob))
        limit = self._limit(request)
        if request.first_token in request.stop_ids or limit == 1:
            if request.assembly is not None:
                request.assembly.drop()
            on_assembled()
            return "stop" if request.first_token in request.stop_ids else "length"
        forward = self._assemble(request)
        on_assembled()
        yield
        row = forward.step(mx.array(request.first_token))
        for count in range(2, limit + 1):
            # The next step is queued before this one's token is read, as mlx-lm does: the device never waits for us.
            ahead = forward.step(row.token) if count < limit else row
            token, logprob = row.wait()
            on_token(Token(token, logprob, row_of(row.logprobs) if request.keep_rows else None))
            if token in request.stop_ids:
                return "stop"
            row = ahead
            yield
        return "length"

    def _limit(self, request: DecodeRequest) -> int:
        """Tokens that the sequence may have: the last one is never run, so the context may be passed by one."""
        context = self.context_length
        return request.max_tokens if context is None else min(request.max_tokens, context - len(request.prompt) + 1)

    def _assemble(self, request: DecodeRequest) -> Forward:
        assembly = request.assembly or self.assemble(len(request.prompt), request.blocks)
        forward = Forward(self.opened.model, self.options)
        forward.prepare(self.opened.leaves)
        assembly.finish(forward.caches)
        return forward
