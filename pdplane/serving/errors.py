"""Errors as HTTP: the status says whose fault it is, the body is `{"error": {"message", "type", "code"}}`.

400 a bad request, 409 the room is live, 413 too long a body, 502 the other side failed, 503 we are full or not ready,
504 a deadline passed, 500 a fault of ours.
"""

from __future__ import annotations

import re
from concurrent.futures import CancelledError
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pdplane.errors import ConfigError, LocalProtocolError, PoolExhausted, RoomFailed, SessionLost, TransferError

RETRY_AFTER_S = 1

_KINDS = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "method_not_allowed",
    409: "room_is_live",
    413: "request_too_large",
    502: "peer_failed",
    503: "overloaded",
    504: "deadline_exceeded",
}
# RoomFailed tells its cause in words for people; these are the ones that speak of time and of space.
_DEADLINE = re.compile(r"timed out|\b(?:in|within|after) [0-9.e+]+ s\b|nobody answered in time")
_LIVE = re.compile(r"\bis live\b|cannot tell uses apart|may still be written to")
_FULL = re.compile(r"too many live rooms|wanted [0-9]+ blocks")


def status_of(error: BaseException) -> int:
    """The HTTP status of an error that a leg ended with."""
    if isinstance(error, RoomFailed):
        if _FULL.search(error.cause):
            return 503
        return 504 if _DEADLINE.search(error.cause) else 502
    if isinstance(error, LocalProtocolError):
        return 409 if _LIVE.search(error.reason) else 503  # else it is closing, and takes no requests
    for kind, status in (
        (ConfigError, 400),
        (PoolExhausted, 503),
        (CancelledError, 503),
        (SessionLost, 502),
        (TransferError, 502),
    ):
        if isinstance(error, kind):
            return status
    return 500


def error_body(status: int, message: str) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": message, "type": _KINDS.get(status, "internal_error"), "code": status}}


def body_of(error: BaseException) -> dict[str, Any]:
    """The JSON of an error that a leg ended with."""
    return error_body(status_of(error), str(error) or type(error).__name__)


def refuse(status: int, message: str) -> web.Response:
    """An error answer."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status in (429, 503) else {}
    return web.json_response(error_body(status, message), status=status, headers=headers)


def answer_error(error: BaseException) -> web.Response:
    """The answer to a request that failed before its first byte."""
    return refuse(status_of(error), str(error) or type(error).__name__)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives aiohttp's own refusals (unknown path, wrong method, body too long) the same body as ours."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        answer = refuse(error.status, f"{request.method} {request.path}: {error.reason}")
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
