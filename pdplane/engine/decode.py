"""The decode engine: pages in the arena and a first token in, tokens out."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from pdplane.api import EngineDecodeRequest, EnginePrefix, FinishReason, Token
from pdplane.engine.answer import Answer
from pdplane.engine.batch import BatchJob, BatchMember, why_alone
from pdplane.engine.caches import Leaf
from pdplane.engine.engine import MlxEngine
from pdplane.engine.forward import Forward
from pdplane.engine.model import Prepare
from pdplane.engine.options import EngineOptions, Progress, no_progress
from pdplane.engine.pages import Assembly, Blocks, leaf_nbytes
from pdplane.engine.prompts import CUT_TOKENS, WHY_WHOLE, Prefix, PromptCaches
from pdplane.engine.ranks import RankGroup
from pdplane.engine.sampling import Row, Sampler
from pdplane.engine.thread import Job, Turns
from pdplane.engine.untyped import Cache
from pdplane.errors import ConfigError, InternalError


class MlxDecodeEngine(MlxEngine):
    """Continues sequences: together in a batch where possible, else each alone, a token a turn.

    Alone, and in a batch of one, a sequence has the bits of one mlx-lm process; in a larger batch the ids are the same
    but for near ties, and the bits depend on the cache and the BLAS. Sequences run alone under `exact`, on a model that
    is split over ranks, and with caches that cannot be merged.
    """

    def __init__(self, options: EngineOptions, prepare: Prepare | None = None, group: RankGroup | None = None) -> None:
        super().__init__(options, prepare, group)
        self._batch: BatchJob | None = None
        self._why_alone: str | None = None
        self._alone = self._alone_ever = 0
        self._caches: PromptCaches | None = None
        self._lock = threading.Lock()

    def start(self, progress: Progress = no_progress) -> None:
        super().start(progress)
        if self._batch is None:
            self._why_alone = self.thread.call(self._find_why_alone)
            grows, network = bool(self._histories), self.opened.model.network
            self._batch = BatchJob(self.thread, network, self.concurrency, self._keep, self.cache_nbytes, grows=grows)
            if self._can_reuse:
                step = math.lcm(CUT_TOKENS, self.layout.prefix_granularity)
                self._caches = PromptCaches(self.options, step)

    def facts(self) -> Mapping[str, str | int | None]:
        return {
            **super().facts(),
            "max_running_requests": self.concurrency,
            "sequences_alone_because": self._why_alone,
            "nothing_reused_because": self._caches.why_none() if self._caches else WHY_WHOLE,
        }

    @property
    def concurrency(self) -> int:
        """How many sequences to run at once, in batches or alone; the node makes more wait."""
        return self.options.decode_concurrency

    def counts(self) -> Mapping[str, int | Mapping[str, int]]:
        """Count the sequences in the batch, and alone (`facts` says why), now and since the start."""
        if self._batch is None:
            raise InternalError("the engine was not started")
        totals = {**self._batch.totals(), "alone": self._alone_ever}
        return {**self._batch.counts(), "alone": self._alone, "totals": totals}

    def cache_nbytes(self, tokens: int) -> int:
        """Return the bytes of one sequence's caches at that many tokens; padding in a batch at most doubles them."""
        return sum(leaf_nbytes(leaf, tokens) for leaf in self.opened.leaves)

    def hold(self, prompt: Sequence[int]) -> Prefix | None:
        """Return the longest beginning of a prompt that is kept of a finished sequence, for `assemble`."""
        return self._caches.hold(prompt) if self._caches else None

    def prompt_caches(self) -> dict[str, int]:
        """Return what is kept of sequences, and how many tokens were reused so far."""
        return self._caches.counts() if self._caches else {}

    def assemble(self, prompt_len: int, blocks: Blocks, prefix: EnginePrefix | None = None) -> Assembly:
        """Begin a sequence before its prompt's KV is whole; for `EngineDecodeRequest.assembly`, or to be dropped.

        `blocks` hold the tokens behind the `prefix`. Raises ConfigError for a prompt or blocks that cannot work.
        """
        self.check_prompt_len(prompt_len)
        if not isinstance(prefix, Prefix | None):
            raise InternalError(f"a {type(prefix).__name__} is of another engine")
        opened = self.opened
        opened.pages.check(blocks, self.blocks_needed(prompt_len, prefix.tokens if prefix else 0))
        return Assembly(
            self.thread, opened.pages, opened.layout, opened.leaves, blocks, prompt_len,
            self.options.assemble_ahead_bytes, prefix,
        )  # fmt: skip

    def decode(
        self,
        request: EngineDecodeRequest,
        on_token: Callable[[Token], None],
        on_assembled: Callable[[], None],
        *,
        keep_rows: bool = False,
    ) -> Job[FinishReason] | BatchMember:
        """Report every token, the first one included, and end with the reason.

        Both callbacks run on the MLX thread; an exception from one fails the job. `on_assembled` is called once, when
        the arena's blocks are no longer needed. A job that failed or was cancelled needs them no longer either. With
        `keep_rows` the tokens but the first are `RowToken`. Raises ConfigError at once for a request that cannot work.
        """
        self.check_prompt_len(len(request.prompt))
        self.check_sampling(request.sampling)
        self.check_token(request.first.id)
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, not {request.max_tokens}")
        prefix_len = request.prefix.tokens if request.prefix else 0
        self.opened.pages.check(request.blocks, self.blocks_needed(len(request.prompt), prefix_len))
        answer = Answer(
            request, self._limit(request), on_token, on_assembled, lambda: self._assemble(request), self.kept, keep_rows
        )
        if self._batch is not None and self._why_alone is None:
            member = BatchMember(answer)
            self._batch.join(member)
            return member
        mark = (
            f"{len(request.prompt)} tokens, then {request.first.id}, {request.max_tokens} at most, {request.sampling}"
        )
        job = self.thread.share(lambda: self._turns(answer), request.key, mark)
        self._count_alone(1)
        job.future.add_done_callback(lambda _: self._count_alone(-1))
        return job

    def _count_alone(self, change: int) -> None:
        with self._lock:
            self._alone += change
            self._alone_ever += max(change, 0)

    def _find_why_alone(self) -> str | None:
        if self._group is not None:
            return "the model is split over ranks"
        if self.options.exact:
            return "bits come before speed (--exact)"
        forward = Forward(self.opened.model, self.options)
        forward.prepare(self.opened.leaves)
        return why_alone(forward.caches)

    def _limit(self, request: EngineDecodeRequest) -> int:
        """Return how many tokens the sequence may have: one beyond the context, since the last one is never run."""
        context = self.context_length
        return request.max_tokens if context is None else min(request.max_tokens, context - len(request.prompt) + 1)

    def _assemble(self, request: EngineDecodeRequest) -> Forward:
        assembly = request.assembly or self.assemble(len(request.prompt), request.blocks, request.prefix)
        if not isinstance(assembly, Assembly):
            raise InternalError(f"a {type(assembly).__name__} is of another engine")
        forward = Forward(self.opened.model, self.options)
        forward.prepare(self.opened.leaves)
        assembly.finish(forward.caches)
        return forward

    def _turns(self, answer: Answer) -> Turns[FinishReason]:
        """Run one sequence by itself, a token a turn; return the reason of its end."""
        reason = answer.begin()
        if reason is not None:
            return reason
        forward, sampler = answer.resume()
        try:
            yield
            reason = yield from _steps(answer, forward, sampler)
        except GeneratorExit:  # cancelled: what there is may be of use to the next prompt
            self._keep(answer, lambda leaf: leaf.find(forward.caches))
            raise
        self._keep(answer, lambda leaf: leaf.find(forward.caches))
        return reason

    @property
    def _histories(self) -> list[Leaf]:
        return [leaf for leaf in self.opened.leaves if leaf.kind.is_history]

    @property
    def _can_reuse(self) -> bool:
        """Whether what a sequence keeps row by row can be kept for others.

        States come whole with each room, but a sliding window in legacy pages begins where the prefix ends, so
        that rows of it would be missing. Ranks of a split model could keep different sequences.
        """
        pages, histories = self.opened.pages, self._histories
        return self._group is None and bool(histories) and (pages.has_snapshots or histories == [*self.opened.leaves])

    def _keep(self, answer: Answer, find: Callable[[Leaf], Cache]) -> None:
        """Keep what a sequence that takes no more steps has computed; under `exact` only its prompt."""
        known = list(answer.request.prompt) + ([] if self.options.exact else answer.tokens)
        if self._caches is None or not self._caches.wants(len(known)):
            return
        caches = [find(leaf) for leaf in self._histories]
        length = min(leaf.kind.length(cache) or 0 for leaf, cache in zip(self._histories, caches, strict=True))
        rows = [leaf.kind.take(cache) for leaf, cache in zip(self._histories, caches, strict=True)]
        self._caches.keep(known[:length], rows)


def _steps(answer: Answer, forward: Forward, sampler: Sampler) -> Turns[FinishReason]:
    row = _step(forward, sampler, mx.array(answer.request.first.id))
    while True:
        # The next step is queued before this one's token is read, as mlx-lm does, so that the device need not wait.
        ahead = _step(forward, sampler, row.token) if answer.missing > 1 else None
        reason = answer.add(row.read(keep_row=answer.keep_rows))
        if reason is not None or ahead is None:
            return reason or "length"
        row = ahead
        yield


def _step(forward: Forward, sampler: Sampler, token: mx.array) -> Row:
    sampler.follow(token)
    return forward.step(token, sampler)
