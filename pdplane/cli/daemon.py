"""A daemon from start to end: serve HTTP, start the node, print the ready line, wait for a signal, drain, close."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

from aiohttp import web

from pdplane.api import Node
from pdplane.cli.flags import DaemonOptions
from pdplane.cli.process import END_S, StopSignal, exit_with_parent
from pdplane.control.http_thread import HttpThread
from pdplane.engine.blas import AUTO, use_blas
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.net import reached
from pdplane.plane.config import PlaneConfig, is_loopback
from pdplane.serving.errors import key_needed
from pdplane.transport.vector import take_turns_often

logger = logging.getLogger(__name__)

N = TypeVar("N", bound=Node, covariant=True)

INSTALL_MLX = "the MLX engine is not installed: pip install 'pdplane[mlx]'"
_LOOK_S = 0.1


class MakeNode(Protocol[N]):
    """How a role makes its node."""

    def __call__(self, http: HttpThread, facts: Mapping[str, Any]) -> N: ...


def run_daemon(
    role: str,
    options: DaemonOptions,
    config: PlaneConfig,
    make_node: MakeNode[N],
    make_app: Callable[[N], web.Application],
    on_end: Callable[[], None] = lambda: None,
) -> int:
    """Run until a signal comes; return the exit code. `on_end` is called before the node is closed.

    Raises ConfigError with nothing left open.
    """
    _warn_of_addresses(config)
    take_turns_often()
    stop, http = StopSignal(options.drain_timeout_s + END_S), HttpThread()
    with stop.listening():
        if options.exit_with_parent:
            exit_with_parent()
        http.start()
        try:
            facts = {
                "model_path": options.engine.model,
                "served_model_name": options.served_model_name,
                "max_running_requests": options.max_waiting,
            }
            node = make_node(http, facts)
            # Before the model is loaded: a busy port shows at once, and /health answers 503 meanwhile.
            app = make_app(node)
            if options.api_key is not None:
                app.middlewares.append(key_needed(options.api_key))
            endpoint = http.serve(app, options.host, options.http_port, options.tls)
            try:
                with stop.interrupting():
                    node.start()
                return _serve(role, endpoint, node, stop)
            except KeyboardInterrupt:
                return 0
            finally:
                stop.ends()
                on_end()
                node.close(options.drain_timeout_s)
        finally:
            http.close()


def _serve(role: str, endpoint: Endpoint, node: Node, stop: StopSignal) -> int:
    while not node.ready:
        if stop.wait(_LOOK_S):
            return 0
        if not node.alive:
            return _died(role)
    print(json.dumps(ready_line(role, endpoint, node.info())), flush=True)
    trouble: str | None = None
    while not stop.wait(_LOOK_S):
        if not node.alive:
            return _died(role)
        before, trouble = trouble, node.trouble()
        if trouble is not None and before is None:  # an edge; /health shows the state
            logger.error("%s: %s", role, trouble)
    logger.info("%s stops: no new requests, what runs may finish", role)
    return 0


def ready_line(role: str, http: Endpoint, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ready line's values: the role and every address, None where there is none."""
    host, port = info.get("bootstrap_host"), info.get("bootstrap_port")
    return {
        "event": "ready",
        "role": role,
        "http": str(reached(http, info.get("advertised"))),
        "bootstrap": str(Endpoint(host, port)) if host and port else None,
        "control": info.get("control"),
        "data": info.get("data"),
        "transport": info.get("transport"),
        "model": info.get("model_path"),
        "pid": os.getpid(),
    }


def _died(role: str) -> int:
    print(f"pdplane {role}: a thread or a rank of the node is gone; see the log", file=sys.stderr)
    return 1


def _warn_of_addresses(config: PlaneConfig) -> None:
    if is_loopback(config.host):
        return
    safety = "with" if config.secret else "without"
    logger.warning("listening on %s, which other machines can reach, %s a secret", config.host, safety)
    if is_loopback(config.advertised):
        logger.warning("peers are told %s, which only this machine can reach; see --advertise-host", config.advertised)


@contextmanager
def mlx_needed(blas: str = AUTO) -> Iterator[None]:
    """Load the BLAS library for an import of MLX inside; turn a missing MLX into one line that says what to install.

    Raises ConfigError for that, and for a library that is not available.
    """
    if find_spec("mlx") is None:
        raise ConfigError(INSTALL_MLX)
    use_blas(blas)
    try:
        with _limits_kept():
            yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mlx", "mlx_lm"):
            raise
        raise ConfigError(INSTALL_MLX) from error


@contextmanager
def _limits_kept() -> Iterator[None]:
    """Keep the limits of open files: mlx-lm lowers both when it is imported, and a process cannot raise them again."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda _which, _limits: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit
