"""The HTTP of a decode node: /generate runs decode's leg of a room and answers with the text."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from pdplane.api import DecodeHandle, DecodeNode, DecodeRequest, Token
from pdplane.errors import ConfigError, PdplaneError
from pdplane.serving.about import AboutRoutes
from pdplane.serving.admission import MAX_BODY, Admitted, admit
from pdplane.serving.answer import Answer
from pdplane.serving.errors import answer_error, body_of, json_errors, refuse
from pdplane.serving.events import Events
from pdplane.serving.generate_request import DEFAULT_BOOTSTRAP_PORT
from pdplane.serving.metrics import Metrics
from pdplane.serving.relay import End, Relay


def decode_app(node: DecodeNode, *, bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT) -> web.Application:
    """The application; serve it on the process's HttpThread. `bootstrap_port` is taken where a request names none."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[json_errors])
    metrics = Metrics(node, "decode")
    AboutRoutes(node, "decode", metrics).add_to(app)
    app.router.add_post("/generate", _DecodeRoutes(node, metrics, bootstrap_port).generate)
    return app


class _DecodeRoutes:
    def __init__(self, node: DecodeNode, metrics: Metrics, bootstrap_port: int) -> None:
        self._node = node
        self._bootstrap_port = bootstrap_port
        self._metrics = metrics

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if not self._node.ready:
            return refuse(503, "this decode node is not ready")
        relay = Relay()
        try:
            admitted = await admit(request, self._node, self._bootstrap_port)
            handle = self._node.decode(_request_of(admitted), relay.put)
        except PdplaneError as error:
            return answer_error(error)
        relay.watch(handle.done)
        self._metrics.requests.inc()
        with self._metrics.running.track_inprogress():
            return await self._answer(request, admitted, handle, relay)

    async def _answer(
        self, request: web.Request, admitted: Admitted, handle: DecodeHandle, relay: Relay
    ) -> web.StreamResponse:
        answer = Answer(admitted.asked, len(admitted.tokens), self._node.tokenizer)
        leg = _Leg(answer, relay, self._metrics)
        try:
            if admitted.asked.stream:
                return await _stream(request, leg)
            while await leg.advance() is None:
                pass
        except asyncio.CancelledError:
            handle.cancel("the client closed the connection of decode's leg")
            raise
        finally:
            if answer.is_stopped:
                handle.cancel("a stop string was found")
        if leg.error is not None:
            return answer_error(leg.error)
        return web.json_response(answer.body())


class _Leg:
    """Feeds an answer from its relay and keeps the times between the tokens."""

    def __init__(self, answer: Answer, relay: Relay, metrics: Metrics) -> None:
        self.answer = answer
        self.error: BaseException | None = None
        self._relay = relay
        self._metrics = metrics
        self._last: float | None = None

    async def advance(self) -> End | None:
        """Wait for news and take them; gives the end when the answer is over, by itself or by a stop string."""
        tokens, end = await self._relay.next()
        self._observe(tokens)
        self.answer.add(tokens)
        if self.answer.is_stopped:
            end = End()
        elif end is not None and end.error is None:
            self.answer.finish(end.result)
            self._metrics.finished(end.result)
        if end is not None:
            self._ended(end)
        return end

    def _ended(self, end: End) -> None:
        self.error = end.error
        if end.error is not None:
            self._metrics.failed_with(end.error)
            return
        self._metrics.end_to_end.observe(time.monotonic() - self.answer.began)

    def _observe(self, tokens: list[Token]) -> None:
        if not tokens:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token.observe(now - self.answer.began)
            gaps, self._last = len(tokens) - 1, now
        else:
            gaps = len(tokens)
        for _gap in range(gaps):
            self._metrics.between_tokens.observe((now - self._last) / gaps)
        self._last = now


async def _stream(request: web.Request, leg: _Leg) -> web.StreamResponse:
    # No header goes out before the first token, so that a failure until then keeps its status.
    end = await leg.advance()
    if leg.error is not None and not leg.answer.ids:
        return answer_error(leg.error)
    events = await Events.open(request)
    while end is None:
        await events.send(leg.answer.body())
        end = await leg.advance()
    if leg.error is not None:
        await events.send(body_of(leg.error))
        return await events.close(done=False)
    await events.send(leg.answer.body())
    return await events.close(done=True)


def _request_of(admitted: Admitted) -> DecodeRequest:
    asked = admitted.asked
    if asked.bootstrap is None:
        raise ConfigError("bootstrap_host is missing: decode looks up its prefill there")
    return DecodeRequest(
        room=asked.room,
        tokens=admitted.tokens,
        prefill=asked.bootstrap,
        max_tokens=admitted.max_tokens,
        ignore_eos=asked.ignore_eos,
        stop_ids=asked.stop_ids,
    )
