"""What the prefill and the decode engine share: one MLX thread, the model, its cache layout and the arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

import attrs
import mlx.core as mx
import numpy as np

from pdplane.api import Sampling
from pdplane.engine.blas import blas_in_use
from pdplane.engine.caches import Leaf
from pdplane.engine.fingerprint import fingerprint
from pdplane.engine.layout import cache_layout
from pdplane.engine.model import Model, Prepare, load_model
from pdplane.engine.options import EngineOptions, Progress, no_progress
from pdplane.engine.pages import Pages
from pdplane.engine.probe import probe
from pdplane.engine.ranks import RankGroup, check_parts, split_model
from pdplane.engine.text import MlxTokenizer
from pdplane.engine.thread import EngineThread
from pdplane.engine.token_pages import TokenPages, legacy_layout
from pdplane.errors import ConfigError, InternalError
from pdplane.ids import GroupId
from pdplane.kv.arena import PAGE_BYTES, Arena, Pool
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import blocks_needed
from pdplane.messages import Fingerprint


@attrs.frozen(eq=False)
class Opened:
    """Everything that `start` makes."""

    model: Model
    leaves: tuple[Leaf, ...]
    layout: Layout
    arena: Arena
    pages: Pages
    fingerprint: Fingerprint
    capacity: Pool
    """An empty pool, asked only whether a prompt could ever fit."""


class HasModel(Protocol):
    """What an engine's start makes."""

    @property
    def model(self) -> Model: ...


Made = TypeVar("Made", bound=HasModel)


class EngineLife(Generic[Made]):
    """An MLX thread and what is opened on it; `start` opens, `close` joins. The constructor opens nothing."""

    def __init__(self, options: EngineOptions, open_: Callable[[Progress], Made], thread: EngineThread) -> None:
        self.options, self.thread, self._open = options, thread, open_
        self._opened: Made | None = None

    def start(self, progress: Progress = no_progress) -> None:
        """Load the model on the MLX thread, and make what goes with it.

        `progress` is called on the MLX thread. Raises ConfigError, and then the engine is closed. `close` from another
        thread ends a download or conversion at its next progress: then this raises CancelledError. Harmless when it
        has started.
        """
        if self._opened is not None:
            return

        def watched(name: str, done: int, total: int) -> None:
            if self.thread.closing:
                raise CancelledError("the engine closes")
            progress(name, done, total)

        self.thread.start()
        try:
            self._opened = self.thread.call(lambda: self._open(watched))
        finally:
            if self._opened is None:
                self.close()

    def close(self) -> None:
        """End all jobs at their next turn and join the MLX thread; idempotent. An arena stays readable."""
        self.thread.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def opened(self) -> Made:
        """What `start` made; raise InternalError before it."""
        if self._opened is None:
            raise InternalError("the engine was not started")
        return self._opened

    @property
    def tokenizer(self) -> MlxTokenizer:
        return self.opened.model.tokenizer


class MlxEngine(EngineLife[Opened]):
    """A loaded model with an arena.

    `prepare` may change the model before its weights are read, such as `RemoteExperts.attach`. With an open `group`
    this is one of its ranks: it holds its part of the model and of the cache, on the group's thread.
    """

    def __init__(self, options: EngineOptions, prepare: Prepare | None = None, group: RankGroup | None = None) -> None:
        thread: EngineThread = EngineThread() if group is None else group.thread
        super().__init__(options, lambda progress: _open(options, progress, prepare, group), thread)
        self._group = group

    @property
    def layout(self) -> Layout:
        return self.opened.layout

    @property
    def arena(self) -> Arena:
        return self.opened.arena

    @property
    def fingerprint(self) -> Fingerprint:
        return self.opened.fingerprint

    @property
    def context_length(self) -> int | None:
        """The model's longest sequence in tokens; None when its config does not say."""
        return self.opened.model.context_length

    def facts(self) -> Mapping[str, str | int | None]:
        """Return facts of the model for HTTP; the path is local, or the name of a model without files."""
        model = self.opened.model
        path = str(model.path or model.name)
        return {
            "model_path": path,
            "tokenizer_path": path,
            "context_length": model.context_length,
            "vocab_size": model.vocab_size,
            "blas": str(blas_in_use()),
        }

    def trouble(self) -> str | None:
        """Return why the MLX thread does not go on, None while it does."""
        return self.thread.trouble()

    def blocks_needed(self, prompt_len: int, prefix_len: int = 0) -> dict[GroupId, int]:
        """Return how many blocks of each group the cache of a prompt takes, from `prefix_len` on."""
        return blocks_needed(self.layout, prompt_len, prefix_len)

    def check_prompt_len(self, prompt_len: int) -> None:
        """Raise ConfigError for a prompt that is empty, longer than the model's context, or larger than the arena."""
        context = self.context_length
        if prompt_len < 1:
            raise ConfigError("the prompt has no token")
        if context is not None and prompt_len > context:
            raise ConfigError(f"the prompt has {prompt_len} tokens, the model's context {context}")
        needed = self.blocks_needed(prompt_len)
        if not self.opened.capacity.fits(needed):
            nbytes = (self.opened.capacity.parents(needed) + 1) * self.layout.lcm_block_bytes
            raise ConfigError(
                f"the prompt's {prompt_len} tokens do not fit in an arena of {self.arena.nbytes} bytes; "
                f"--arena-bytes {nbytes} holds them"
            )

    def check_token(self, token: int) -> None:
        """Raise ConfigError for a token id outside the model's vocabulary."""
        size = self.opened.model.vocab_size
        if not 0 <= token < size:
            raise ConfigError(f"token id {token} is outside the vocabulary 0..{size - 1}")

    def check_sampling(self, sampling: Sampling) -> None:
        """Raise ConfigError for a logit bias of a token outside the model's vocabulary."""
        for token, _ in sampling.logit_bias:
            self.check_token(token)

    @property
    def kept(self) -> tuple[int, ...]:
        """What XTC never takes away, as in mlx-lm's server: the end of a line and the end of an answer."""
        return (*self.tokenizer.encode("\n"), *sorted(self.tokenizer.eos_ids))


