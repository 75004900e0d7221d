"""One line of the log for each request: its id, its rooms, how long it took, how it ended."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any, TypeVar

from aiohttp import web

T = TypeVar("T", bound=web.StreamResponse)

logger = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
CLIENT_LEFT = "client_left"
"""How a request ended whose client closed its connection; else the error's cause, or an answer's finish reason."""
_KEY = web.RequestKey("pdplane-id", str)
_MAX_ID = 128


def id_of(request: web.Request) -> str:
    """Return the request's id: the client's own if it sent one that can stand in a log, else a fresh one."""
    if _KEY not in request:
        given = request.headers.get(REQUEST_ID, "")
        is_plain = 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable() and " " not in given
        request[_KEY] = given if is_plain else secrets.token_hex(8)
    return request[_KEY]


async def add_id(request: web.Request, response: web.StreamResponse) -> None:
    """Add the request's id to a response; for `on_response_prepare`."""
    response.headers[REQUEST_ID] = id_of(request)


class RequestLine:
    """What one request's line will say. `facts` are added as they become known, in the order of the line."""

    def __init__(self, request: web.Request) -> None:
        self._request, self._began = request, time.monotonic()
        self.status: int | None = None
        self.end = ""
        self.facts: dict[str, object] = {}

    def answered(self, response: T) -> T:
        """Take the status of the answer, and return it."""
        self.status = response.status
        return response

    def failed(self, body: Mapping[str, Any]) -> None:
        """Take the end from the body of an error."""
        error = body["error"]
        self.end, self.facts["error"] = str(error.get("code") or "failed"), str(error["message"])

    def write(self, side: str) -> None:
        """Log the line: a warning when we are at fault or could not serve, else at info."""
        fields: dict[str, object] = {"id": id_of(self._request), "path": self._request.path}
        fields |= {"status": self.status, "end": self.end or None, **self.facts}
        fields["total_ms"] = 1e3 * (time.monotonic() - self._began)
        fields = {name: _rounded(value) for name, value in fields.items() if value is not None}
        level = logging.WARNING if (self.status or 0) >= 500 else logging.INFO
        logger.log(level, "%s request %s", side, in_words(fields), extra={"fields": {"side": side, **fields}})


def in_words(fields: Mapping[str, object]) -> str:
    """Return `name=value name=value ...`; a text with spaces or control characters is quoted."""
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def _rounded(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value
