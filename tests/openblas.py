"""Runs chosen tests over OpenBLAS, which tells apart what the bundled BLAS does not: other chunks, other strides."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A library that the loader cannot find is skipped with no more than a warning, so its presence is looked at first.
_CODE = (
    "import pathlib, sys, pytest; assert 'openblas' in pathlib.Path('/proc/self/maps').read_text(); "
    "sys.exit(pytest.main(sys.argv[1:]))"
)


def run_over_openblas(chosen: str, *files: Path) -> None:
    """Run the files' tests that `-k chosen` names in a process with OpenBLAS preloaded; skips where there is none."""
    library = ctypes.util.find_library("openblas")
    if library is None:
        pytest.skip("no OpenBLAS here; Debian's package is libopenblas0")
    environment = {**os.environ, "LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _CODE, "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
    command += [str(file) for file in files]
    root = Path(__file__).parents[1]
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=root)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-1000:]
