"""Choosing tokens: mlx-lm's biases, penalties and bounds, and a draw with a key of the sequence's own.

mlx-lm draws with one global state, which cannot be set for a sequence among others. Here every sequence has a key; it
is split once for each draw, exactly as that state is, so that a seed gives the tokens of one mlx-lm process whoever
else is running. Prefill makes the first draw and decode skips it.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc, make_logits_processors

from pdplane.api import Sampling, Token, TopLogprobs
from pdplane.engine.untyped import Processor, number, numbers_in, uncompiled
from pdplane.engine.views import Numbers, row_of


@attrs.frozen(eq=False, kw_only=True)
class RowToken(Token):
    """A token with the log-probabilities of the whole vocabulary."""

    row: Numbers


@attrs.frozen(eq=False)
class Row:
    """One step's outcome for one sequence, perhaps not computed yet.

    `token` and `logprob` have one element each, `logprobs` one for each token of the vocabulary, after biases and
    penalties. `top` are ids and log-probabilities of the likeliest tokens, in any order.
    """

    token: mx.array
    logprob: mx.array
    logprobs: mx.array
    top: tuple[mx.array, mx.array] | None = None

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """What `read` needs."""
        return (self.token, self.logprob, *(self.top or ()))

    def read(self, *, keep_row: bool = False) -> Token:
        """Wait until the token is computed and return it, as a `RowToken` when the row is to be kept."""
        token, logprob = int(number(self.token)), float(number(self.logprob))
        if keep_row:
            return RowToken(id=token, logprob=logprob, top=self._likeliest(), row=row_of(self.logprobs))
        return Token(id=token, logprob=logprob, top=self._likeliest())

    def _likeliest(self) -> TopLogprobs:
        """Return the likeliest tokens, the likeliest first, equal ones by id."""
        if self.top is None:
            return ()
        ids, values = (numbers_in(array) for array in self.top)
        # A bias may exclude a token: its log-probability is no number that JSON knows.
        found = [(int(token), value) for token, value in zip(ids, values, strict=True) if math.isfinite(value)]
        return tuple(sorted(found, key=lambda one: (-one[1], one[0])))


class Sampler:
    """Chooses one sequence's tokens. Lives on the MLX thread.

    `history` is what the penalties have to know so far; `kept` are tokens that XTC never takes away.
    """

    def __init__(self, sampling: Sampling, history: Sequence[int] = (), kept: Sequence[int] = ()) -> None:
        self._sampling, self._kept = sampling, list(kept)
        self._processors = _processors(sampling)
        self._window = _window(sampling)
        remembered = history[-self._window :] if self._window else history
        self._history = mx.array(list(remembered) if self._processors else [], dtype=mx.int32)
        self._key = mx.random.key(secrets.randbits(64) if sampling.seed is None else sampling.seed)

    @property
    def is_plain(self) -> bool:
        """The choice is the likeliest token of the logits as they are."""
        return not self._processors and self._sampling.temperature == 0

    def follow(self, token: mx.array) -> None:
        """Append this token, an array of one element, to the sequence."""
        if self._processors:
            history = mx.concatenate([self._history, token.reshape(1).astype(mx.int32)])
            self._history = history[-self._window :] if self._window else history

    def skip(self) -> None:
        """Leave out one choice, which another process has made."""
        if self._sampling.temperature > 0:
            for _ in range(1 + (self._sampling.xtc_probability > 0)):
                self._next_key()

    def choose(self, logits: mx.array, agree: Callable[[mx.array], mx.array] = lambda token: token) -> Row:
        """Return the next token for logits of shape (1, vocabulary); `agree` makes it the same on all ranks."""
        for process in self._processors:
            logits = process(self._history, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self.row(agree(self._draw(logprobs)), logprobs.squeeze(0))

    def row(self, token: mx.array, logprobs: mx.array) -> Row:
        """Return the outcome when `token` was chosen from `logprobs`, one for each token of the vocabulary."""
        logprob = logprobs[token.reshape(1)]
        count = min(self._sampling.top_logprobs, logprobs.shape[-1])
        if count < 1:
            return Row(token, logprob, logprobs)
        ids = mx.argpartition(-logprobs, kth=count - 1)[:count]
        return Row(token, logprob, logprobs, (ids, logprobs[ids]))

    def _draw(self, logprobs: mx.array) -> mx.array:
        asked = self._sampling
        if asked.temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        with uncompiled():
            bounded = self._bounded(logprobs)
        return mx.random.categorical(bounded * (1.0 / asked.temperature), key=self._next_key())

    def _bounded(self, logprobs: mx.array) -> mx.array:
        """Apply the bounds of sampling in mlx-lm's order, and return the logprobs."""
        asked = self._sampling
        if 0 < asked.top_p < 1:
            logprobs = apply_top_p(logprobs, asked.top_p)
        if asked.min_p > 0:
            logprobs = apply_min_p(logprobs, asked.min_p)
        if asked.xtc_probability > 0:
            # With probability 1 mlx-lm's own draw, from the global state, decides nothing.
            without = apply_xtc(logprobs, 1.0, asked.xtc_threshold, self._kept)
            spared = mx.random.uniform(0, 1, key=self._next_key()) > asked.xtc_probability
            logprobs = mx.where(spared, logprobs, without)
        if 0 < asked.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, asked.top_k)
        return logprobs

    def _next_key(self) -> mx.array:
        self._key, drawn = mx.random.split(self._key)
        return drawn


def _processors(asked: Sampling) -> list[Processor]:
    made: list[Processor] = make_logits_processors(
        dict(asked.logit_bias),
        None if asked.repetition_penalty == 1 else asked.repetition_penalty,
        asked.repetition_context_size,
        asked.presence_penalty,
        asked.presence_context_size,
        asked.frequency_penalty,
        asked.frequency_context_size,
    )
    return made


def _window(asked: Sampling) -> int:
    """Return how many tokens of history the penalties can see; 0: all."""
    sizes = [
        size
        for size, penalty, neutral in [
            (asked.repetition_context_size, asked.repetition_penalty, (0, 1)),
            (asked.presence_context_size, asked.presence_penalty, (0,)),
            (asked.frequency_context_size, asked.frequency_penalty, (0,)),
        ]
        if penalty not in neutral
    ]
    return 0 if 0 in sizes else max(sizes, default=1)
