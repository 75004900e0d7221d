"""Prompts: whose chunk is computed next on prefill, and what sequences that begin alike have in common."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import mlx.core as mx
import numpy as np

from pdplane.engine.blas import blas_in_use
from pdplane.engine.caches import Tensors
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import evaluate_later
from pdplane.engine.views import Numbers

MAX_OVERTAKES = 8


class Cancellable(Protocol):
    """What the line needs of a prompt's job."""

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, so that its next turn ends it and costs nothing."""


P = TypeVar("P", bound=Cancellable)


class PromptLine(Generic[P]):
    """The prompts that wait for a turn. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.is_served = False
        """Whether a turn that takes the next prompt is queued or under way; set by the owner."""
        self._short: deque[P] = deque()
        self._long: deque[P] = deque()
        self._overtakes = 0

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def add(self, prompt: P, chunks: int) -> None:
        """Put a new prompt of that many chunks in its place."""
        (self._long if chunks > 1 else self._short).append(prompt)

    def take(self) -> P | None:
        """Take out and return the prompt that has the next turn; None when none waits."""
        for waiting in (self._short, self._long):
            for prompt in waiting:
                if prompt.cancelled:
                    waiting.remove(prompt)
                    return prompt
        if self._short and (not self._long or self._overtakes < MAX_OVERTAKES):
            self._overtakes += 1
            return self._short.popleft()
        self._overtakes = 0
        return self._long.popleft() if self._long else None

    def resume(self, prompt: P) -> None:
        """Put the prompt that had the last turn back: it is the first of the long ones."""
        self._long.appendleft(prompt)


# ---- What is kept of sequences, for prompts that begin alike
#
# Prefill keeps the prompts that it has computed, decode its sequences with their answers. A prompt is cut where its
# common beginning with a kept sequence ends, at a multiple of `CUT_TOKENS`: the rows before the cut are taken as they
# are, and the rest is computed (on prefill) or sent (to decode). Only caches that hold a row for each token can be cut.
#
# Under `exact` nothing is reused but on a CPU with the reference BLAS, in pieces of `CUT_TOKENS` or more: what else
# multiplies matrices picks its kernels by their size, so the last bits of a piece differ from those of the whole. An
# answer's rows, which were computed one by one, are never kept then.


CUT_TOKENS = 64
WHY_WHOLE = "the model is split over ranks, or its caches have no row for each token"


@attrs.define(eq=False)
class _Kept:
    """One sequence: its tokens, and each history's tensors, which may have rows beyond them; nobody changes these."""

    tokens: Numbers
    rows: Sequence[Tensors]
    nbytes: int
    holds: int = 0


@attrs.define(eq=False)
class Prefix:
    """The first `tokens` of a prompt, of a kept sequence that stays kept until `release`. Any thread may hold it."""

    tokens: int
    _owner: PromptCaches
    _kept: _Kept
    _is_released: bool = False

    @property
    def rows(self) -> Sequence[Tensors]:
        """Each history's tensors, with rows beyond the prefix. For the MLX thread."""
        return self._kept.rows

    def count(self) -> None:
        """Count its tokens as reused."""
        self._owner.count(self.tokens)

    def release(self) -> None:
        """Hold it no longer; idempotent."""
        self._is_released, was_released = True, self._is_released
        if not was_released:
            self._owner.release(self._kept)


