"""Server-sent events to one client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Self

from aiohttp import web

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
