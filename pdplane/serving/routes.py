"""The HTTP of a daemon: each dialect's route reads a request, runs one half of it and writes the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import attrs
from aiohttp import web

from pdplane.api import (
    DecodeHandle,
    DecodeRequest,
    DecodeService,
    Node,
    PrefillHandle,
    PrefillRequest,
    PrefillService,
    Token,
)
from pdplane.errors import Cause, LocalProtocolError, PdplaneError
from pdplane.ids import Endpoint
from pdplane.serving.about import AboutRoutes, Role
from pdplane.serving.answer import Dialect, Piece
from pdplane.serving.asked import Asked, AskedAnswer, Served
from pdplane.serving.errors import answer_error, cause_of, json_errors
from pdplane.serving.exchange import Begin, Exchange, answer_stream, answer_whole, read
from pdplane.serving.fields import BadField
from pdplane.serving.metrics import Metrics
from pdplane.serving.openai import OpenaiCompletions
from pdplane.serving.openai_chat import OpenaiChat
from pdplane.serving.reading import Readers
from pdplane.serving.request_log import CLIENT_LEFT, RequestLine, add_id
from pdplane.serving.sglang import Sglang

DEFAULT_BOOTSTRAP_PORT = 8998
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
    app = web.Application(middlewares=[json_errors])
    app.on_response_prepare.append(add_id)
    metrics, readers = Metrics(half.node, half.role), Readers()
    AboutRoutes(half.node, half.role, metrics).add_to(app)
    for dialect in DIALECTS:
        for path in dialect.paths:
            app.router.add_post(path, partial(_answer, half, metrics, readers, dialect))
    return app


async def _answer(
    half: Half, metrics: Metrics, readers: Readers, dialect: Dialect, request: web.Request
) -> web.StreamResponse:
    line = RequestLine(request)
    try:
        return line.answered(await _answered(half, metrics, readers, dialect, request, line))
    except asyncio.CancelledError:
        line.end = CLIENT_LEFT if half.node.ready else Cause.CLOSING.value
        raise
    finally:
        metrics.ended(line.end)
        line.write(half.role)


async def _answered(
    half: Half, metrics: Metrics, readers: Readers, dialect: Dialect, request: web.Request, line: RequestLine
) -> web.StreamResponse:
    try:
        if not half.node.alive:  # one that drains reads the request, to tell the other half that it is refused
            raise _not_ready(half.role)
        served = Served.of(half.node, half.bootstrap_port)
        asked = await read(dialect, request, served, readers)
        exchange = Exchange(dialect, asked, served, metrics)
        line.facts |= exchange.asked_facts()
        exchange.begin(half.begin)
    except PdplaneError as error:
        line.end, line.facts["error"] = cause_of(error).value, str(error)
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
        finally:
            line.end = exchange.ended
            line.facts |= exchange.ended_facts()


# ---- The HTTP of a prefill node: its own answer, which gateways drop, is the first token


_EARLY_REFUSAL_S = 0.05
"""How long a stream's headers wait for a refusal (a live room, no blocks), so that it gets its real status."""


def prefill_app(node: PrefillService) -> web.Application:
    """Return the application, for the process's HttpThread."""
    return app_of(Half(node, "prefill", partial(_begin_prefill, node), _refusal))


def _not_ready(role: Role) -> LocalProtocolError:
    return LocalProtocolError(f"this {role} node is not ready", Cause.CLOSING)


def _begin_prefill(
    node: PrefillService, _asked: Asked, answer: AskedAnswer, _on_token: Callable[[Token], None]
) -> PrefillHandle:
    request = PrefillRequest(answer.meeting.room, answer.prompt, answer.sampling)
    if not node.ready:
        refusal = _not_ready("prefill")
        node.refuse(request, refusal.why)
        raise refusal
    return node.prefill(request)


async def _refusal(exchange: Exchange) -> Sequence[Piece]:
    """Wait a moment for a refusal before the headers, but not for the room, since gateways wait for the headers."""
    try:
        async with asyncio.timeout(_EARLY_REFUSAL_S):
            return await exchange.advance()
    except TimeoutError:
        return ()


# ---- The HTTP of a decode node: it looks up the prefill that a request names, and answers with all tokens


def decode_app(
    node: DecodeService,
    *,
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT,
    allows: Callable[[Endpoint], bool] = lambda _prefill: True,
) -> web.Application:
    """Return the application, for the process's HttpThread; `bootstrap_port` is for requests that name none.

    `allows` says which rendezvous a request may name: decode connects to it.
    """
    return app_of(Half(node, "decode", partial(_begin_decode, node, allows), _first_piece, bootstrap_port))


def _begin_decode(
    node: DecodeService,
    allows: Callable[[Endpoint], bool],
    asked: Asked,
    answer: AskedAnswer,
    on_token: Callable[[Token], None],
) -> DecodeHandle:
    if answer.meeting.prefill is None:
        raise BadField("bootstrap_host is missing: decode looks up its prefill there", "bootstrap_host")
    if not allows(answer.meeting.prefill):
        raise BadField(f"bootstrap_host: {answer.meeting.prefill} is no prefill that is allowed here", "bootstrap_host")
    request = DecodeRequest(
        room=answer.meeting.room,
        tokens=answer.prompt,
        prefill=answer.meeting.prefill,
        max_tokens=answer.max_tokens,
        ignore_eos=asked.ignore_eos,
        stop_ids=asked.stop_ids,
        sampling=answer.sampling,
    )
    if not node.ready:
        refusal = _not_ready("decode")
        node.refuse(request, refusal.why)
        raise refusal
    return node.decode(request, on_token)


async def _first_piece(exchange: Exchange) -> Sequence[Piece]:
    """Wait for the first token before any header goes out, so that a failure until then keeps its status."""
    return await exchange.advance()