class PromptCaches:
    """Kept sequences, bounded in bytes; the one that was used least recently and is not held goes first.

    `step` is where a prompt may be cut. `keep` is for the MLX thread, the rest for any.
    """

    def __init__(self, options: EngineOptions, step: int = CUT_TOKENS) -> None:
        self._options, self._step = options, step
        self._lock = threading.RLock()
        self._kept: OrderedDict[_Kept, None] = OrderedDict()
        self._alike: defaultdict[bytes, list[_Kept]] = defaultdict(list)  # by their first tokens, up to the first cut
        self._nbytes = self._reused_tokens = 0

    def counts(self) -> dict[str, int]:
        """Return how many sequences are kept, their bytes, and how many tokens were reused so far."""
        with self._lock:
            return {"prompts": len(self._kept), "bytes": self._nbytes, "reused_tokens": self._reused_tokens}

    def reusable(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of the prompt are kept and may be reused."""
        with self._lock:
            return self._find(_numbers(prompt))[1]

    def hold(self, prompt: Sequence[int]) -> Prefix | None:
        """Return the longest kept beginning of the prompt, without its last token; None when none is kept."""
        with self._lock:
            kept, length = self._find(_numbers(prompt))
            if kept is None:
                return None
            self._kept.move_to_end(kept)
            kept.holds += 1
            return Prefix(length, self, kept)

    def release(self, kept: _Kept) -> None:
        """End one hold."""
        with self._lock:
            kept.holds -= 1
            self._evict()

    def count(self, tokens: int) -> None:
        """Count tokens as reused."""
        with self._lock:
            self._reused_tokens += tokens

    def why_none(self) -> str | None:
        """Say why nothing is ever reused; None when something may be."""
        if self._options.prompt_cache_bytes == 0:
            return "--prompt-cache-bytes is 0"
        if self._options.exact and not _any_piece_has_its_bits():
            return (
                "bits come before speed (--exact), and with this BLAS those of a piece differ from those of the whole"
            )
        return None

    def wants(self, length: int) -> bool:
        """Return whether a sequence of so many tokens could be of use to others."""
        return length >= self._step and self.why_none() is None

    def keep(self, tokens: Sequence[int], rows: Sequence[Tensors]) -> None:
        """Keep the rows of a sequence's histories, which nobody changes any more."""
        nbytes = sum(array.nbytes for tensors in rows for array in tensors.values())
        if not self.wants(len(tokens)) or nbytes > self._options.prompt_cache_bytes:
            return
        kept = _Kept(_numbers(tokens), rows, nbytes)
        with self._lock:
            alike = self._alike[self._opening(kept.tokens)]
            for other in list(alike):
                if _common(other.tokens, kept.tokens) < min(len(other.tokens), len(tokens)):
                    continue
                if len(other.tokens) >= len(tokens):  # this one adds nothing
                    self._kept.move_to_end(other)
                    return
                if not other.holds:
                    self._forget(other)
            self._alike[self._opening(kept.tokens)].append(kept)
            self._kept[kept] = None
            self._nbytes += nbytes
            self._evict()
        evaluate_later(*(array for tensors in rows for array in tensors.values()))

    def _evict(self) -> None:
        """Forget sequences until the bound holds, those that are held excepted: they go when they are released."""
        for kept in [kept for kept in self._kept if not kept.holds]:
            if self._nbytes <= self._options.prompt_cache_bytes:
                return
            self._forget(kept)

    def _forget(self, kept: _Kept) -> None:
        opening = self._opening(kept.tokens)
        self._alike[opening].remove(kept)
        if not self._alike[opening]:
            del self._alike[opening]
        del self._kept[kept]
        self._nbytes -= kept.nbytes

    def _find(self, prompt: Numbers) -> tuple[_Kept | None, int]:
        found, length = None, 0
        for kept in self._alike.get(self._opening(prompt), ()):
            common = min(_common(kept.tokens, prompt), len(prompt) - 1) // self._step * self._step
            if common > length and self._keeps_bits(len(prompt) - common):
                found, length = kept, common
        return found, length

    def _keeps_bits(self, rest: int) -> bool:
        """Return whether so many tokens may be computed apart from those before them.

        Under `exact` no piece may be too short; the last token is always computed alone.
        """
        last = (rest - 1) % self._options.prefill_step_size
        is_long = rest > CUT_TOKENS and (last == 0 or last >= CUT_TOKENS)
        return not self._options.exact or (is_long and _any_piece_has_its_bits())

    def _opening(self, tokens: Numbers) -> bytes:
        return tokens[: self._step].tobytes()


def _numbers(tokens: Sequence[int]) -> Numbers:
    return np.asarray(tokens, np.int64)


def _common(one: Numbers, other: Numbers) -> int:
    """Return how many first tokens are equal."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _any_piece_has_its_bits() -> bool:
    return mx.default_device() == mx.Device(mx.cpu) and blas_in_use().is_reference
