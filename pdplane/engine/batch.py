"""Continuous batching: sequences that take each step together, since one pass over the weights serves them all.

The batch is one job on the MLX thread, and its turn is one step of every member. A member joins between two steps as
soon as its cache is whole, several at once where that costs the others little, and leaves between two steps. The step
is written here: mlx-lm's
`GenerationBatch` computes a step of the newcomer alone at each join, which doubles the others' wait, and one sequence's
error ends all of them. mlx-lm's caches do the joining: `merge`, `extend` and `filter`.

The members of a batch are padded to the longest. So that little is kept and read for nothing there is a batch for each
range of lengths: no member is padded by more rows than it has itself, or `FREE_PADDING` if it has fewer. All grow by
one row a step, so what holds at the join holds until the end.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import TypeAlias

import attrs
import mlx.core as mx
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from pdplane.api import FinishReason
from pdplane.engine.answer import Answer
from pdplane.engine.caches import Leaf, joined, keep, walk
from pdplane.engine.sampling import Row, Sampler
from pdplane.engine.thread import EngineThread, Turns
from pdplane.engine.untyped import Cache, Network, evaluate_later, queue_depth

Left: TypeAlias = Callable[[Answer, Callable[[Leaf], Cache]], None]
"""Called with a sequence that takes no more steps, and what gives its cache of a leaf."""

FREE_PADDING = 1024
"""Rows of padding that are never too many: reading them costs less than reading the weights once more."""

JOIN_BYTES = 128 << 20
"""What members that join may copy before the others take their next step: tens of milliseconds on a CPU."""

_MERGING = (KVCache, RotatingKVCache, ArraysCache)
_CLEAR_EVERY = 256  # steps after which mlx-lm frees unused memory


def why_alone(caches: Sequence[Cache]) -> str | None:
    """Say why sequences with such caches cannot share a batch; None when they can.

    The leaves decide: a CacheList always has `merge`, and a ring that keeps its first tokens would lose them silently.
    """
    for layer, _, cache in walk(caches):
        if type(cache) not in _MERGING:
            return f"layer {layer} keeps a {type(cache).__name__}, which mlx-lm cannot merge"
        if isinstance(cache, RotatingKVCache) and cache.keep:
            return f"layer {layer} keeps its first {cache.keep} tokens for good, which mlx-lm's merge loses"
    return None


def padding(lengths: Sequence[int]) -> int | None:
    """Count the rows of padding in a batch of members with so many rows; None when one of them would have too many."""
    longest, shortest = max(lengths), min(lengths)
    if longest - shortest > max(shortest, FREE_PADDING):
        return None
    return sum(longest - length for length in lengths)


class BatchMember:
    """One sequence in the batch, or on its way there.

    `future` ends as a job's does. Used as a context, an exception from inside ends this member, and no other.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.future: Future[FinishReason] = Future()
        self.future.set_running_or_notify_cancel()  # so that Future.cancel() is refused: it would end too early
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Ask to leave before the next step; harmless after the end. Any thread may call this."""
        self._cancelled.set()

    def result(self, timeout_s: float | None = None) -> FinishReason:
        """Wait for the end and return the reason. Raises what ended the member, CancelledError, or TimeoutError."""
        return self.future.result(timeout_s)

    def is_over(self) -> bool:
        """End the member if it was cancelled; return True when it takes no more steps."""
        if self._cancelled.is_set():
            self.fail(CancelledError("cancelled"))
        return self.future.done()

    def end(self, reason: FinishReason | None) -> None:
        """End well, if there is a reason to."""
        if reason is not None:
            self.future.set_result(reason)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        if not self.future.done():
            self.future.set_exception(error)

    def __enter__(self) -> BatchMember:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.fail(error)
            return True
        return False


@attrs.define(eq=False)
class _Place:
    """A member's place in a batch, and its token under way; `row` is None while that is the first one."""

    member: BatchMember
    sampler: Sampler
    token: mx.array
    row: Row | None = None

    def stays(self) -> bool:
        """Return whether another step is needed: the token under way is not the last."""
        return not self.member.is_over() and self.member.answer.missing > (self.row is not None)


