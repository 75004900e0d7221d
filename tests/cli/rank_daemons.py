"""Daemons that `mlx.launch` starts as ranks of one split model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdplane.api import GREEDY, Sampling
from pdplane.ids import Endpoint, new_room
from tests.cli.daemons import PATIENCE_S, command
from tests.cli.processes import descendants, wait_gone
from tests.free_ports import free_ports
from tests.http_client import ask

LAUNCHER = Path(sys.executable).parent / "mlx.launch"
needs_launcher = pytest.mark.skipif(not LAUNCHER.exists(), reason="mlx.launch is not beside this Python")

STEP = 32
FLAGS = (
    "--prefill-step-size", str(STEP), "--block-tokens", "16", "--arena-bytes", "4MiB", "--ping-interval", "1s",
    "--bootstrap-timeout", "20s", "--drain-timeout", "2s",
)  # fmt: skip


class RankedDaemon:
    """One role on `size` ranks. The launcher keeps a core busy for itself; without it the ranks get what it tells them.

    `process` is the launcher, or rank 0.
    """

    def __init__(self, role: str, size: int, model: str, *, launcher: bool = True) -> None:
        ports = ["--port", "0"] + (["--bootstrap-port", "0"] if role == "prefill" else [])
        words = command(role, "--model", model, *FLAGS, *ports)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed in `close`)
        self._hosts = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  (closed in `close`)
        self.ready: dict[str, Any] = {}
        self.everybody: set[int] = set()
        hosts = free_ports(size)
        if launcher:
            words = [str(LAUNCHER), "-n", str(size), "--starting-port", str(hosts[0]), "--", *words]
            self._processes = [self._start(words)]
        else:
            json.dump([[f"127.0.0.1:{port}"] for port in hosts], self._hosts)
            self._hosts.flush()
            self._processes = [
                self._start(words, MLX_RANK=str(rank), MLX_HOSTFILE=self._hosts.name) for rank in range(size)
            ]
        self.process = self._processes[0]

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.ready = json.loads(line)
                break
        assert self.ready, self.log
        self.everybody = self._everybody()

    @property
    def http(self) -> Endpoint:
        return Endpoint.parse(self.ready["http"])

    @property
    def first(self) -> int:
        """Rank 0's process."""
        return int(self.ready["pid"])

    @property
    def others(self) -> set[int]:
        """Every other rank's."""
        return {pid for pid in self._everybody() if pid != self.first and b"pdplane.cli.main" in _command(pid)} - {
            process.pid for process in self._processes if b"mlx.launch" in _command(process.pid)
        }

    @property
    def log(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def ask_to_end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()

    def close(self) -> None:
        """Ask all to end, wait until they have; fails for those that stay."""
        everybody = self.everybody | self._everybody()
        self.ask_to_end()
        try:
            for process in self._processes:
                process.wait(PATIENCE_S)
            wait_gone(everybody)
        finally:
            self._let_go(everybody)

    def _start(self, words: list[str], **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,  # open as long as we are; the launcher reads an ended one in a circle
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | variables,
        )

    def _everybody(self) -> set[int]:
        own = {process.pid for process in self._processes}
        return own.union(*map(descendants, own))

    def _let_go(self, everybody: set[int]) -> None:
        for pid in everybody:
            if b"pdplane.cli.main" in _command(pid):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._errors.close()
        self._hosts.close()


@contextmanager
def ranked(*wanted: tuple[str, int], model: str, launcher: bool = True) -> Iterator[list[RankedDaemon]]:
    """Start (role, size) side by side; closes them all."""
    with ExitStack() as stack:
        found = [
            stack.enter_context(closing(RankedDaemon(role, size, model, launcher=launcher and size > 1)))
            for role, size in wanted
        ]
        for daemon in found:
            daemon.wait_ready()
        yield found
        for daemon in found:
            daemon.ask_to_end()


def generate(
    prefill: RankedDaemon, decode: RankedDaemon, tokens: list[int], count: int, sampling: Sampling = GREEDY
) -> list[int]:
    """One room through both; the ids that decode gives."""
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "sampling_seed": sampling.seed}
    bootstrap = Endpoint.parse(prefill.ready["bootstrap"])
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": count, "ignore_eos": True, **drawn},
        "bootstrap_host": bootstrap.host,
        "bootstrap_port": bootstrap.port,
        "bootstrap_room": new_room(),
    }
    with ThreadPoolExecutor(2) as both:
        work = both.submit(ask, prefill.http, "POST", "/generate", body)
        waiting = both.submit(ask, decode.http, "POST", "/generate", body)
        answers = work.result(), waiting.result()
    assert [answer.status for answer in answers] == [200, 200], [answer.body for answer in answers]
    ids: list[int] = answers[1].json["output_ids"]
    return ids


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
