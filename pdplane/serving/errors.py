"""Errors as HTTP: the body is `{"error": {"message", "type", "code"}}`.

The status and the code come from the error's `Cause`, never from its words: a peer's text decides nothing. Only
statuses that gateways hand on unchanged are used: they turn 409, 429 and 504 into 500, and drop Retry-After.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pdplane.errors import Cause, PdplaneError

RETRY_AFTER_S = 1

STATUSES: Mapping[Cause, int] = {
    Cause.BAD_REQUEST: 400,
    Cause.INTERNAL: 500,
    # The other side is at fault: the same request may do elsewhere.
    Cause.CANCELLED: 502,
    Cause.UNREACHABLE: 502,
    Cause.PEER_LOST: 502,
    Cause.PEER_FAILED: 502,
    Cause.REFUSED: 502,
    Cause.TRANSFER: 502,
    # Not now: the same request may do here, a little later.
    Cause.UNMATCHED: 503,
    Cause.TIMED_OUT: 503,
    Cause.FULL: 503,
    Cause.LIVE: 503,
    Cause.CLOSING: 503,
}
_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "method_not_allowed",
    413: "request_too_large",
    502: "peer_failed",
    503: "unavailable",
}


def cause_of(error: BaseException) -> Cause:
    """What happened, for any error that a leg ended with."""
    if isinstance(error, PdplaneError):
        return error.cause
    return Cause.CLOSING if isinstance(error, CancelledError) else Cause.INTERNAL


def status_of(error: BaseException) -> int:
    """The HTTP status of an error that a leg ended with."""
    return STATUSES[cause_of(error)]


def error_body(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error; `code` names what happened, where a `Cause` does."""
    return {"error": {"message": message, "type": _TYPES.get(status, "internal_error"), "code": code}}


def body_of(error: BaseException) -> dict[str, Any]:
    """The JSON of an error that a leg ended with."""
    return error_body(status_of(error), str(error) or type(error).__name__, cause_of(error).value)


def refuse(status: int, message: str, code: str | None = None) -> web.Response:
    """An error answer."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return web.json_response(error_body(status, message, code), status=status, headers=headers)


def answer_error(error: BaseException) -> web.Response:
    """The answer to a request that failed before its first byte."""
    return refuse(status_of(error), str(error) or type(error).__name__, cause_of(error).value)


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
