"""A model split over ranks: its parts, and the jobs that all ranks run together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import attrs
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pdplane.engine.caches import Leaf, describe
from pdplane.engine.model import Model, load_model, one_line
from pdplane.engine.options import EngineOptions, Progress
from pdplane.engine.probe import with_flags
from pdplane.engine.prompts import PromptLine
from pdplane.engine.thread import EngineThread, Job, Turns
from pdplane.engine.untyped import quantise_caches
from pdplane.errors import ConfigError, InternalError
from pdplane.kv.planning import local_heads

_distributed: Any = mx.distributed
_MESSAGE_BYTES = 512
_PROBED = 4  # tokens


class RankGroup:
    """This process's place among `size` ranks, and the thread that all of its MLX work runs on.

    The constructor opens nothing. The group itself ends with the process: MLX has no other way.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.thread = RankThread(rank, size)
        self._group: Any = None

    def open(self) -> None:
        """Meet the other ranks over the ring that the launcher described; block until all are there.

        Raises ConfigError.
        """
        self.thread.start()
        self.thread.call(self._open)

    def tell_all(self, data: bytes) -> bytes:
        """Return rank 0's `data`, at most 512 bytes, on every rank. All ranks call this at the same point."""
        if len(data) > _MESSAGE_BYTES:
            raise InternalError(f"{len(data)} bytes are too many to tell")
        return self.thread.call(lambda: self._tell_all(data))

    def close(self) -> None:
        """Join the thread; idempotent."""
        self.thread.close()

    @property
    def is_open(self) -> bool:
        """Whether the ranks have met."""
        return self._group is not None

    @property
    def distributed(self) -> Any:  # noqa: ANN401  (mlx has no name for its type here)
        """The argument of `shard()`. Raises InternalError before `open`."""
        if self._group is None:
            raise InternalError("the ranks have not met")
        return self._group

    def agree(self, token: mx.array) -> mx.array:
        """Return rank 0's token on every rank, as part of the graph; each rank's own may differ in last bits."""
        mine = token if self.rank == 0 else mx.zeros_like(token)
        agreed: mx.array = _distributed.all_sum(mine, group=self.distributed)
        return agreed

    def _open(self) -> None:
        try:
            group = _distributed.init(strict=True, backend="ring")
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"the ranks cannot meet (MLX_RANK, MLX_HOSTFILE): {' '.join(str(error).split())}"
            ) from error
        if (group.rank(), group.size()) != (self.rank, self.size):
            raise ConfigError(f"this is rank {group.rank()} of {group.size()}, not {self.rank} of {self.size}")
        self._group = group

    def _tell_all(self, data: bytes) -> bytes:
        padded = data.ljust(_MESSAGE_BYTES, b"\0") if self.rank == 0 else bytes(_MESSAGE_BYTES)
        numbers = _distributed.all_sum(mx.array(list(padded), dtype=mx.int32), group=self.distributed)
        return bytes(numbers.tolist()).rstrip(b"\0")


def split_model(options: EngineOptions, progress: Progress, group: RankGroup) -> tuple[Model, tuple[Leaf, ...]]:
    """Return this rank's part of the model, and the cache leaves of the whole one.

    Only this part's weights are read. Raises ConfigError for a model that mlx-lm cannot split.
    """
    found: list[tuple[Leaf, ...]] = []

    def split(model: Model) -> None:
        shard = getattr(model.network, "shard", None)
        if shard is None:
            family = model.config.get("model_type", "its family")
            raise ConfigError(
                f"model {options.model!r} cannot be split over {group.size} ranks: mlx-lm has no shard() for {family}"
            )
        found.append(_whole_leaves(model, options))
        for leaf in found[0]:
            for tensor in leaf.tensors if leaf.kind.is_history else ():
                if tensor.shape[0] > 1 and tensor.shape[0] % group.size:
                    raise ConfigError(f"{tensor.shape[0]} KV heads cannot be split over {group.size} ranks")
        try:
            shard(group.distributed)
        except Exception as error:  # a family's own code may raise anything
            raise ConfigError(
                f"model {options.model!r} cannot be split over {group.size} ranks: {one_line(error)}"
            ) from error

    model = load_model(options.model, seed=options.seed, progress=progress, prepare=split)
    mx.eval(model.network.parameters())  # a tiny model's parts are cut only now
    return attrs.evolve(model, agree=group.agree), found[0]


