"""How an engine is set up; plain values, so a command line can make them without loading MLX."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdplane.errors import ConfigError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done, total); total 0 when unknown."""

KV_BITS = (2, 3, 4, 6, 8)
PAGE_LAYOUTS = ("hnd", "nhd")
KV_GROUP_SIZES = (32, 64, 128)


def no_progress(name: str, done: int, total: int) -> None:
    """Ignore the progress."""


_LEAST = {
    "prefill_step_size": 1, "block_tokens": 1, "arena_bytes": 1, "assemble_ahead_bytes": 1, "decode_concurrency": 1,
    "layerwise_interval": 0, "prompt_cache_bytes": 0, "context_length": 1,
}  # fmt: skip


@attrs.frozen
class EngineOptions:
    """What a prefill and a decode engine must agree on, and the size of the arena.

    `model` is an mlx-lm model directory, a hub id, a `.gguf` file, `smollm2` (`smollm2-f32` unpacks its weights), or
    `tiny:FAMILY`; `seed` is used by the tiny models only. `kv_bits` quantises the KV cache from the first chunk on.
    """

    model: str
    prefill_step_size: int = 2048
    block_tokens: int = 32
    arena_bytes: int = 1 << 30
    kv_bits: int | None = None
    kv_group_size: int = 64
    seed: int = 0
    page_layout: str = "hnd"
    """`hnd`: head-major pages of every cache, bit for bit; `nhd`: token-major pages, as legacy engines publish."""
    layerwise_interval: int = 1
    """Layers whose pages prefill sends together while it computes the next ones; 0: all of them at the end."""

    exact: bool = False
    """Bits before speed: decode runs each sequence alone, in turns, and its bits are those of one mlx-lm process."""

    decode_concurrency: int = 32
    """How many sequences take steps together in decode's batch; the others wait with their first token."""

    prompt_cache_bytes: int = 1 << 30
    """How much prefill keeps of the caches of prompts, and decode of sequences, for prompts that begin alike; 0 keeps
    nothing."""

    context_length: int | None = None
    """The longest sequence to take, in place of the one that the model's config names."""

    assemble_ahead_bytes: int = 1 << 20
    """Decode copies what has landed once it is this much; less is left for the end, where it takes a moment."""

    def __attrs_post_init__(self) -> None:
        if self.page_layout not in PAGE_LAYOUTS:
            raise ConfigError(f"page_layout must be one of {', '.join(PAGE_LAYOUTS)}, not {self.page_layout!r}")
        if self.page_layout == "nhd" and self.kv_bits is not None:
            raise ConfigError("legacy pages (nhd) cannot express a quantised KV cache: drop kv_bits or take hnd")
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise ConfigError(f"kv_bits must be one of {', '.join(map(str, KV_BITS))}, not {self.kv_bits}")
        if self.kv_group_size not in KV_GROUP_SIZES:
            raise ConfigError(
                f"kv_group_size must be one of {', '.join(map(str, KV_GROUP_SIZES))}, not {self.kv_group_size}"
            )
