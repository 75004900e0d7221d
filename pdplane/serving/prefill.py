"""The HTTP of a prefill node: /generate runs prefill's leg of a room and answers with its first token."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from pdplane.api import Finished, FirstToken, PrefillHandle, PrefillNode, PrefillRequest, Token
from pdplane.errors import PdplaneError
from pdplane.serving.about import AboutRoutes
from pdplane.serving.admission import MAX_BODY, Admitted, admit
from pdplane.serving.answer import Answer
from pdplane.serving.errors import answer_error, body_of, json_errors, refuse
from pdplane.serving.events import Events
from pdplane.serving.metrics import Metrics
from pdplane.serving.relay import End, Relay

_EARLY_REFUSAL_S = 0.05
"""How long a stream's headers wait for a refusal (a live room, no blocks): it still gets its real status."""


def prefill_app(node: PrefillNode) -> web.Application:
    """The application; serve it on the process's HttpThread."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[json_errors])
    metrics = Metrics(node, "prefill")
    AboutRoutes(node, "prefill", metrics).add_to(app)
    app.router.add_post("/generate", _PrefillRoutes(node, metrics).generate)
    return app


class _PrefillRoutes:
    def __init__(self, node: PrefillNode, metrics: Metrics) -> None:
        self._node = node
        self._metrics = metrics

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if not self._node.ready:
            return refuse(503, "this prefill node is not ready")
        relay = Relay()
        try:
            admitted = await admit(request, self._node)
            handle = self._node.prefill(PrefillRequest(admitted.asked.room, admitted.tokens))
        except PdplaneError as error:
            return answer_error(error)
        relay.watch(handle.done)
        self._metrics.requests.inc()
        with self._metrics.running.track_inprogress():
            return await self._answer(request, admitted, handle, relay)

    async def _answer(
        self, request: web.Request, admitted: Admitted, handle: PrefillHandle, relay: Relay
    ) -> web.StreamResponse:
        answer = Answer(admitted.asked, len(admitted.tokens), self._node.tokenizer)
        try:
            if admitted.asked.stream:
                return await self._stream(request, answer, relay)
            end = await relay.end()
        except asyncio.CancelledError:
            handle.cancel("the client closed the connection of prefill's leg")
            raise
        if end.error is not None:
            return self._failed(end.error)
        return web.json_response(self._finish(answer, end))

    async def _stream(self, request: web.Request, answer: Answer, relay: Relay) -> web.StreamResponse:
        # The gateway waits for these headers, so they do not wait for the room; only for a refusal.
        early = await _within(relay, _EARLY_REFUSAL_S)
        if early is not None and early.error is not None:
            return self._failed(early.error)
        events = await Events.open(request)
        end = early or await relay.end()
        if end.error is not None:
            self._failed(end.error)
            await events.send(body_of(end.error))
            return await events.close(done=False)
        await events.send(self._finish(answer, end))
        return await events.close(done=True)

    def _finish(self, answer: Answer, end: End) -> dict[str, object]:
        first: FirstToken = end.result
        answer.add([Token(first.token, first.logprob)])
        finished = Finished("length", answer.prompt_tokens, 1, timings=first.timings)
        answer.finish(finished)
        self._metrics.finished(finished)
        if answer.first_token_s is not None:
            self._metrics.first_token.observe(answer.first_token_s)
        self._metrics.end_to_end.observe(time.monotonic() - answer.began)
        return answer.body()

    def _failed(self, error: BaseException) -> web.Response:
        self._metrics.failed_with(error)
        return answer_error(error)


async def _within(relay: Relay, patience_s: float) -> End | None:
    try:
        async with asyncio.timeout(patience_s):
            return await relay.end()
    except TimeoutError:
        return None
