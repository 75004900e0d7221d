"""Workers as processes of their own for a benchmark: started, awaited, and ended with their standard input."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.net import JsonLines

_END_S = 30.0


@contextlib.contextmanager
def worker_processes(*commands: Sequence[str]) -> Iterator[list[Endpoint]]:
    """Run `pdplane COMMAND ...` for each and yield where they listen. Raises ConfigError when one does not start."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pdplane.cli.main", *command, "--exit-with-parent", "--log-level", "error"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for command in commands
    ]  # fmt: skip
    try:
        yield [_listening(process) for process in processes]
    finally:
        for process in processes:
            _end(process)


def _listening(process: subprocess.Popen[bytes]) -> Endpoint:
    try:
        said = JsonLines(process.stdout).receive()
    except EOFError:
        raise ConfigError("a worker did not start; its reason stands above") from None
    assert isinstance(said, dict), "a worker says where it listens"
    return Endpoint.parse(str(said["listen"]))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
