"""Daemons and `pdplane serve` as processes of their own, on the toy engine: no MLX needed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from pdplane.ids import Endpoint

PATIENCE_S = 30


def command(*words: str) -> list[str]:
    """The command line of this checkout's pdplane."""
    return [sys.executable, "-m", "pdplane.cli.main", *words]


class Daemon:
    """`pdplane ROLE --model toy` on free ports; `ready` is its ready line. `before` is a program that runs it."""

    def __init__(self, role: str, *flags: str, module: str = "pdplane.cli.main", before: Sequence[str] = ()) -> None:
        ports = ["--port", "0"] + (["--bootstrap-port", "0"] if role == "prefill" else [])
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", module, role, "--model", "toy", *ports, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self.ready: dict[str, Any] = {}

    def wait_ready(self) -> dict[str, Any]:
        """The ready line; fails with the log when the daemon ends before it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()
        self.ready = json.loads(line)
        return self.ready

    @property
    def http(self) -> Endpoint:
        return Endpoint.parse(self.ready["http"])

    @property
    def url(self) -> str:
        return f"http://{self.ready['http']}"

    def end(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """Send a signal and wait: exit code and log."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        return code, "".join(self.log)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.end()


class Served:
    """A running `pdplane serve`."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            command("serve", "--port", "0", *flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()
        self.at = Endpoint.parse(json.loads(line)["http"])

    def ask(self, path: str, body: object = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self.at.host, self.at.port, timeout=PATIENCE_S)
        try:
            connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def wait_healthy(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.ask("/health")[0] != 200:
            assert time.monotonic() < deadline, self.ask("/health")
            time.sleep(0.05)

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str]:
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, log
