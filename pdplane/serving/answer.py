"""An answer as it grows: tokens from the node's threads to the event loop, into text, out to the client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, Self, TypeAlias

import attrs
from aiohttp import web

from pdplane.api import Finished, FinishReason, Token, Tokenizer
from pdplane.serving.asked import Asked, Served


@attrs.frozen
class End:
    """How a leg ended: with a result, or with an error."""

    result: Any = None
    error: BaseException | None = None


@attrs.frozen
class News:
    """The tokens of one leg since the last news of it, and its end once that has come after them."""

    index: int
    tokens: tuple[Token, ...]
    end: End | None


class Relay:
    """The legs' way onto the loop that made it; `put` and `watch` take calls from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._tokens: dict[int, list[Token]] = {}
        self._ends: dict[int, End] = {}

    def put(self, index: int, token: Token) -> None:
        """Take one token of a leg; harmless when the loop has closed."""
        self._post(lambda: self._tokens.setdefault(index, []).append(token))

    def watch(self, index: int, done: Future[Any]) -> None:
        """Take a leg's end from its future."""
        done.add_done_callback(lambda ended: self._post(lambda: self._ends.update({index: _end_of(ended)})))

    async def next(self) -> list[News]:
        """Wait for news of any leg."""
        while not self._tokens and not self._ends:
            self._arrived.clear()
            await self._arrived.wait()
        tokens, self._tokens = self._tokens, {}
        ends, self._ends = self._ends, {}
        return [
            News(index, tuple(tokens.get(index, ())), ends.get(index)) for index in sorted(tokens.keys() | ends.keys())
        ]

    def _post(self, take: Callable[[], object]) -> None:
        def arrive() -> None:
            take()
            self._arrived.set()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(arrive)


def _end_of(ended: Future[Any]) -> End:
    if ended.cancelled():
        return End(error=CancelledError("cancelled"))
    error = ended.exception()
    return End(error=error) if error is not None else End(result=ended.result())


# ---- Server-sent events to one client


STALLED_S = 60.0
"""A client that takes nothing for so long counts as gone."""


class Events:
    """A stream of `data:` lines; the headers go out when it is opened."""

    def __init__(self, response: web.StreamResponse) -> None:
        self._response = response

    @classmethod
    async def open(cls, request: web.Request) -> Self:
        """Send 200 and the headers."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        return cls(response)

    async def send(self, value: Mapping[str, Any]) -> None:
        """Send one event. Raises CancelledError when the client takes no more, as aiohttp does for one that left."""
        await self._write(json.dumps(value))

    async def close(self, *, done: bool) -> web.StreamResponse:
        """End the stream; `[DONE]` only after a whole answer."""
        if done:
            await self._write("[DONE]")
        await self._response.write_eof()
        return self._response

    async def _write(self, text: str) -> None:
        try:
            async with asyncio.timeout(STALLED_S):
                await self._response.write(f"data: {text}\n\n".encode())
        except (ConnectionError, TimeoutError) as error:
            raise asyncio.CancelledError("the client takes no more") from error


# ---- One answer as it grows: tokens become text, up to a stop


class StopText:
    """Passes text up to the first stop string, and holds back what may become one.

    `matched` names the stop string once it was found; nothing passes after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take a piece; return the text that is safe to show."""
        if self.matched is not None:
            return ""
        self._held += piece
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            index, self.matched = min(found)
            shown, self._held = self._held[:index], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def flush(self) -> str:
        """Return the text that was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)


@attrs.frozen
class AnswerEnd:
    """Why an answer is over; `matched` is the stop string or the stop token."""

    reason: FinishReason
    matched: str | int | None = None


@attrs.frozen
class Piece:
    """What is new of the answer with this index: text that is safe to show, and tokens, which may run ahead of it."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    ending: AnswerEnd | None = None


class TextAnswer:
    """Tokens and text so far. Stop tokens count as tokens and add no text."""

    def __init__(self, asked: Asked, index: int, tokenizer: Tokenizer, *, marks: bool) -> None:
        self.index, self.prompt_tokens = index, len(asked.answers[index].prompt)
        self._detokenizer = tokenizer.detokenizer(marks=marks)
        self._silent = asked.stop_ids if asked.ignore_eos else asked.stop_ids | tokenizer.eos_ids
        self._stop_text = StopText(asked.stop)
        self._finished: Finished | None = None
        self.began = time.monotonic()
        self.first_token_s: float | None = None
        self.tokens: list[Token] = []
        self.text = ""
        self.ending: AnswerEnd | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found, so that the answer is over, whatever the node still sends."""
        return self._stop_text.matched is not None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, known at the end."""
        return 0 if self._finished is None else self._finished.cached_tokens

    @property
    def timings(self) -> Mapping[str, float]:
        """The node's, and when the first token came."""
        ours = {} if self.first_token_s is None else {"first_token_ms": 1000 * self.first_token_s}
        return ours if self._finished is None else {**ours, **self._finished.timings}

    def add(self, tokens: Iterable[Token], finished: Finished | None = None) -> Piece:
        """Take tokens up to the one that completes a stop string, and how the node ended."""
        before, text = len(self.tokens), ""
        for token in tokens:
            if self.ending is not None:
                break
            text += self._take(token)
        if finished is not None and self.ending is None:
            text += self._finish(finished)
        self.text += text
        return Piece(self.index, text, tuple(self.tokens[before:]), self.ending)

    def _take(self, token: Token) -> str:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.began
        self.tokens.append(token)
        if token.id in self._silent:
            return ""
        text = self._stop_text.feed(self._detokenizer.add(token.id))
        if self.is_stopped:
            self.ending = AnswerEnd("stop", self._stop_text.matched)
        return text

    def _finish(self, finished: Finished) -> str:
        self._finished = finished
        text = self._stop_text.feed(self._detokenizer.finish())
        if self.is_stopped:
            self.ending = AnswerEnd("stop", self._stop_text.matched)
            return text
        matched = self.tokens[-1].id if self.tokens and finished.reason == "stop" else None
        self.ending = AnswerEnd(finished.reason, matched)
        return text + self._stop_text.flush()


# ---- What a dialect consists of: how its requests are read and its answers are written


Event: TypeAlias = Mapping[str, Any]


class AnswerWriter(Protocol):
    """Writes one request's answers: it gets each piece by `keep` or by `events`, never by both."""

    def keep(self, piece: Piece) -> None:
        """Take a piece of a whole answer."""

    def events(self, piece: Piece) -> Sequence[Event]:
        """Return the events of a stream that carry this piece."""

    def last(self) -> Sequence[Event]:
        """Return the events after all answers are over."""

    def whole(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        """Return the JSON of all answers."""


class Dialect(Protocol):
    """One shape of requests and answers."""

    @property
    def paths(self) -> Sequence[str]:
        """Its routes."""

    @property
    def marks(self) -> bool:
        """Whether its writer looks for the marks of thoughts and calls."""

    def read(self, data: bytes, served: Served) -> Asked:
        """Return a body as a checked value. Raises ConfigError that names the field."""

    def writer(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> AnswerWriter:
        """Return the writer of this request's answers."""
