"""Importing the library, and its sans-IO parts, loads no socket library, no web framework and no MLX."""

from __future__ import annotations

import subprocess
import sys

import pytest

_HEAVY = ("zmq", "aiohttp", "mlx", "mlx_lm", "transformers", "prometheus_client", "rich")


@pytest.mark.parametrize(
    "module", ["pdplane", "pdplane.wire", "pdplane.machine", "pdplane.kv.arena", "pdplane.security"]
)
def test_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {_HEAVY!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
