"""Exactness again over the BLAS of mlx's wheel: all other tests compute with OpenBLAS, where that is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdplane.engine.blas import WHEEL

_HERE = Path(__file__).parent

CASES = {
    "engine": ("chunk or window or outgrows", ["engine/test_exactness.py"]),
    "batches": ("tokens_that_they_would_have_alone or equal_lengths", ["engine/test_batch.py"]),
    "prefixes": ("exact", ["engine/test_prefixes.py"]),
    "workers": (
        "test_bits_are_those_of_the_local_model or small_frames or (a_prefix_continues and (llama or gemma3))",
        ["workers/test_remote_experts.py", "workers/test_cache_worker_model.py"],
    ),
}


@pytest.mark.parametrize(("chosen", "files"), CASES.values(), ids=CASES.keys())
def test_bits_over_the_blas_of_the_wheel(chosen: str, files: list[str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
    command += ["--blas", WHEEL, *(str(_HERE / file) for file in files)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_HERE.parent)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
