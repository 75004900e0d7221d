"""Whole prompts, saved prefixes and their continuations, each as one job on the MLX thread."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

import attrs
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pdplane.engine.engine import EngineLife
from pdplane.engine.fingerprint import fingerprint
from pdplane.engine.forward import Forward
from pdplane.engine.model import Model, Prepare, load_model
from pdplane.engine.options import EngineOptions, Progress
from pdplane.engine.thread import EngineThread, Job, Turns
from pdplane.errors import ConfigError
from pdplane.workers.cache.saved import SavedCache, check_caches, longest_nbytes, restore_caches, save_caches

_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_UNKNOWN_CONTEXT = 1 << 18
_FILE_HEADER_NBYTES = 1 << 20
_PROBE = 4  # tokens of the prompt that shows what the model's caches look like


@attrs.frozen
class Identity:
    """What a saved cache and the model that continues from it must share."""

    model_revision: str
    config_hash: str
    weight_hash: str
    dtype: str
    mlx: str
    mlx_lm: str


@attrs.frozen(eq=False)
class SavedPrefix:
    """The caches after a prompt's last token, and the time that it took."""

    caches: tuple[SavedCache, ...]
    prefill_ms: float


@attrs.frozen
class Continuation:
    """Greedy tokens after a prompt; times in ms, `ttft_ms` from the job's first turn to the first token.

    `load_ms` is the time to put saved caches in place, 0 without them. `peak_bytes` is MLX's peak memory meanwhile.
    """

    tokens: tuple[int, ...]
    load_ms: float
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    peak_bytes: int


@attrs.frozen(eq=False)
class OpenedPrefixes:
    """Everything that `start` makes; `sample` is what the model's caches look like."""

    model: Model
    identity: Identity
    sample: tuple[SavedCache, ...]


