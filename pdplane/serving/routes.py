"""The HTTP of a daemon: every dialect, answered by its half of each request, and the routes about the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import attrs
from aiohttp import web

from pdplane.api import Node
from pdplane.errors import PdplaneError
from pdplane.serving.about import AboutRoutes, Role
from pdplane.serving.answer import Piece
from pdplane.serving.asked import Served
from pdplane.serving.dialect import Dialect
from pdplane.serving.errors import answer_error, json_errors, refuse
from pdplane.serving.exchange import Begin, Exchange, answer_stream, answer_whole, read
from pdplane.serving.metrics import Metrics
from pdplane.serving.openai import OpenaiCompletions
from pdplane.serving.openai_chat import OpenaiChat
from pdplane.serving.sglang import Sglang

DEFAULT_BOOTSTRAP_PORT = 8998
MAX_BODY = 64 << 20
DIALECTS: tuple[Dialect, ...] = (Sglang(), OpenaiChat(), OpenaiCompletions())

Opening: TypeAlias = Callable[[Exchange], Awaitable[Sequence[Piece]]]
"""What a stream's headers wait for; returns the pieces that came meanwhile."""


@attrs.frozen
class Half:
    """What differs between the two daemons."""

    node: Node
    role: Role
    begin: Begin
    opening: Opening
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    """Port of a rendezvous for which a request names none."""


def app_of(half: Half) -> web.Application:
    """Return the application, for the process's HttpThread."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[json_errors])
    metrics = Metrics(half.node, half.role)
    AboutRoutes(half.node, half.role, metrics).add_to(app)
    for dialect in DIALECTS:
        for path in dialect.paths:
            app.router.add_post(path, partial(_answer, half, metrics, dialect))
    return app


async def _answer(half: Half, metrics: Metrics, dialect: Dialect, request: web.Request) -> web.StreamResponse:
    if not half.node.ready:
        return refuse(503, f"this {half.role} node is not ready")
    try:
        served = Served.of(half.node, half.bootstrap_port)
        asked = await read(dialect, request, served)
        exchange = Exchange(dialect, asked, served, metrics)
        exchange.begin(half.begin)
    except PdplaneError as error:
        return answer_error(error)
    metrics.requests.inc()
    with metrics.running.track_inprogress():
        try:
            if asked.stream:
                return await answer_stream(request, exchange, await half.opening(exchange))
            return await answer_whole(exchange)
        except asyncio.CancelledError:
            exchange.cancel(f"the client closed the connection of {half.role}'s leg")
            raise
