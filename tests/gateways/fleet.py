"""A real gateway as a process, in front of one prefill and two decode daemons with toy engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import openai

from pdplane.ids import Endpoint
from tests.cli.daemons import Daemon
from tests.free_ports import free_ports
from tests.http_client import Answer, ask
from tests.waiting import PATIENCE_S, until

GATEWAYS = {"smg": ("smg", "launch"), "sglang-router": ("sglang_router.launch_router",)}
"""By name: the module that starts it, and its first words. (Both packages install a program `smg`; modules differ.)"""
DEADLINE_S = 5.0
"""Of a half whose peer never comes; no request through a gateway may take much longer than this."""
CALM = ("--disable-retries", "--disable-circuit-breaker")


class Gateway:
    """One of `GATEWAYS`, which looks after its workers' health each second and takes decodes in turn."""

    def __init__(self, name: str, at: int, metrics: int, workers: tuple[str, ...], flags: tuple[str, ...]) -> None:
        module, *words = GATEWAYS[name]
        self.at = Endpoint("127.0.0.1", at)
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", module, *words, "--host", "127.0.0.1", "--port", str(at), "--pd-disaggregation",
                *workers, "--policy", "round_robin", "--prometheus-port", str(metrics),
                "--health-check-interval-secs", "1", "--worker-startup-check-interval", "1", *flags,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.log.extend(self._process.stdout)

    def end(self) -> None:
        """Kill it: it holds nothing of ours."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Fleet:
    """The daemons, at ports that a restart keeps, and the gateway."""

    def __init__(self, name: str, *flags: str) -> None:
        self.ports = free_ports(6)
        self.prefill = self.start("prefill")
        self.decodes = [self.start("decode", 0), self.start("decode", 1)]
        workers = ("--prefill", self.prefill.url, str(self.ports[1]))
        for decode in self.decodes:
            workers += ("--decode", decode.url)
        self.gateway = Gateway(name, self.ports[4], self.ports[5], workers, flags)

    def start(self, role: str, number: int = 0) -> Daemon:
        """Start a daemon at its port and wait until it can serve."""
        own = ("--bootstrap-port", str(self.ports[1])) if role == "prefill" else ("--decode-cache-bytes", "512KiB")
        port = self.ports[0] if role == "prefill" else self.ports[2 + number]
        # Of a flag that is given twice the last one counts.
        daemon = Daemon(
            role, "--port", str(port), *own, "--served-model-name", "toy", "--peer-timeout", f"{DEADLINE_S}s",
            "--ping-interval", "500ms", "--drain-timeout", "10s",
        )  # fmt: skip
        daemon.wait_ready()
        return daemon

    @property
    def daemons(self) -> list[Daemon]:
        return [self.prefill, *self.decodes]

    def client(self) -> openai.OpenAI:
        """A client of the gateway that tries once, and gives up where a deadline has failed."""
        return openai.OpenAI(
            base_url=f"http://{self.gateway.at}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S + PATIENCE_S
        )

    def wait_serving(self) -> None:
        """Wait until the gateway gets answers from both decodes."""
        seen: set[int] = set()

        def both() -> bool:
            before = self.served()
            if self.answers():
                seen.update(index for index, count in enumerate(self.served()) if count > before[index])
            return seen == {0, 1}

        until(both, "an answer of each decode", within_s=60)

    def answers(self) -> bool:
        """Whether the gateway is up and has an answer."""
        body = {"model": "toy", "prompt": "x", "max_tokens": 1}
        with contextlib.suppress(OSError):
            return self.post("/v1/completions", body).status == 200
        return False

    def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Ask the gateway without a client's help; it wants to be told that this is JSON."""
        return ask(self.gateway.at, "POST", path, body, {"Content-Type": "application/json"})

    def served(self) -> list[float]:
        """How many requests each decode has let in."""
        found = []
        for decode in self.decodes:
            lines = ask(decode.http, "GET", "/metrics").body.splitlines()
            found += [float(line.split()[1]) for line in lines if line.startswith("pdplane_num_requests_total ")]
        return found

    def statistics(self) -> list[dict[str, Any]]:
        """Every count of every daemon that runs."""
        running = [daemon for daemon in self.daemons if daemon.process.poll() is None]
        return [json.loads(ask(daemon.http, "GET", "/statistics").body) for daemon in running]

    def wait_idle(self) -> None:
        """Wait until no daemon has a leg or lends a block."""
        until(
            lambda: not any(counts["legs"] or counts["blocks"]["used_blocks"] for counts in self.statistics()),
            "no legs and no lent blocks",
        )

    def __enter__(self) -> Self:
        try:
            self.wait_serving()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self.gateway.end()
        for daemon in self.daemons:
            daemon.end()