class PrefixEngine(EngineLife[OpenedPrefixes]):
    """A loaded model on its own MLX thread; `start` loads, `close` joins. Every method may be called by any thread.

    Jobs take turns, one chunk or token each. Saving runs all tokens of the prefix in whole chunks, so that a prefix
    whose length is a multiple of `prefill_step_size` continues with the bits of one mlx-lm run over prefix and query;
    at other lengths the chunks differ, and with them, on some BLAS libraries, the last bits.
    """

    def __init__(self, options: EngineOptions, prepare: Prepare | None = None) -> None:
        super().__init__(options, lambda progress: _open(options, progress, prepare), EngineThread())

    @property
    def model(self) -> Model:
        return self.opened.model

    @property
    def identity(self) -> Identity:
        return self.opened.identity

    @property
    def longest_cache(self) -> int:
        """Bytes of the longest saved cache, as a file, that this model's context needs."""
        context = self.model.context_length or _UNKNOWN_CONTEXT
        return longest_nbytes(self.opened.sample, context) + _FILE_HEADER_NBYTES

    def run(
        self, tokens: Sequence[int], max_tokens: int, on_token: Callable[[int], None] = lambda _token: None
    ) -> Job[Continuation]:
        """Generate after a whole prompt; `on_token` is called on the MLX thread for each token.

        Raises ConfigError at once for tokens that cannot work.
        """
        prompt = self._checked(tokens, 0, max_tokens)
        most = self._most(len(prompt), max_tokens)
        return self.thread.submit(lambda: self._generate(prompt, most, None, on_token))

    def save(self, tokens: Sequence[int]) -> Job[SavedPrefix]:
        """Run a prefix and save its caches. Raises ConfigError at once for tokens that cannot work."""
        prefix = self._checked(tokens, 0, 1)
        return self.thread.submit(lambda: self._save(prefix))

    def prefill(self, tokens: Sequence[int]) -> Job[float]:
        """Run a prefix and drop its caches; return the milliseconds that it took."""
        prefix = self._checked(tokens, 0, 1)
        return self.thread.submit(lambda: self._time(prefix))

    def resume(
        self, saved: Sequence[SavedCache], token_count: int, query: Sequence[int], max_tokens: int
    ) -> Job[Continuation]:
        """Generate after a saved prefix of `token_count` tokens and a query.

        Raises ConfigError at once for tokens that cannot work and IncompatibleCache for caches of another form.
        """
        prompt = self._checked(query, token_count, max_tokens)
        check_caches(saved, self.opened.sample, token_count)
        most = self._most(token_count + len(prompt), max_tokens)
        return self.thread.submit(lambda: self._generate(prompt, most, tuple(saved)))

    def _checked(self, tokens: Sequence[int], before: int, max_tokens: int) -> tuple[int, ...]:
        context, size = self.model.context_length, self.model.vocab_size
        if not tokens:
            raise ConfigError("there is no token to run")
        if not 0 <= min(tokens) <= max(tokens) < size:
            raise ConfigError(f"a token id is outside the vocabulary 0..{size - 1}")
        if max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {max_tokens}")
        if context is not None and before + len(tokens) > context:
            raise ConfigError(f"{before + len(tokens)} tokens do not fit in the model's context of {context}")
        return tuple(tokens)

    def _most(self, length: int, max_tokens: int) -> int:
        """Return how many tokens may follow: one beyond the context, since the last one is never run."""
        context = self.model.context_length
        return max_tokens if context is None else min(max_tokens, context - length + 1)

    def _save(self, prefix: tuple[int, ...]) -> Turns[SavedPrefix]:
        forward, clock = Forward(self.model, self.options), _Clock()
        # The token behind the last one is never run: `prefill_chunks` leaves the last of its list to `step`.
        for _ in forward.prefill_chunks((*prefix, 0)):
            yield
        prefill_ms = clock.lap()
        return SavedPrefix(save_caches(forward.caches), prefill_ms)

    def _time(self, prefix: tuple[int, ...]) -> Turns[float]:
        forward, clock = Forward(self.model, self.options), _Clock()
        for _ in forward.prefill_chunks((*prefix, 0)):
            yield
        return clock.lap()

    def _generate(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        saved: tuple[SavedCache, ...] | None,
        on_token: Callable[[int], None] = lambda _token: None,
    ) -> Turns[Continuation]:
        mx.reset_peak_memory()
        clock = _Clock()
        forward = Forward(self.model, self.options)
        if saved is not None:
            forward.caches = restore_caches(saved, make_prompt_cache(self.model.network))
            forward.settle()
        load_ms = clock.lap()
        for _ in forward.prefill_chunks(prompt):
            yield
        prefill_ms = clock.lap()
        tokens: list[int] = []
        row = forward.step(mx.array(prompt[-1]))
        first_ms = 0.0
        while True:
            # Queued before this token is read, as mlx-lm does, so that the device does not wait for Python.
            ahead = forward.step(row.token) if len(tokens) + 1 < max_tokens else None
            tokens.append(row.read().id)
            first_ms = first_ms or clock.lap()
            on_token(tokens[-1])
            if ahead is None or tokens[-1] in self.tokenizer.eos_ids:
                break
            row = ahead
            yield
        ttft_ms = load_ms + prefill_ms + first_ms
        peak = int(mx.get_peak_memory())
        return Continuation(tuple(tokens), load_ms, prefill_ms, ttft_ms, clock.lap(), peak)


def _open(options: EngineOptions, progress: Progress, prepare: Prepare | None) -> OpenedPrefixes:
    model = load_model(options.model, seed=options.seed, progress=progress, prepare=prepare)
    facts = dict(fingerprint(model, options).required)
    forward = Forward(model, options)
    for _ in forward.prefill_chunks([0] * _PROBE + [0]):
        pass
    identity = Identity(
        _revision(model, facts["weights"]), facts["config"], facts["weights"], facts["dtype"], facts["mlx"],
        facts["mlx_lm"],
    )  # fmt: skip
    return OpenedPrefixes(model, identity, save_caches(forward.caches))


class _Clock:
    """Return the milliseconds since the last call."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()

    def lap(self) -> float:
        before, self._last = self._last, self._now()
        return (self._last - before) * 1000


def _revision(model: Model, weights: str) -> str:
    """Return the hub's commit if the folder's name shows it, else a name made from the weights' hash."""
    name = model.path.name if model.path is not None else ""
    return name if _COMMIT.match(name) else f"weights-{weights[:12]}"
