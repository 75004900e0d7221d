"""The layout that an engine of these options would publish, without an engine: no arena, no node."""

from __future__ import annotations

import attrs

from pdplane.engine.engine import plan
from pdplane.engine.model import load_model
from pdplane.engine.options import EngineOptions, Progress, no_progress
from pdplane.engine.probe import probe
from pdplane.engine.thread import EngineThread
from pdplane.kv.layout import Layout

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
