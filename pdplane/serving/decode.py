"""The HTTP of a decode node: it looks up the prefill that a request names, and answers with all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from pdplane.api import DecodeHandle, DecodeRequest, DecodeService, Token
from pdplane.serving.answer import Piece
from pdplane.serving.asked import Asked, AskedAnswer
from pdplane.serving.exchange import Exchange
from pdplane.serving.fields import BadField
from pdplane.serving.routes import DEFAULT_BOOTSTRAP_PORT, Half, app_of


def decode_app(node: DecodeService, *, bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT) -> web.Application:
    """Return the application, for the process's HttpThread; `bootstrap_port` is for requests that name none."""
    return app_of(Half(node, "decode", partial(_begin, node), _first_piece, bootstrap_port))


def _begin(node: DecodeService, asked: Asked, answer: AskedAnswer, on_token: Callable[[Token], None]) -> DecodeHandle:
    if answer.meeting.prefill is None:
        raise BadField("bootstrap_host is missing: decode looks up its prefill there", "bootstrap_host")
    request = DecodeRequest(
        room=answer.meeting.room,
        tokens=answer.prompt,
        prefill=answer.meeting.prefill,
        max_tokens=answer.max_tokens,
        ignore_eos=asked.ignore_eos,
        stop_ids=asked.stop_ids,
        sampling=answer.sampling,
    )
    return node.decode(request, on_token)


async def _first_piece(exchange: Exchange) -> Sequence[Piece]:
    """Wait for the first token before any header goes out, so that a failure until then keeps its status."""
    return await exchange.advance()
