"""The HTTP of a prefill node: its own answer, which gateways drop, is the first token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from pdplane.api import PrefillHandle, PrefillRequest, PrefillService, Token
from pdplane.serving.answer import Piece
from pdplane.serving.asked import Asked, AskedAnswer
from pdplane.serving.exchange import Exchange
from pdplane.serving.routes import Half, app_of

_EARLY_REFUSAL_S = 0.05
"""How long a stream's headers wait for a refusal (a live room, no blocks), so that it gets its real status."""


def prefill_app(node: PrefillService) -> web.Application:
    """Return the application, for the process's HttpThread."""
    return app_of(Half(node, "prefill", partial(_begin, node), _refusal))


def _begin(
    node: PrefillService, _asked: Asked, answer: AskedAnswer, _on_token: Callable[[Token], None]
) -> PrefillHandle:
    return node.prefill(PrefillRequest(answer.meeting.room, answer.prompt, answer.sampling))


async def _refusal(exchange: Exchange) -> Sequence[Piece]:
    """Wait a moment for a refusal before the headers, but not for the room, since gateways wait for the headers."""
    try:
        async with asyncio.timeout(_EARLY_REFUSAL_S):
            return await exchange.advance()
    except TimeoutError:
        return ()
