"""The answer of one leg as it grows, in the shape of sglang's /generate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pdplane.api import Finished, Token, Tokenizer
from pdplane.serving.generate_request import GenerateRequest
from pdplane.serving.stop_text import StopText


class Answer:
    """Tokens, logprobs and text so far. Stop tokens count as tokens and add no text."""

    def __init__(self, asked: GenerateRequest, prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self.prompt_tokens = prompt_tokens
        self._detokenizer = tokenizer.detokenizer()
        self._silent = asked.stop_ids if asked.ignore_eos else asked.stop_ids | tokenizer.eos_ids
        self._stop_text = StopText(asked.stop)
        self.began = time.monotonic()
        self._text = ""
        self._finished: Finished | None = None
        self.ids: list[int] = []
        self._logprobs: list[list[float | int | None]] = []
        self.first_token_s: float | None = None

    @property
    def is_stopped(self) -> bool:
        """A stop string was found: the answer is over, whatever the node still sends."""
        return self._stop_text.matched is not None

    def add(self, tokens: Iterable[Token]) -> None:
        """Take tokens up to the one that completes a stop string."""
        for token in tokens:
            if self.is_stopped:
                return
            if self.first_token_s is None:
                self.first_token_s = time.monotonic() - self.began
            self.ids.append(token.id)
            # JSON has no infinities and no NaN.
            self._logprobs.append([token.logprob if math.isfinite(token.logprob) else None, token.id, None])
            if token.id not in self._silent:
                self._text += self._stop_text.feed(self._detokenizer.add(token.id))

    def finish(self, finished: Finished) -> None:
        """Take the node's word on how it ended; what was held back is shown."""
        self._finished = finished
        self._text += self._stop_text.feed(self._detokenizer.finish())
        self._text += self._stop_text.flush()

    def body(self) -> dict[str, Any]:
        """The JSON so far; `finish_reason` is null until the end."""
        meta: dict[str, Any] = {
            "id": self._asked.request_id,
            "finish_reason": self._finish_reason(),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": 0 if self._finished is None else self._finished.cached_tokens,
            "e2e_latency": time.monotonic() - self.began,
            "pdplane": self._timings(),
        }
        if self._asked.return_logprob:
            meta["output_token_logprobs"] = list(self._logprobs)
        return {"text": self._text, "output_ids": list(self.ids), "meta_info": meta}

    def _finish_reason(self) -> dict[str, Any] | None:
        if self.is_stopped:
            return {"type": "stop", "matched": self._stop_text.matched}
        if self._finished is None:
            return None
        if self._finished.reason == "length":
            return {"type": "length", "length": len(self.ids)}
        return {"type": "stop", "matched": self.ids[-1] if self.ids else None}

    def _timings(self) -> Mapping[str, float]:
        ours = {} if self.first_token_s is None else {"first_token_ms": 1000 * self.first_token_s}
        return ours if self._finished is None else {**ours, **self._finished.timings}
