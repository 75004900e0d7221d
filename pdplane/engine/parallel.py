"""One model over several ranks: `mx.distributed`, mlx-lm's own `shard()`, and what each rank then holds.

Everything here that touches MLX runs on the group's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from pdplane.engine.caches import Leaf, describe
from pdplane.engine.lockstep import RankThread
from pdplane.engine.model import Model, load_model
from pdplane.engine.options import EngineOptions, Progress
from pdplane.engine.untyped import quantise_caches
from pdplane.errors import ConfigError, InternalError
from pdplane.kv.token_major import local_heads

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
        """Meet the other ranks over the ring that the launcher described; blocks until all are there.

        Raises ConfigError.
        """
        self.thread.start()
        self.thread.call(self._open)

    def tell_all(self, data: bytes) -> bytes:
        """Rank 0's `data`, at most 512 bytes, on every rank. All ranks call this at the same point."""
        if len(data) > _MESSAGE_BYTES:
            raise InternalError(f"{len(data)} bytes are too many to tell")
        return self.thread.call(lambda: self._tell_all(data))

    def close(self) -> None:
        """Join the thread; idempotent."""
        self.thread.close()

    @property
    def is_open(self) -> bool:
        """The ranks have met."""
        return self._group is not None

    @property
    def distributed(self) -> Any:  # noqa: ANN401  (mlx has no name for its type here)
        """What `shard()` takes; InternalError before `open`."""
        if self._group is None:
            raise InternalError("the ranks have not met")
        return self._group

    def agree(self, token: mx.array) -> mx.array:
        """Rank 0's token on every rank, as part of the graph: sums of more than two parts may differ in last bits."""
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
    """This rank's part of the model, and the cache leaves of the whole one.

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
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"model {options.model!r} cannot be split over {group.size} ranks: {reason}") from error

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
    """What the caches would look like: the graph of one prompt is made and never computed, so no weight is read."""
    caches = list(make_prompt_cache(model.network))
    try:
        model.network(mx.array([[0] * _PROBED]), cache=caches)
        quantise_caches(caches, group_size=options.kv_group_size, bits=options.kv_bits)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"model {model.name!r} cannot run with these options: {reason}") from error
    leaves = describe(caches, _PROBED)
    for leaf in leaves:
        if not leaf.kind.is_history:
            raise ConfigError(f"layer {leaf.layer} keeps a state, which pdplane cannot split over ranks")
    return leaves
