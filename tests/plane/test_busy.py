"""Planes beside Python threads that compute: slow, and nothing fails."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.plane.busy_side import ROOMS


@contextmanager
def side(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.plane.busy_side", *words]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2], text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "hold",
    [1, pytest.param(100_000_000, marks=pytest.mark.slow)],  # 1.4 s at a time where this was written
    ids=["spins", "holds the interpreter"],
)
def test_a_busy_process_declares_nobody_dead(hold: int) -> None:
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(side("prefill", str(hold)))
        decode = stack.enter_context(side("decode", str(hold), says(prefill)))
        assert [says(decode) for _ in ROOMS] == [str(room) for room in ROOMS]