class Batch:
    """Members of similar length, padded to the longest. Every method runs on the MLX thread.

    A single member keeps its caches as they are, and with them its bits: a ring's merge changes the order of its rows,
    and with it the order in which sums are made.
    """

    def __init__(self, network: Network, left: Left) -> None:
        self._network, self._left = network, left
        self._reads_first = queue_depth() == 1
        self._caches: list[Cache] = []
        self._is_merged = False
        self._places: list[_Place] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def members(self) -> list[BatchMember]:
        return [place.member for place in self._places]

    @property
    def lengths(self) -> list[int]:
        """How many rows each member has."""
        return [place.member.answer.rows for place in self._places]

    def join(self, member: BatchMember) -> None:
        """Take a member in whose first token has been reported; it ends here if its cache cannot be made."""
        with member:
            forward, sampler = member.answer.resume()
            caches = forward.caches
        if member.is_over():
            return
        with mx.stream(generation_stream):
            if self._caches:
                pairs = zip(self._caches, caches, strict=True)
                self._caches = [joined(mine, its, is_merged=self._is_merged) for mine, its in pairs]
                self._is_merged = True
            else:
                self._caches = caches
        self._places.append(_Place(member, sampler, mx.array([member.answer.request.first.id])))

    def step(self) -> None:
        """Start the step of all members that need one, and report the tokens of the step before.

        A GPU computes while tokens go out, as in mlx-lm. On the CPU `evaluate_later` returns when little of the step
        is left, so there the tokens go out first, a step earlier, and other threads work on them meanwhile.
        """
        unread = [(place.member, place.row) for place in self._places if place.row and not place.member.is_over()]
        self._keep([number for number, place in enumerate(self._places) if place.stays()])
        with mx.stream(generation_stream):
            started = self._begin() if self._places else []
            if not self._reads_first:
                evaluate_later(*started)
            self._report(unread)
            if self._reads_first:
                evaluate_later(*started)

    def _report(self, unread: Sequence[tuple[BatchMember, Row]]) -> None:
        tokens = [row.read(keep_row=member.answer.keep_rows) for member, row in unread]
        for (member, _), token in zip(unread, tokens, strict=True):
            with member:
                member.end(member.answer.add(token))

    def _keep(self, numbers: list[int]) -> None:
        if len(numbers) == len(self._places):
            return
        with mx.stream(generation_stream):
            for number in set(range(len(self._places))).difference(numbers):
                self._left(self._places[number].member.answer, functools.partial(self._cache_of, number))
        self._places = [self._places[number] for number in numbers]
        if not numbers:
            self._caches, self._is_merged = [], False
        with mx.stream(generation_stream):
            for cache in self._caches:
                keep(cache, numbers)

    def _cache_of(self, number: int, leaf: Leaf) -> Cache:
        """Return one member's cache of a leaf, which nobody else changes."""
        cache = leaf.find(self._caches)
        return cache.extract(number) if self._is_merged else cache

    def _begin(self) -> list[mx.array]:
        """Make every member's next row, and return what has to be computed for it."""
        tokens = [place.token.reshape(1) for place in self._places]
        logits = self._network(mx.concatenate(tokens)[:, None], cache=self._caches)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        likeliest = mx.argmax(logprobs, axis=-1)
        for number, place in enumerate(self._places):
            place.row = None
            with place.member:
                place.sampler.follow(place.token)
                if place.sampler.is_plain:
                    place.row = place.sampler.row(likeliest[number], logprobs[number])
                else:
                    place.row = place.sampler.choose(logits[number : number + 1])
            # A member that failed here leaves before the next step and needs no token.
            place.token = likeliest[number] if place.row is None else place.row.token
        return [array for place in self._places if place.row for array in place.row.arrays]


