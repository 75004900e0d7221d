"""Exactness again over OpenBLAS, under which a prompt that is cut in another way has other logprobs."""

from __future__ import annotations

from pathlib import Path

from tests.openblas import run_over_openblas


def test_bits_over_openblas() -> None:
    run_over_openblas("chunk or window or outgrows", Path(__file__).parent / "test_exactness.py")
