"""The routes by which gateways and people learn what a worker is."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

from aiohttp import web

from pdplane.api import Node
from pdplane.errors import PdplaneError
from pdplane.serving.asked import Served
from pdplane.serving.errors import refuse
from pdplane.serving.metrics import CONTENT_TYPE, Metrics

T = TypeVar("T")
Role = Literal["prefill", "decode"]

_SECOND_LOOK_S = 1.5
_MODEL_KEYS = ("model_path", "tokenizer_path", "served_model_name", "context_length", "vocab_size")


class AboutRoutes:
    """Health, model, server, statistics and metrics of one node."""

    def __init__(self, node: Node, role: Role, metrics: Metrics) -> None:
        self._node = node
        self._role = role
        self._metrics = metrics
        self._has_lived = False

    def add_to(self, app: web.Application) -> None:
        """Register every route."""
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        app.router.add_get("/livez", self._live)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._one_model)
        app.router.add_get("/get_load", self._load)
        for path in ("/v1/loads", "/loads"):
            app.router.add_get(path, self._loads)
        app.router.add_get("/statistics", self._statistics)
        app.router.add_get("/metrics", self._scrape)

    async def _health(self, _request: web.Request) -> web.Response:
        trouble = await self._trouble()
        if self._node.ready and trouble is None:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": trouble or "not ready"}, status=503, headers={"Retry-After": "1"})

    async def _live(self, _request: web.Request) -> web.Response:
        """Answer 503 only when a thread of the node has died or hangs: a long prompt or a dead peer is no reason."""
        alive, trouble = self._node.alive, await self._trouble()
        self._has_lived = self._has_lived or alive
        if trouble is None and (alive or not self._has_lived):  # while it loads its model it has not died
            return web.json_response({"status": "ok"})
        return web.json_response({"status": trouble or "dead"}, status=503)

    async def _trouble(self) -> str | None:
        """Return what does not go on, after a second look: a process that was stopped shows its threads' age first."""
        if self._node.trouble() is not None:
            await asyncio.sleep(_SECOND_LOOK_S)
        return self._node.trouble()

    async def _server_info(self, _request: web.Request) -> web.Response:
        info = self._node.info()
        return web.json_response(
            {
                **_model(info),
                "tp_size": 1,
                "dp_size": 1,
                "max_running_requests": None,
                **info,
                "disaggregation_mode": self._role,
                "version": importlib.metadata.version("pdplane"),
                "ready": self._node.ready,
                "max_body_bytes": Served.of(self._node, 0).longest_body if self._node.ready else None,
            }
        )

    async def _model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({**_model(self._node.info()), "is_generation": True})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [_entry(self._node.info())]})

    async def _one_model(self, request: web.Request) -> web.Response:
        entry, name = _entry(self._node.info()), request.match_info["name"]
        if name not in (entry["id"], entry["id"].lstrip("/")):  # a client that joins paths loses a first slash
            return refuse(404, f"model {name[:200]!r} is not served here; {entry['id']!r} is")
        return web.json_response(entry)

    async def _load(self, _request: web.Request) -> web.Response:
        return web.json_response([await self._busy()])

    async def _loads(self, _request: web.Request) -> web.Response:
        now = datetime.now(UTC).isoformat()
        return web.json_response({"timestamp": now, "dp_rank_count": 1, "loads": [await self._busy()]})

    async def _busy(self) -> dict[str, int]:
        taken = sum(int(sample.value) for metric in self._metrics.running.collect() for sample in metric.samples)
        waiting = min(taken, await _off_the_loop(self._metrics.waiting))
        running = taken - waiting
        return {"dp_rank": 0, "num_reqs": taken, "num_running_reqs": running, "num_waiting_reqs": waiting}

    async def _statistics(self, _request: web.Request) -> web.Response:
        try:
            return web.json_response(await _off_the_loop(self._node.statistics))
        except PdplaneError as error:
            return refuse(503, str(error))

    async def _scrape(self, _request: web.Request) -> web.Response:
        return web.Response(body=await _off_the_loop(self._metrics.text), headers={"Content-Type": CONTENT_TYPE})


async def _off_the_loop(ask: Callable[[], T]) -> T:
    """Call what waits for the node's threads, on a thread of its own, so that other requests go on."""
    return await asyncio.get_running_loop().run_in_executor(None, ask)


def _entry(info: dict[str, Any]) -> dict[str, Any]:
    model = _model(info)
    return {
        "id": model["served_model_name"],
        "object": "model",
        "created": 0,
        "owned_by": "sglang",  # smg pairs legs of this owner only
        "root": model["model_path"],
        "max_model_len": model["context_length"],
    }


def _model(info: dict[str, Any]) -> dict[str, Any]:
    model = {key: info.get(key) for key in _MODEL_KEYS}
    path = model["model_path"] or "unknown"
    return model | {
        "model_path": path,
        "tokenizer_path": model["tokenizer_path"] or path,
        "served_model_name": model["served_model_name"] or path,
    }