def check_parts(whole: Sequence[Leaf], parts: Sequence[Leaf], tp_size: int) -> None:
    """Raise ConfigError unless the parts are the whole's heads divided by the ranks, as the layout says."""
    expected = [
        tuple((t.name, (local_heads(t.shape[0], tp_size), *t.shape[1:])) for t in leaf.tensors) for leaf in whole
    ]
    if [tuple((t.name, t.shape) for t in leaf.tensors) for leaf in parts] != expected:
        raise ConfigError(f"the model's caches are not its heads divided by {tp_size} ranks; they cannot be moved")


def _whole_leaves(model: Model, options: EngineOptions) -> tuple[Leaf, ...]:
    """Return the caches' leaves from the graph of one prompt, which is never computed, so that no weight is read."""
    caches = list(make_prompt_cache(model.network))
    try:
        model.network(mx.array([[0] * _PROBED]), cache=caches)
        quantise_caches(caches, group_size=options.kv_group_size, bits=options.kv_bits)
    except Exception as error:  # a family's own code may raise anything
        raise ConfigError(f"model {model.name!r} cannot run{with_flags(options)}: {one_line(error)}") from error
    leaves = describe(caches, _PROBED)
    for leaf in leaves:
        if not leaf.kind.is_history:
            raise ConfigError(f"layer {leaf.layer} keeps a state, which pdplane cannot split over ranks")
    return leaves


# ---- Jobs that all ranks of a split model run together: the same turns in the same order on each of them
#
# The forward steps of a split model meet inside collective operations, which wait for every rank and know nothing of
# sequences: two ranks that enter them in another order exchange the wrong numbers or wait for ever. So rank 0 alone
# chooses: a job's first turn comes when every rank has it, and rank 0 sends the others each turn in the order in
# which it queues them for itself. Only rank 0 ends a job early, too. Work without collective operations (copies,
# loading) runs at any time.


T = TypeVar("T")

Tell = Callable[[str, int, str], None]
"""Sends (kind, key, text): rank 0's `turn` and `end` to all others, another rank's `ready` to rank 0."""


_AHEAD = 2
"""Turns of a job that are sent and queued at a time, so that no rank waits for a message between two of them."""


class SharedJob(Job[T]):
    """A job that only rank 0 ends: `cancel` asks for that."""

    def __init__(self, make_turns: Callable[[], Turns[T]], key: int, wake: Callable[[], None]) -> None:
        super().__init__(make_turns)
        self.key, self._wake = key, wake
        self.asked_to_end = False

    def cancel(self) -> None:
        self.asked_to_end = True
        self._wake()


@attrs.define(eq=False)
class _Shared:
    """What one rank knows of one key. `over`: no turn of it will come here any more."""

    over: Future[None] = attrs.field(factory=Future)
    job: SharedJob[Any] | None = None
    marks: dict[int, str] = attrs.field(factory=dict)
    begun: bool = False
    ended: bool = False  # rank 0 has sent its end
    refusal: str | None = None
    chunks: int = 1


