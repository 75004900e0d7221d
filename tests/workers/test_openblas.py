"""Bits again over OpenBLAS, which tells apart what the bundled BLAS does not: other chunks, groups, strides of rows."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_CHOSEN = "test_bits_are_those_of_the_local_model or small_frames or (a_prefix_continues and (llama or gemma3))"
# A library that the loader cannot find is skipped with no more than a warning, so its presence is looked at first.
_CODE = (
    "import pathlib, sys, pytest; assert 'openblas' in pathlib.Path('/proc/self/maps').read_text(); "
    "sys.exit(pytest.main(sys.argv[1:]))"
)


def test_bits_over_openblas() -> None:
    library = ctypes.util.find_library("openblas")
    if library is None:
        pytest.skip("no OpenBLAS here; Debian's package is libopenblas0")
    environment = {**os.environ, "LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"}
    files = [str(_HERE / name) for name in ("test_remote_experts.py", "test_cache_worker_model.py")]
    command = [sys.executable, "-c", _CODE, "-q", "-p", "no:cacheprovider", "-k", _CHOSEN, *files]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=_HERE.parents[1])
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
