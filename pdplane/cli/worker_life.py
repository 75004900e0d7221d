"""A worker from start to end: start, print the ready line, wait for a signal or a shutdown, close.

HTTP if asked for.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Protocol

import attrs
from aiohttp import web

from pdplane.cli.flags import add_log_flags
from pdplane.cli.process import END_S, StopSignal, exit_with_parent
from pdplane.control.http_thread import HttpThread
from pdplane.ids import Endpoint
from pdplane.net import reached
from pdplane.options import port

_LOOK_S = 0.1


class Worker(Protocol):
    """What both workers can do."""

    def start(self) -> Endpoint: ...

    def close(self) -> None: ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether a client has ended the worker."""

    def trouble(self) -> str | None:
        """Return which thread does not go on, None while all do."""

    def statistics(self) -> attrs.AttrsInstance: ...


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that both workers have."""
    running = parser.add_argument_group("running")
    running.add_argument(
        "--http-port",
        type=port,
        metavar="PORT",
        help="loopback port on which /health, /statistics and /metrics are served (default: none)",
    )
    running.add_argument(
        "--exit-with-parent", action="store_true", help="end when standard input, a pipe from the parent, ends"
    )
    add_log_flags(running)


def run_worker(role: str, worker: Worker, args: argparse.Namespace, model: Callable[[], str]) -> int:
    """Run until a signal or a client ends it; return the exit code. Raises ConfigError with nothing left open."""
    stop, http = StopSignal(END_S), HttpThread()
    with stop.listening():
        if args.exit_with_parent:
            exit_with_parent()
        try:
            served = _serve_http(http, role, worker, args.http_port)
            with stop.interrupting():
                endpoint = reached(worker.start())
            ready = {
                "event": "ready",
                "role": role,
                "listen": str(endpoint),
                "model": model(),
                "pid": os.getpid(),
            }
            print(json.dumps({**ready, "http": None if served is None else str(served)}), flush=True)
            while not stop.wait(_LOOK_S) and not worker.wait(0):
                pass
        except KeyboardInterrupt:
            return 0
        finally:
            stop.ends()
            worker.close()
            http.close()
    return 0


def worker_app(role: str, worker: Worker) -> web.Application:
    """Return an application with `/health`, `/statistics` as JSON and `/metrics` for Prometheus."""
    prefix = f"pdplane_{role.replace('-', '_')}"

    async def health(_request: web.Request) -> web.Response:
        trouble = worker.trouble()
        return web.json_response({"status": trouble or "ok", "role": role}, status=503 if trouble else 200)

    async def statistics(_request: web.Request) -> web.Response:
        return web.json_response(attrs.asdict(worker.statistics()))

    async def metrics(_request: web.Request) -> web.Response:
        counts = attrs.asdict(worker.statistics())
        lines = [f"# TYPE {prefix}_{name} gauge\n{prefix}_{name} {value}\n" for name, value in counts.items()]
        return web.Response(text="".join(lines), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/statistics", statistics)
    app.router.add_get("/metrics", metrics)
    return app


def _serve_http(http: HttpThread, role: str, worker: Worker, number: int | None) -> Endpoint | None:
    if number is None:
        return None
    http.start()
    return http.serve(worker_app(role, worker), "127.0.0.1", number)