class RankThread(EngineThread):
    """The MLX thread of one rank among `size`. `connect` it before the first job is shared."""

    def __init__(self, rank: int, size: int, name: str = "pdplane-mlx") -> None:
        super().__init__(name)
        self.rank, self.size = rank, size
        self._tell: Tell | None = None
        self._broken: Callable[[str], None] = lambda _reason: None
        self._shared: dict[int, _Shared] = {}
        self._ending = False
        self._long: SharedJob[Any] | None = None  # rank 0: the job of several chunks that runs
        self._long_waiting: deque[_Shared] = deque()

    def connect(self, tell: Tell, broken: Callable[[str], None]) -> None:
        """Set how to send to the other ranks.

        `broken` is called when this rank failed a turn that the others may not have.
        """
        self._tell, self._broken = tell, broken

    # ---- a job's life, on every rank

    def expect(self, key: int) -> Future[None]:
        """Expect a job under this key; the returned future ends when no turn of it will come any more."""
        with self._lock:
            if key in self._shared:
                raise InternalError(f"key {key} is in use")
            found = self._shared[key] = _Shared()
            return found.over

    def forget(self, key: int) -> None:
        """Drop a key: its request has ended on all ranks (rank 0), or here (the others)."""
        with self._lock:
            self._shared.pop(key, None)

    def share(
        self,
        make_turns: Callable[[], Turns[T]],
        key: int,
        mark: str,
        line: PromptLine[Job[Any]] | None = None,
        chunks: int = 1,
    ) -> Job[T]:
        """Queue a job as on one rank; `line` is not used, since rank 0 begins prompts of several chunks one by one."""
        with self._lock:
            found = self._shared.get(key)
            if self._executor is None or self._closing or self._ending or found is None or found.job is not None:
                raise InternalError(f"no job can be shared under key {key} now")
            job = SharedJob(make_turns, key, lambda: self._wake(found))
            found.job, found.chunks = job, chunks
            job.future.add_done_callback(lambda _: _settle(found.over))
            if found.ended:
                self._end_here(found)
        if self.rank == 0:
            self.arrived(0, key, mark)
        else:
            self._say("ready", key, mark)
        return job

    def close(self) -> None:
        with self._lock:
            self._ending = True
            for found in self._shared.values():
                self._end_here(found)
        super().close()

    # ---- rank 0

    def arrived(self, rank: int, key: int, mark: str) -> None:
        """Note that a rank has the job; `mark` must be the same on all of them."""
        with self._lock:
            found = self._shared.get(key)
            if found is None:
                return
            found.marks[rank] = mark
            if len(found.marks) < self.size:
                return
            if len(set(found.marks.values())) > 1:
                found.refusal = f"the ranks hold different requests: {found.marks}"
            self._begin(found)

    def abandon(self, key: int) -> None:
        """End a request that failed here before its job: tell the others that none will come."""
        with self._lock:
            found = self._shared.get(key)
            if found is None or found.job is not None or found.ended:
                return
            found.ended = True
            self._say("end", key)
        _settle(found.over)

    # ---- the others

    def turn(self, key: int) -> None:
        """Run the turn here that rank 0 will run."""
        with self._lock:
            found = self._shared.get(key)
            if found is None:
                return  # sent ahead: the job has finished with the turn before it
            if found.job is None:
                self._broken(f"rank 0 runs a turn of {key}, which is not here")
            self._run(found, ends=False)

    def end(self, key: int) -> None:
        """End the job, as rank 0 has."""
        with self._lock:
            found = self._shared.get(key)
            if found is None:
                return
            found.ended = True
            if found.job is not None:
                self._end_here(found)
                return
        _settle(found.over)

    # ---- turns

    def _wake(self, found: _Shared) -> None:
        if self.rank == 0:
            with self._lock:
                self._end_here(found)

    def _begin(self, found: _Shared) -> None:
        """Let a job's turns begin (rank 0, under the lock); jobs with several chunks run one at a time."""
        if found.begun or found.job is None:
            return
        if found.chunks > 1:
            if self._long is not None and not self._long.future.done():
                self._long_waiting.append(found)
                return
            self._long = found.job
            found.job.future.add_done_callback(lambda _: self._begin_next())
        found.begun = True
        for _ in range(_AHEAD):
            self._lead(found)

    def _begin_next(self) -> None:
        with self._lock:
            self._long = None
            while self._long is None and self._long_waiting:
                self._begin(self._long_waiting.popleft())

    def _lead(self, found: _Shared) -> None:
        """Send the job's next turn, or its end, and queue it here, in one order (rank 0, under the lock)."""
        if found.job is None or found.job.future.done() or found.ended:
            return
        found.ended = found.job.asked_to_end or found.refusal is not None
        self._say("end" if found.ended else "turn", found.job.key)
        self._run(found, ends=found.ended)

    def _end_here(self, found: _Shared) -> None:
        """End the job behind the turns that are queued already (under the lock)."""
        if found.job is None:
            return
        found.job.asked_to_end = True
        if self.rank == 0 and not found.ended:
            found.begun = True
            self._lead(found)
        elif self.rank > 0 or not found.begun:
            self._run(found, ends=True)

    def _run(self, found: _Shared, *, ends: bool) -> None:
        """Queue exactly one turn of a job (under the lock); a job that has finished ignores it."""
        job, executor = found.job, self._executor
        if job is None or executor is None or self._closing:
            return

        def turn() -> None:
            if job.future.done():
                return
            if found.refusal is not None:
                job._fail(InternalError(found.refusal))
            elif self._one_turn(job, ends=ends) and self.rank == 0:
                with self._lock:
                    self._lead(found)

        executor.submit(turn).add_done_callback(lambda done: self._report(done, job))

    def _one_turn(self, job: SharedJob[Any], *, ends: bool) -> bool:
        if ends and job.asked_to_end:
            job._cancelled.set()
        return job._turn(closing=ends)

    def _report(self, turn: Future[None], job: Job[Any]) -> None:
        super()._report(turn, job)
        error = turn.exception()
        if error is not None and isinstance(job, SharedJob):
            self._broken(f"a turn failed on this rank: {type(error).__name__}: {error}")

    def _say(self, kind: str, key: int, text: str = "") -> None:
        if self._tell is None:
            raise InternalError("the ranks are not connected")
        self._tell(kind, key, text)


def _settle(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)
