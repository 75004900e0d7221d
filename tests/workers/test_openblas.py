"""Bits of the workers again over OpenBLAS."""

from __future__ import annotations

from pathlib import Path

from tests.openblas import run_over_openblas

_HERE = Path(__file__).parent


def test_bits_over_openblas() -> None:
    chosen = "test_bits_are_those_of_the_local_model or small_frames or (a_prefix_continues and (llama or gemma3))"
    run_over_openblas(chosen, _HERE / "test_remote_experts.py", _HERE / "test_cache_worker_model.py")
