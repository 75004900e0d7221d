"""The yardstick: the same model in one process, by mlx-lm's own generation loop."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generate_step

from pdplane.engine.decode import Token
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import number
from pdplane.engine.views import row_of


def single_process(
    model: Model,
    tokens: Sequence[int],
    max_tokens: int,
    options: EngineOptions,
    *,
    stop_ids: frozenset[int] = frozenset(),
    keep_rows: bool = False,
) -> list[Token]:
    """Greedy tokens with their log-probabilities; a token of `stop_ids` is the last. Runs on the MLX thread."""
    found: list[Token] = []
    steps = generate_step(
        mx.array(list(tokens)),
        model.network,
        max_tokens=max_tokens,
        prefill_step_size=options.prefill_step_size,
        kv_bits=options.kv_bits,
        kv_group_size=options.kv_group_size,
        quantized_kv_start=0,
    )
    for token, logprobs in steps:
        chosen = int(token)
        found.append(Token(chosen, float(number(logprobs[chosen])), row_of(logprobs) if keep_rows else None))
        if chosen in stop_ids or len(found) == max_tokens:
            break
    return found
