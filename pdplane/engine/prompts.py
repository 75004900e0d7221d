"""Prompts on prefill: whose chunk is computed next, and what prompts that begin alike have in common."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
from mlx_lm.models.cache import KVCache, PromptTrie

from pdplane.engine.blas import blas_in_use
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import Cache

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


# ---- The caches of prompts that prefill has computed, for prompts that begin alike
#
# A prompt is cut where its common beginning with a kept one ends, at a multiple of `CUT_TOKENS`: the beginning's rows
# are taken as they are, the rest is computed. Only caches that hold a row for each token can be cut so; sliding
# windows, states and quantised caches are computed whole.
#
# Under `exact` nothing is reused but on a CPU with the reference BLAS, in pieces of `CUT_TOKENS` or more: what else
# multiplies matrices picks its kernels by their size, so the last bits of a piece differ from those of the whole.


CUT_TOKENS = 64
_MODEL = ""  # the trie could hold several models' prompts


class PromptCaches:
    """Bounded in bytes; the prompt that was used least recently goes first.

    `reusable` may be called on any thread, the rest on the MLX thread.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        make_trie: Any = PromptTrie  # mlx-lm has no types
        self._trie = make_trie()
        self._kept: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._nbytes = 0
        self._reused_tokens = 0

    def counts(self) -> dict[str, int]:
        """Return how many prompts are kept, their bytes, and how many tokens were reused so far."""
        with self._lock:
            return {"prompts": len(self._kept), "bytes": self._nbytes, "reused_tokens": self._reused_tokens}

    def reusable(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of the prompt need not be computed now."""
        with self._lock:
            return self._find(prompt)[1]

    def take(self, prompt: Sequence[int]) -> tuple[list[Cache] | None, int]:
        """Return caches that hold the first tokens of the prompt, and how many; None and 0 when none are kept.

        The kept caches stay as they are, whatever is added to those returned.
        """
        with self._lock:
            key, length = self._find(prompt)
            if not length:
                return None, 0
            self._kept.move_to_end(key)
            self._reused_tokens += length
            return [_beginning(cache, length) for cache in self._trie.get(_MODEL, key)], length

    def keep(self, prompt: Sequence[int], caches: Sequence[Cache]) -> None:
        """Keep the caches of a whole prompt, which nobody changes any more."""
        if not all(isinstance(cache, KVCache) and cache.offset == len(prompt) for cache in caches):
            return
        nbytes = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
        if not len(prompt) > CUT_TOKENS or nbytes > self._options.prompt_cache_bytes:
            return
        key = tuple(prompt)
        with self._lock:
            self._forget(key)
            self._trie.add(_MODEL, key, [_beginning(cache, len(key)) for cache in caches])
            self._kept[key] = nbytes
            self._nbytes += nbytes
            for length, _ in self._trie.pop_prefixes(_MODEL, key):  # what is part of this one adds nothing
                self._nbytes -= self._kept.pop(key[:length])
            while self._nbytes > self._options.prompt_cache_bytes:
                self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[int, ...]) -> None:
        if key in self._kept:
            self._nbytes -= self._kept.pop(key)
            self._trie.pop(_MODEL, key)

    def _find(self, prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
        tokens = list(prompt)
        found = self._trie.search(_MODEL, tokens)
        key, common = found.exact or found.longer or found.shorter, found.common_prefix
        if found.exact is not None:
            common = len(tokens)
        elif found.shorter is not None and (found.longer is None or len(found.shorter) > common):
            key, common = found.shorter, len(found.shorter)
        length = min(common, len(tokens) - 1) // CUT_TOKENS * CUT_TOKENS
        if self._options.exact and not (_any_piece_has_its_bits() and self._is_long(len(tokens) - length)):
            length = 0
        return tuple(key or ()), length

    def _is_long(self, rest: int) -> bool:
        """Return whether no piece that is computed is too short; the last token is always computed alone."""
        last = (rest - 1) % self._options.prefill_step_size
        return rest > CUT_TOKENS and (last == 0 or last >= CUT_TOKENS)


def _any_piece_has_its_bits() -> bool:
    return mx.default_device() == mx.Device(mx.cpu) and blas_in_use().is_reference


def _beginning(cache: Cache, length: int) -> Cache:
    """Return a plain cache of the first rows; the arrays are shared until one side grows."""
    make_cache: Any = KVCache
    found: Cache = make_cache()
    found.keys, found.values = cache.keys[..., :length, :], cache.values[..., :length, :]
    found.offset = length
    return found
