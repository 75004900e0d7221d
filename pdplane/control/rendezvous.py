"""The HTTP rendezvous: prefill ranks PUT where they listen, decode ranks GET it.

The routes, fields and types are the legacy peers' own, so either generation can ask:

* `GET /health` answers 200 `OK`.
* `PUT /route` registers a rank: `role`, `world_size`, `dp_size`, `rank_ip`, `rank_port`, `engine_rank`, `cache_layout`,
  and from native ranks `pdplane` (1), `router_port` and `prefill_life`.
* `GET /route?engine_rank=-1&target_dp_group=-1` answers `prefill_tp_size` (the world size), `prefill_dp_size`,
  `cache_layout`, and `pdplane` when every rank is native.
* `GET /route?engine_rank=T&target_dp_group=D` answers `rank_ip`, `rank_port`, and a native rank's extras.

Where the legacy server answered 500 this one says 400, 401, 404, 409 or 503 with `{"error": {...}}`, and nothing of a
refused PUT is kept. The rules of replacement stand in `rank_table`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable

from aiohttp import web

from pdplane.control.rank_table import RankTable
from pdplane.errors import RendezvousError
from pdplane.security import Secret

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8998
MAX_BODY = 1 << 20  # a layout has at most 262,144 bytes, each at most doubled by JSON's quoting

_INTEGER = re.compile(r"-?[0-9]{1,9}\Z")
_KINDS = {400: "bad_request", 401: "unauthorized", 404: "not_found", 409: "conflict", 503: "unavailable"}


def rendezvous_app(
    secret: Secret | None = None, *, open_reads: bool = False, clock: Callable[[], float] = time.monotonic
) -> web.Application:
    """The application of one prefill instance, with an empty table.

    With a secret, /route asks for its bearer token; `open_reads` lets legacy decodes GET without one.
    """
    app = web.Application(client_max_size=MAX_BODY)
    routes = _Routes(RankTable(), secret, open_reads=open_reads, clock=clock)
    app.router.add_get("/health", routes.health)
    app.router.add_route("*", "/route", routes.route)
    return app


class _Routes:
    def __init__(
        self, table: RankTable, secret: Secret | None, *, open_reads: bool, clock: Callable[[], float]
    ) -> None:
        self._table = table
        self._secret = secret
        self._open_reads = open_reads
        self._clock = clock

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def route(self, request: web.Request) -> web.Response:
        try:
            if request.method == "PUT":
                self._authorize(request)
                return await self._put(request)
            if request.method == "GET":
                if not self._open_reads:
                    self._authorize(request)
                return self._get(request)
        except RendezvousError as error:
            return _error(error)
        return web.Response(text="Method not allowed", status=405, content_type="application/json")

    def _authorize(self, request: web.Request) -> None:
        if self._secret is not None and not self._secret.check_bearer(request.headers.get("Authorization")):
            raise RendezvousError("/route", 401, "this rendezvous wants the bearer token of its secret")

    async def _put(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise RendezvousError("/route", 400, f"the body is longer than {MAX_BODY} bytes") from error
        except (ValueError, RecursionError) as error:
            raise RendezvousError("/route", 400, "the body is not JSON") from error
        entry = self._table.put(body, self._clock())
        logger.debug("prefill rank %d registered from %s port %d", entry.world_rank, entry.rank_ip, entry.rank_port)
        return web.Response(text="OK")

    def _get(self, request: web.Request) -> web.Response:
        asked_rank, asked_group = request.query.get("engine_rank"), request.query.get("target_dp_group")
        if not asked_rank or not asked_group:
            return web.Response(text="Missing inputs for bootstrap server.", status=400)  # the legacy server's words
        tp_rank, dp_group = _integer("engine_rank", asked_rank), _integer("target_dp_group", asked_group)
        if tp_rank == dp_group == -1:
            return web.json_response(self._table.sync(self._clock()))
        if tp_rank < 0 or dp_group < 0:
            raise RendezvousError("/route", 400, "engine_rank and target_dp_group are both -1, or both not negative")
        return web.json_response(self._table.rank(dp_group, tp_rank, self._clock()))


def _integer(name: str, text: str) -> int:
    if not _INTEGER.match(text):
        raise RendezvousError("/route", 400, f"{name} is not an integer")
    return int(text)


def _error(error: RendezvousError) -> web.Response:
    body = {"error": {"message": error.reason, "type": _KINDS.get(error.status, "error"), "code": error.status}}
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(body, status=error.status, headers=headers)
