"""The model's forward steps, in mlx-lm's own order: the same chunks, streams and quantisation, hence the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from pdplane.api import GREEDY
from pdplane.engine.caches import Leaf
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.sampling import Row, Sampler
from pdplane.engine.untyped import Cache, evaluate_later, quantise_caches

_CLEAR_EVERY = 256  # tokens after which mlx-lm frees unused memory


def count_chunks(prompt_len: int, step_size: int) -> int:
    """Return how many chunks `prefill_chunks` runs for a prompt of that many tokens."""
    return -(-(prompt_len - 1) // step_size)


@attrs.define(eq=False)
class Forward:
    """One sequence: its caches and its forward steps. Every method runs on the MLX thread."""

    model: Model
    options: EngineOptions
    caches: list[Cache] = attrs.field(init=False)
    steps: int = attrs.field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.caches = list(make_prompt_cache(self.model.network))

    def prefill_chunks(
        self, tokens: Sequence[int], begin: Callable[[int], None] = lambda _goal: None, done: int = 0
    ) -> Iterator[int]:
        """Run all tokens but the last, a chunk at each `next`; yield the tokens done so far.

        `begin` is called before each chunk with the tokens done after it. Chunks are `prefill_step_size` long, and the
        last token is left for `step`: other chunks give other bits. The caches hold `done` tokens already.
        """
        while (remaining := len(tokens) - 1 - done) > 0:
            chunk = tokens[done : done + min(self.options.prefill_step_size, remaining)]
            begin(done + len(chunk))
            with mx.stream(generation_stream):
                self.model.network(mx.array(list(chunk))[None], cache=self.caches)
                self._quantise()
                mx.eval([cache.state for cache in self.caches])
                mx.clear_cache()
            done += len(chunk)
            yield done

    def step(self, token: mx.array, sampler: Sampler | None = None) -> Row:
        """Start the step of a token, an array of one element that need not be computed yet, or of a prompt's last ones.

        Without a sampler the likeliest token is chosen; a sampler has to know the tokens before this one.
        """
        sampler = sampler or Sampler(GREEDY)
        with mx.stream(generation_stream):
            logits = self.model.network(token.reshape(1, -1), cache=self.caches)[:, -1, :]
            row = sampler.choose(logits, self.model.agree)
            self._quantise()
            evaluate_later(row.logprobs, *row.arrays)
            if self.steps % _CLEAR_EVERY == _CLEAR_EVERY - 1:
                mx.clear_cache()
        self.steps += 1
        return row

    def prepare(self, leaves: Sequence[Leaf]) -> None:
        """Put empty quantised caches where a finished prompt has them, since mlx-lm makes them only from plain ones."""
        for leaf in leaves:
            if leaf.cache_class is QuantizedKVCache:
                self.caches[leaf.layer] = QuantizedKVCache(
                    group_size=self.options.kv_group_size, bits=self.options.kv_bits or 8
                )

    def settle(self) -> None:
        """Compute every update of the caches that is still lazy."""
        with mx.stream(generation_stream):
            mx.eval([cache.state for cache in self.caches])

    def _quantise(self) -> None:
        quantise_caches(self.caches, group_size=self.options.kv_group_size, bits=self.options.kv_bits)
