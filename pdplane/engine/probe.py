"""Finding out what a model's caches look like, by running two short prompts through it. Runs on the MLX thread."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from pdplane.engine.caches import Leaf, describe, refuse_unknown, walk
from pdplane.engine.forward import Forward
from pdplane.engine.model import Model, one_line
from pdplane.engine.options import EngineOptions
from pdplane.engine.token_pages import refuse_inexpressible
from pdplane.engine.untyped import Cache
from pdplane.errors import ConfigError

_LENGTHS = (1, 4)  # one token alone, and a chunk with its last token; a tensor that differs between them is refused

_BROKEN = {"phi3small": "mlx-lm's own code for phi3small crashes the process"}


def probe(model: Model, options: EngineOptions) -> tuple[Leaf, ...]:
    """Return the model's cache leaves, the same for every prompt length.

    Raises ConfigError for a cache that cannot be moved, or a model that cannot run with these options here.
    """
    if reason := _BROKEN.get(str(model.config.get("model_type"))):
        raise ConfigError(f"model {model.name!r} cannot run: {reason}")
    caches = make_prompt_cache(model.network)
    refuse_unknown(caches)
    if options.page_layout == "nhd":
        refuse_inexpressible(caches)
    if options.kv_bits is not None:
        _refuse_rings(caches)
    found = [_leaves_after(model, options, length) for length in _LENGTHS]
    for short, longer in zip(*found, strict=False):
        if short != longer:
            raise ConfigError(f"the cache of layer {short.layer} changes its shape with the prompt; it cannot be moved")
    if len(found[0]) != len(found[1]):
        raise ConfigError("the model fills other caches for other prompts; they cannot be moved")
    return found[0]


def _refuse_rings(caches: Sequence[Cache]) -> None:
    for layer, _, cache in walk(caches):
        if isinstance(cache, RotatingKVCache):
            raise ConfigError(f"layer {layer} keeps a RotatingKVCache, which cannot be quantised (--kv-bits)")


def _leaves_after(model: Model, options: EngineOptions, length: int) -> tuple[Leaf, ...]:
    forward = Forward(model, options)
    try:
        for _ in forward.prefill_chunks([0] * length):
            pass
        forward.step(mx.array(0)).read()
    except Exception as error:  # a family's own code may raise anything
        raise ConfigError(f"model {model.name!r} cannot run{with_flags(options)}: {one_line(error)}") from error
    return describe(forward.caches, length)


def with_flags(options: EngineOptions) -> str:
    """Return the flags that a family of models may not bear, as an error names them."""
    if options.kv_bits is None:
        return ""
    return f" with --kv-bits {options.kv_bits} --kv-group-size {options.kv_group_size}"