class BatchJob:
    """All batches of an engine, as one job that runs while it has members. `join` may be called by any thread.

    At most `size` members take steps at once. The others have their first token reported and wait, first come, first
    served. A step that fails ends every member with its cause, and the next member begins a new job. `nbytes` gives
    what the caches of so many rows take; `grows`: some cache has a row for each token; without one all lengths are
    alike.
    """

    def __init__(
        self,
        thread: EngineThread,
        network: Network,
        size: int,
        left: Left,
        nbytes: Callable[[int], int],
        *,
        grows: bool,
    ) -> None:
        self._thread, self._network, self._size, self._left = thread, network, size, left
        self._nbytes, self._grows = nbytes, grows
        self._lock = threading.Lock()
        self._arrived: list[BatchMember] = []
        self._is_running = False
        # The rest belongs to the MLX thread.
        self._waiting: deque[BatchMember] = deque()
        self._batches: list[Batch] = []
        self._steps = self._joined = self._largest = 0

    def join(self, member: BatchMember) -> None:
        """Put a sequence in line. Raises InternalError when the thread does not run."""
        with self._lock:
            self._arrived.append(member)
            begins, self._is_running = not self._is_running, True
        if begins:
            self._thread.submit(self._turns).future.add_done_callback(self._stopped)

    def counts(self) -> dict[str, int]:
        """Count the members, without a lock, so only roughly of one moment."""
        return {
            "members": sum(len(batch) for batch in list(self._batches)),
            "waiting": len(self._waiting) + len(self._arrived),
            "batches": len(self._batches),
        }

    def totals(self) -> dict[str, int]:
        """Count the steps, the members that joined, and those of the largest batch, since the start."""
        return {"joined": self._joined, "largest": self._largest, "steps": self._steps}

    def _turns(self) -> Turns[None]:
        while self._greet():
            self._admit()
            for batch in self._batches:
                batch.step()
            self._batches = [batch for batch in self._batches if len(batch)]
            self._steps += 1
            if self._steps % _CLEAR_EVERY == 0:
                mx.clear_cache()
            yield

    def _greet(self) -> bool:
        """Report the first tokens of new members; return False, and then the job is over, when no member is left."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            self._is_running = bool(arrived or self._waiting or self._batches)
        for member in arrived:
            with member:
                member.end(None if member.is_over() else member.answer.begin())
        self._waiting = deque(member for member in [*self._waiting, *arrived] if not member.is_over())
        return self._is_running

    def _admit(self) -> None:
        """Put the first waiting members into the batches that fit best: one, or more if they copy little."""
        copied, free = 0, self._size - sum(len(batch) for batch in self._batches)
        while self._waiting and free > 0 and copied < JOIN_BYTES:
            member = self._waiting.popleft()
            batch = self._fitting(member.answer.rows)
            if batch is None:
                batch = Batch(self._network, self._left)
                self._batches.append(batch)
            batch.join(member)
            copied += len(batch) * self._nbytes(max(batch.lengths, default=0))  # a join copies all of a batch
            self._joined, free = self._joined + 1, free - 1
            self._largest = max(self._largest, len(batch))

    def _fitting(self, rows: int) -> Batch | None:
        """Find the batch in which a member with so many rows makes the least padding; None when it fits in none."""
        if not self._grows:
            return next(iter(self._batches), None)
        found = [(padding([rows, *batch.lengths]), batch) for batch in self._batches]
        fitting = [(extra, batch) for extra, batch in found if extra is not None]
        return min(fitting, key=lambda one: one[0])[1] if fitting else None

    def _stopped(self, job: Future[None]) -> None:
        """End every member with the job's error, if it has one; it ends well only when no member is left."""
        error = job.exception()
        if error is None:
            return
        with self._lock:
            arrived, self._arrived = self._arrived, []
            self._is_running = False
        members = [*(member for batch in self._batches for member in batch.members), *self._waiting, *arrived]
        self._batches, self._waiting = [], deque()
        for member in members:
            member.fail(error)
