"""One request from its body to its last byte, on either daemon: read, begin the legs, write what they bring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import attrs
from aiohttp import web

from pdplane.api import DecodeHandle, Finished, FirstToken, PrefillHandle, Token
from pdplane.errors import PdplaneError
from pdplane.serving.answer import AnswerWriter, Dialect, Events, News, Piece, Relay, TextAnswer
from pdplane.serving.asked import Asked, AskedAnswer, Served
from pdplane.serving.errors import answer_error, body_of, cause_of
from pdplane.serving.metrics import Metrics
from pdplane.serving.reading import Readers, take_body

Handle: TypeAlias = PrefillHandle | DecodeHandle
_ROOMS_LOGGED = 4

Begin: TypeAlias = Callable[[Asked, AskedAnswer, Callable[[Token], None]], Handle]


async def read(dialect: Dialect, request: web.Request, served: Served, readers: Readers) -> Asked:
    """Read, check and tokenise a body. Raises ConfigError, and LocalProtocolError when that cannot be in time."""
    data = await take_body(request, served.longest_body)
    # Large bodies and long texts take a while, and this thread serves every request.
    return await readers.run(len(data), lambda go_on: dialect.read(data, attrs.evolve(served, go_on=go_on)))


class Exchange:
    """The legs of one request, its answers and their writer."""

    def __init__(self, dialect: Dialect, asked: Asked, served: Served, metrics: Metrics) -> None:
        self.asked, self._metrics = asked, metrics
        self.answers = [
            TextAnswer(asked, index, served.tokenizer, marks=dialect.marks) for index in range(len(asked.answers))
        ]
        self.writer: AnswerWriter = dialect.writer(asked, served, self.answers)
        self.error: BaseException | None = None
        self._paces = [_Pace(metrics) for _answer in self.answers]
        self._relay = Relay()
        self._handles: list[Handle] = []

    def begin(self, begin: Begin) -> None:
        """Begin every leg. Raises what the node raises, with none of them left running."""
        try:
            for index, answer in enumerate(self.asked.answers):
                handle = begin(self.asked, answer, partial(self._relay.put, index))
                self._handles.append(handle)
                self._relay.watch(index, handle.done)
        except PdplaneError as error:
            self.cancel(f"another answer of the same request failed: {error}")
            raise

    def cancel(self, cause: str) -> None:
        """End every leg that runs."""
        for handle in self._handles:
            handle.cancel(cause)

    def asked_facts(self) -> dict[str, object]:
        """Return what the log says of the request before it runs."""
        rooms = [answer.meeting.room for answer in self.asked.answers]
        return {
            "rooms": ",".join(map(str, rooms[:_ROOMS_LOGGED])) + (",..." if len(rooms) > _ROOMS_LOGGED else ""),
            "answers": len(rooms) if len(rooms) > 1 else None,
            "prompt_tokens": self.asked.prompt_tokens,
        }

    def ended_facts(self) -> dict[str, object]:
        """Return what the log says of the request after it ended; the times are those of the first answer."""
        found: dict[str, object] = {"tokens": sum(len(answer.tokens) for answer in self.answers)}
        found["cached_tokens"] = sum(handle.cached_tokens for handle in self._handles)
        if self._handles:
            found |= self._handles[0].timings
        if self.error is not None:
            found["error"] = str(self.error)
        return found

    @property
    def ended(self) -> str:
        """How the request ended: its error's cause, or the first answer's finish reason."""
        if self.error is not None:
            return cause_of(self.error).value
        ending = self.answers[0].ending
        return "" if ending is None else ending.reason

    @property
    def is_over(self) -> bool:
        """Whether every answer has ended, or the request failed."""
        return self.error is not None or all(answer.ending is not None for answer in self.answers)

    async def advance(self) -> Sequence[Piece]:
        """Wait for news of any answer; one that fails ends all."""
        pieces: list[Piece] = []
        for news in await self._relay.next():
            answer = self.answers[news.index]
            if answer.ending is not None:
                continue  # cancelled when its stop string was found
            if news.end is not None and news.end.error is not None:
                self._fail(news.end.error)
                return pieces
            pieces.append(self._take(answer, news))
        return pieces

    def _take(self, answer: TextAnswer, news: News) -> Piece:
        tokens, finished = news.tokens, None
        if news.end is not None:
            more, finished = _told(news.end.result, answer.prompt_tokens)
            tokens += more
        self._paces[answer.index].observe(len(tokens), answer.began)
        piece = answer.add(tokens, finished)
        if piece.ending is not None:
            self._metrics.answered(answer, self._handles[answer.index])
        if answer.is_stopped:
            self._handles[answer.index].cancel("a stop string was found")
        return piece

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._metrics.failed_with(error)
        if len(self._handles) > 1:
            self.cancel(f"another answer of the same request failed: {error}")


def _told(result: Finished | FirstToken, prompt_tokens: int) -> tuple[tuple[Token, ...], Finished]:
    """Return a leg's last tokens and how it finished; prefill's result is its one token."""
    if isinstance(result, FirstToken):
        token = Token(result.token, result.logprob, result.top)
        return (token,), Finished("length", prompt_tokens, 1, timings=result.timings)
    return (), result


class _Pace:
    """The times between one answer's tokens."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last: float | None = None

    def observe(self, count: int, began: float) -> None:
        """Record that `count` tokens came now."""
        if not count:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token.observe(now - began)
            count, self._last = count - 1, now
        for _gap in range(count):
            self._metrics.between_tokens.observe((now - self._last) / count)
        self._last = now


async def answer_whole(exchange: Exchange) -> web.StreamResponse:
    """Wait for all answers and write them as one body."""
    while not exchange.is_over:
        for piece in await exchange.advance():
            exchange.writer.keep(piece)
    if exchange.error is not None:
        return answer_error(exchange.error)
    return web.json_response(exchange.writer.whole())


async def answer_stream(request: web.Request, exchange: Exchange, pieces: Sequence[Piece]) -> web.StreamResponse:
    """Write the answers as they grow. A failure before the headers keeps its status, a later one is the last event."""
    if exchange.error is not None:
        return answer_error(exchange.error)
    events = await Events.open(request)
    await _send(events, exchange, pieces)
    while not exchange.is_over:
        await _send(events, exchange, await exchange.advance())
    if exchange.error is not None:
        await events.send(body_of(exchange.error))
        return await events.close(done=False)
    for event in exchange.writer.last():
        await events.send(event)
    return await events.close(done=True)


async def _send(events: Events, exchange: Exchange, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        for event in exchange.writer.events(piece):
            await events.send(event)
