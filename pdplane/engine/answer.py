"""One sequence of a decode engine: its tokens as they go out, and its caches when they are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from pdplane.api import EngineDecodeRequest, FinishReason, Token
from pdplane.engine.forward import Forward
from pdplane.engine.sampling import Sampler


@attrs.define(eq=False)
class Answer:
    """Lives on the MLX thread. What a callback raises ends the sequence.

    `limit` is how many tokens there may be, the first one included; `kept` as in `Sampler`.
    """

    request: EngineDecodeRequest
    limit: int
    on_token: Callable[[Token], None]
    on_assembled: Callable[[], None]
    assemble: Callable[[], Forward]
    kept: Sequence[int] = ()
    keep_rows: bool = False
    tokens: list[int] = attrs.field(factory=list, init=False)

    @property
    def missing(self) -> int:
        """Tokens that may still come."""
        return self.limit - len(self.tokens)

    @property
    def rows(self) -> int:
        """Tokens whose keys and values the caches hold, but for one that is under way."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def begin(self) -> FinishReason | None:
        """Report the first token; return the reason when it is the last, and then no cache is made."""
        reason = self.add(self.request.first)
        if reason is not None:
            if self.request.assembly is not None:
                self.request.assembly.drop()
            self.on_assembled()
        return reason

    def resume(self) -> tuple[Forward, Sampler]:
        """Return the caches of the whole prompt, and what chooses the second token."""
        forward = self.assemble()
        self.on_assembled()
        sampler = Sampler(self.request.sampling, self.request.prompt, self.kept)
        sampler.skip()
        return forward, sampler

    def add(self, token: Token) -> FinishReason | None:
        """Report the next token; return the reason when it is the last."""
        self.tokens.append(token.id)
        self.on_token(token)
        if token.id in self.request.stop_ids:
            return "stop"
        return None if self.missing > 0 else "length"
