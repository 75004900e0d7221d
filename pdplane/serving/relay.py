"""Carries the tokens and the ends of a request's legs from the node's threads to the event loop."""

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