def _open(options: EngineOptions, progress: Progress, prepare: Prepare | None, group: RankGroup | None) -> Opened:
    tp_size = 1
    if group is None:
        model = load_model(options.model, seed=options.seed, progress=progress, prepare=prepare)
        whole = leaves = probe(model, options)
    else:
        if prepare is not None:
            raise ConfigError("a model that is split over ranks cannot have its experts elsewhere")
        tp_size = group.size
        model, whole = split_model(options, progress, group)
        leaves = probe(model, options)
        check_parts(whole, leaves, tp_size)
    model = model.limited(options.context_length)
    layout = plan(whole, options, tp_size)
    arena = _arena(layout)
    pages = (
        TokenPages(layout, arena, leaves, options.prefill_step_size)
        if options.page_layout == "nhd"
        else Pages(layout, arena, leaves)
    )
    return Opened(model, leaves, layout, arena, pages, fingerprint(model, options, tp_size), Pool(layout))


def plan(leaves: Sequence[Leaf], options: EngineOptions, tp_size: int = 1) -> Layout:
    """Return one rank's layout of a model with these leaves, by the options' page layout. Raises ConfigError."""
    return (legacy_layout if options.page_layout == "nhd" else cache_layout)(leaves, options, tp_size)


def _arena(layout: Layout) -> Arena:
    # Two axes: an MLX array cannot have 2**31 elements along one.
    # The rows beyond the layout's are room to begin at a page's border.
    spare = -(-PAGE_BYTES // layout.lcm_block_bytes)
    shape = (layout.num_lcm_blocks + 1 + spare, layout.lcm_block_bytes)
    try:
        memory = mx.zeros(shape, dtype=mx.uint8)
        mx.eval(memory)
    except RuntimeError as error:
        raise ConfigError(f"no memory for an arena of {layout.arena_bytes} bytes") from error
    arena = Arena.within(np.array(memory, copy=False).reshape(-1), layout.arena_bytes)
    arena.gather_pages()
    return arena


# ---- The layout that an engine of these options would publish, without an engine: no arena, no node


_ANY_ARENA = 1 << 62  # bytes; nothing is allocated here


def model_layout(
    options: EngineOptions, tp_size: int = 1, parents: int | None = None, progress: Progress = no_progress
) -> Layout:
    """Load the whole model, probe its caches and give one rank's layout; `parents` overrules the arena's size.

    Raises ConfigError.
    """

    def work() -> Layout:
        model = load_model(options.model, seed=options.seed, progress=progress)
        leaves = probe(model, options)
        if parents is None:
            return plan(leaves, options, tp_size)
        one = plan(leaves, attrs.evolve(options, arena_bytes=_ANY_ARENA), tp_size).lcm_block_bytes
        return plan(leaves, attrs.evolve(options, arena_bytes=(parents + 1) * one), tp_size)

    thread = EngineThread()
    thread.start()
    try:
        return thread.call(work)
    finally:
        thread.close()
