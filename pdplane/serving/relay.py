"""Carries a leg's tokens and its end from the node's threads to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import attrs

from pdplane.api import Token


@attrs.frozen
class End:
    """How a leg ended: with a result, or with an error."""

    result: Any = None
    error: BaseException | None = None


class Relay:
    """One leg's way onto the loop that made it; `put` and `watch` take calls from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._tokens: list[Token] = []
        self._end: End | None = None

    def put(self, token: Token) -> None:
        """Take one token; harmless when the loop has closed."""
        self._post(self._add, token)

    def watch(self, done: Future[Any]) -> None:
        """Take the leg's end from its future."""
        done.add_done_callback(lambda ended: self._post(self._set_end, _end_of(ended)))

    async def next(self) -> tuple[list[Token], End | None]:
        """Wait for news: the tokens since the last call, and the end once it has come after them."""
        while not self._tokens and self._end is None:
            self._news.clear()
            await self._news.wait()
        tokens, self._tokens = self._tokens, []
        return tokens, self._end

    async def end(self) -> End:
        """Wait for the end; tokens stay for `next`."""
        while self._end is None:
            self._news.clear()
            await self._news.wait()
        return self._end

    def _add(self, token: Token) -> None:
        self._tokens.append(token)  # looked up on the loop: `next` puts a new list here

    def _set_end(self, end: End) -> None:
        self._end = end

    def _post(self, take: Callable[[Any], None], value: object) -> None:
        def arrive() -> None:
            take(value)
            self._news.set()

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(arrive)


def _end_of(ended: Future[Any]) -> End:
    if ended.cancelled():
        return End(error=CancelledError("cancelled"))
    error = ended.exception()
    return End(error=error) if error is not None else End(result=ended.result())
