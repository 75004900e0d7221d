"""mlx-lm's caches with a callback at each update; what they hold and return stays the same."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from pdplane.engine.caches import Leaf
from pdplane.engine.options import EngineOptions
from pdplane.engine.pages import Bits, Blocks, Pages
from pdplane.engine.untyped import Cache, evaluate_later, queue_depth

Told: TypeAlias = Callable[[Cache], None]
"""Called with the cache after each update, as it will be at the end: quantised, if it will be."""


class TappedCache(KVCache):
    """A plain cache; with a `form` (group size, bits) it is quantised after each update, not at the chunk's end.

    That is the same operation on the same rows. mlx-lm asks for the result at the chunk's end and goes on with it.
    """

    def __init__(self, told: Told, form: tuple[int, int] | None = None) -> None:
        _typed(super()).__init__()
        self._told, self._form = told, form
        self._made: Cache | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:  # noqa: ANN401  (the model knows it)
        found = _typed(super()).update_and_fetch(keys, values)
        if self._form is None:
            self._told(self)
        else:
            group_size, bits = self._form
            self._made = TappedQuantizedCache(_typed(super()).to_quantized(group_size, bits), self._told)
            self._told(self._made)
        return found

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:  # noqa: ANN401
        made, self._made = self._made, None
        if made is not None and (made.group_size, made.bits) == (group_size, bits):
            return made
        return _typed(super()).to_quantized(group_size, bits)


class TappedQuantizedCache(QuantizedKVCache):
    """A quantised cache, taken over from a plain one."""

    def __init__(self, plain: Cache, told: Told) -> None:
        _typed(super()).__init__(group_size=plain.group_size, bits=plain.bits)
        self.keys, self.values, self.offset = plain.keys, plain.values, plain.offset
        self._told = told

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:  # noqa: ANN401  (the model knows it)
        found = _typed(super()).update_and_fetch(keys, values)
        self._told(self)
        return found


def _typed(parent: Any) -> Any:  # noqa: ANN401  (mlx-lm's methods have no types)
    return parent


# ---- Layerwise streaming: a layer's pages leave for the arena while the layers behind it are computed
#
# Some caches of the prompt are replaced by ones that report each update. A layer's tensors are then started at once
# (`async_eval`) and waited for later, on the same thread, when the graph behind them is built. A GPU's queue takes
# everything, so two caches may be under way: the device works on one while the other's pages are cut. The CPU's
# queue holds less than a layer and `async_eval` blocks until there is room, so there the wait is for the cache before,
# which is computed by then; two would only make each layer a layer late. Cutting the graph there changes no bits.
# Histories go chunk by chunk; states, which every token changes, go after the last one.


OnStep: TypeAlias = Callable[[range, range], None]
"""Called with (layout steps, tokens) when the pages that these tokens complete in these steps are in the arena."""

_MAX_PARTS = 256  # the most pushes of one prompt, whatever its chunks and layers


class Tap:
    """The pages of one prompt that leave while it is computed; used on the MLX thread.

    `begin` before each chunk, `end` after it, `finish` after the last token of the prompt, which has `length`. Each
    (step, token) of a history is reported once. `leaves` come with their layout steps, in whose order they are reported
    at the end.
    """

    def __init__(
        self,
        leaves: Sequence[tuple[int, Leaf]],
        pages: Pages,
        blocks: Blocks,
        on_step: OnStep,
        options: EngineOptions,
        length: int,
    ) -> None:
        self._steps, self._leaves = [step for step, _ in leaves], [leaf for _, leaf in leaves]
        self._pages, self._blocks = pages, blocks
        self._on_step, self._options = on_step, options
        self._length, self._held, self._holds = length, 0, 0
        self._states = [leaf for leaf in self._leaves if not leaf.kind.is_history]
        self._block_tokens, self.interval = options.block_tokens, options.layerwise_interval
        self._lag = queue_depth()
        self._history = [number for number, leaf in enumerate(self._leaves) if leaf.kind.is_history]
        self._done = 0  # tokens whose blocks are reported
        self._goal: int | None = None  # tokens after the chunk that runs, when that completes a block
        self._unseen: set[int] = set()
        self._pending: deque[tuple[int, Bits]] = deque()
        self._missing: Counter[int] = Counter()  # leaves that a step waits for
        self._ready: list[int] = []

    def attach(self, caches: list[Cache], chunks: int) -> None:
        """Replace a prompt's plain caches by ones that report their updates; they hold the same rows."""
        if not self._history:
            self.interval = 0
        if not self.interval:
            return
        steps = len({self._steps[number] for number in self._history})
        self.interval = max(self.interval, -(-steps * chunks // _MAX_PARTS))
        for number in self._history:
            leaf, form = self._leaves[number], None
            if leaf.cache_class is QuantizedKVCache:
                form = self._options.kv_group_size, self._options.kv_bits or 8
            plain, tapped = leaf.find(caches), TappedCache(functools.partial(self._updated, number), form)
            tapped.keys, tapped.values, tapped.offset = plain.keys, plain.values, plain.offset
            leaf.put(caches, tapped)

    def begin(self, goal: int) -> None:
        """Begin a chunk, after which the caches hold `goal` tokens."""
        self._holds = goal
        if self.interval and goal // self._block_tokens > self._done // self._block_tokens:
            self._goal = goal
            self._unseen = set(self._history)
            self._missing = Counter(self._steps[number] for number in self._history)

    def end(self, caches: Sequence[Cache]) -> None:
        """End a chunk: cut what states would lose, and report what it completes and is not reported yet."""
        self._cut_passing(caches)
        if self._goal is None:
            return
        while self._pending:
            self._land(*self._pending.popleft())
        for number in sorted(self._unseen):  # caches that a model does not update in one piece
            leaf = self._leaves[number]
            self._land(number, self._pages.bits(leaf, leaf.find(caches)))
        self._tell()
        self._done, self._goal = self._goal, None

    def finish(self, caches: Sequence[Cache]) -> None:
        """End the prompt: cut and report the rest."""
        length = self._holds = self._length
        self._cut_passing(caches)
        rows = range(self._whole(self._done), length)
        for leaf in self._leaves:
            self._pages.cut(leaf, leaf.find(caches), self._blocks, rows)
        streamed = {self._steps[number] for number in self._history}
        start = {step: self._done if step in streamed or self._pages.has_snapshots else 0 for step in self._steps}
        for steps in _joined(sorted(start), start):
            self._on_step(steps, range(start[steps.start], length))

    def _cut_passing(self, caches: Sequence[Cache]) -> None:
        passing, self._held = range(self._held, self._holds), self._holds
        for leaf in self._states:
            self._pages.cut_passing(leaf, leaf.find(caches), self._blocks, passing, self._length)

    def _updated(self, number: int, cache: Cache) -> None:
        if cache.offset != self._goal or number not in self._unseen:
            return
        self._unseen.discard(number)
        while len(self._pending) >= self._lag:
            self._land(*self._pending.popleft())
        bits = self._pages.bits(self._leaves[number], cache)
        evaluate_later(*bits.values())
        self._pending.append((number, bits))

    def _land(self, number: int, bits: Bits) -> None:
        self._unseen.discard(number)
        rows = range(self._whole(self._done), self._whole(self._goal or 0))
        self._pages.cut_history(self._leaves[number], bits, self._blocks, rows)
        step = self._steps[number]
        self._missing[step] -= 1
        if not self._missing[step]:
            self._ready.append(step)
            if len(self._ready) >= self.interval:
                self._tell()

    def _tell(self) -> None:
        ready, self._ready = sorted(self._ready), []
        for steps in _joined(ready, dict.fromkeys(ready)):
            self._on_step(steps, range(self._done, self._goal or 0))

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_tokens * self._block_tokens


def _joined(steps: Sequence[int], alike: Mapping[int, Any]) -> Iterator[range]:
    """Yield ascending steps as ranges of neighbours that are alike."""
    first = 0
    for place in range(1, len(steps) + 1):
        if place == len(steps) or steps[place] != steps[place - 1] + 1 or alike[steps[place]] != alike[steps[first]]:
            yield range(steps[first], steps[place - 1] + 1)
            first = place
