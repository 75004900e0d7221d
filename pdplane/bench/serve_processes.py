"""The servers that `pdplane bench serve` starts, each on its cores; all end with the `with`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from pdplane.errors import ConfigError
from pdplane.net import JsonLines

_START_S = 600.0
_END_S = 30.0
_LOOK_S = 0.1


@contextlib.contextmanager
def running_pdplane(model: str, blas: str) -> Iterator[str]:
    """Run a prefill and a decode daemon, each on half the cores, and `pdplane serve` for both; yield its URL."""
    first, second = _halves()
    daemon = ["--model", model, "--blas", blas, "--port", "0"]
    with contextlib.ExitStack() as stack:
        prefill = _start(stack, ["pdplane.cli.main", "prefill", *daemon, "--bootstrap-port", "0", *_QUIET], first)
        decode = _start(stack, ["pdplane.cli.main", "decode", *daemon, *_QUIET], second)
        where = [f"http://{_hear(each)['http']}" for each in (prefill, decode)]
        front = ["pdplane.cli.main", "serve", "--prefill", where[0], "--decode", where[1], "--port", "0", *_QUIET]
        yield f"http://{_hear(_start(stack, front, first | second))['http']}"


@contextlib.contextmanager
def running_mlx_lm(model: str, blas: str) -> Iterator[tuple[str, str]]:
    """Run mlx_lm.server on all cores; yield its URL and its BLAS. Raises ConfigError when it does not start."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # free again for the server, which cannot choose one itself
    with contextlib.ExitStack() as stack:
        words = ["pdplane.engine.mlx_server", "--model", model, "--blas", blas, "--port", str(port)]
        process = _start(stack, words, _cores())
        name = str(_hear(process)["blas"])
        _wait_for(process, port)
        yield f"http://127.0.0.1:{port}", name


_QUIET = ("--exit-with-parent", "--log-level", "error")


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _halves() -> tuple[set[int], set[int]]:
    cores = sorted(_cores())
    middle = len(cores) // 2
    return (set(cores[:middle]), set(cores[middle:])) if middle else (set(cores), set(cores))


def _start(stack: contextlib.ExitStack, words: Sequence[str], cores: Collection[int]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-m", *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.callback(_end, process)
    if cores and hasattr(os, "sched_setaffinity"):  # at once, so that all its threads are started there
        os.sched_setaffinity(process.pid, cores)
    return process


def _hear(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    try:
        said = JsonLines(process.stdout).receive(_START_S)
    except (EOFError, TimeoutError):
        raise ConfigError("a server did not start; its reason stands above") from None
    assert isinstance(said, dict), "a server says where it listens"
    return said


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(_LOOK_S)
    raise ConfigError("mlx_lm.server did not start; its reason stands above")


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "a pipe was asked for"
    assert process.stdout is not None, "a pipe was asked for"
    process.stdin.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
