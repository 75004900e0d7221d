"""The yardstick: the same model in one process, by mlx-lm's own generation loop."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from pdplane.api import GREEDY, Sampling
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.sampling import RowToken
from pdplane.engine.untyped import number
from pdplane.engine.views import row_of


def single_process(
    model: Model,
    tokens: Sequence[int],
    max_tokens: int,
    options: EngineOptions,
    *,
    sampling: Sampling = GREEDY,
    kept: Sequence[int] = (),
    stop_ids: frozenset[int] = frozenset(),
) -> list[RowToken]:
    """Return tokens with their rows of log-probabilities; a token of `stop_ids` is the last. Runs on the MLX thread.

    Sampling is mlx-lm's own, with its global random state. `kept` as in `Sampler`.
    """
    if sampling.seed is not None:
        mx.random.seed(sampling.seed)
    found: list[RowToken] = []
    steps = generate_step(
        mx.array(list(tokens)),
        model.network,
        max_tokens=max_tokens,
        prefill_step_size=options.prefill_step_size,
        kv_bits=options.kv_bits,
        kv_group_size=options.kv_group_size,
        quantized_kv_start=0,
        sampler=make_sampler(
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            1,
            sampling.top_k,
            sampling.xtc_probability,
            sampling.xtc_threshold,
            list(kept),
        ),
        logits_processors=make_logits_processors(
            dict(sampling.logit_bias),
            sampling.repetition_penalty,
            sampling.repetition_context_size,
            sampling.presence_penalty,
            sampling.presence_context_size,
            sampling.frequency_penalty,
            sampling.frequency_context_size,
        ),
    )
    for token, logprobs in steps:
        chosen = int(token)
        found.append(RowToken(id=chosen, logprob=float(number(logprobs[chosen])), row=row_of(logprobs)))
        if chosen in stop_ids or len(found) == max_tokens:
            break
    return found
