"""Who descends from a process, and whether anybody of them is left: read from /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

PATIENCE_S = 30.0


def descendants(pid: int) -> set[int]:
    """Every living process below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            parents[int(entry.name)] = parent
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= more
    return found


def wait_gone(pids: set[int]) -> None:
    """Wait until none of the processes runs; fails with the command lines of those that stay."""
    deadline = time.monotonic() + PATIENCE_S
    while left := {pid for pid in pids if _parent(Path(f"/proc/{pid}")) is not None}:
        if time.monotonic() > deadline:
            pytest.fail(f"still running: {[_command(pid) for pid in left]}")
        time.sleep(0.02)


def _parent(folder: Path) -> int | None:
    try:
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)  # a zombie has ended; only its parent has not asked yet


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return f"{pid}"


def shared_memory() -> set[str]:
    """Names of shared memory files of this machine."""
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
