"""Errors as HTTP, in OpenAI's shape: the body is `{"error": {"message", "type", "param", "code"}}`.

The status and the code come from the error's `Cause`, never from its text, which may be a peer's. Only
statuses that gateways pass on unchanged are used: they turn 409, 429 and 504 into 500, and drop Retry-After.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from concurrent.futures import CancelledError
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdplane.errors import Cause, PdplaneError
from pdplane.serving.fields import BadField

RETRY_AFTER_S = 1

STATUSES: Mapping[Cause, int] = {
    Cause.BAD_REQUEST: 400,
    Cause.INTERNAL: 500,
    # The other side is at fault: the same request may succeed elsewhere.
    Cause.CANCELLED: 502,
    Cause.UNREACHABLE: 502,
    Cause.PEER_LOST: 502,
    Cause.PEER_FAILED: 502,
    Cause.REFUSED: 502,
    Cause.TRANSFER: 502,
    # Not now: the same request may succeed here, a little later.
    Cause.UNMATCHED: 503,
    Cause.TIMED_OUT: 503,
    Cause.FULL: 503,
    Cause.LIVE: 503,
    Cause.CLOSING: 503,
}
_TYPES = {
    400: "invalid_request_error",
    401: "invalid_api_key",
    404: "not_found_error",
    405: "method_not_allowed",
    413: "request_too_large",
    502: "peer_failed",
    503: "unavailable",
}
_KEPT = {405: 404, 413: 400}
"""aiohttp's own refusals, and the status that gateways pass on instead."""


def cause_of(error: BaseException) -> Cause:
    """Return the cause of any error that a leg ended with."""
    if isinstance(error, PdplaneError):
        return error.cause
    return Cause.CLOSING if isinstance(error, CancelledError) else Cause.INTERNAL


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error that a leg ended with."""
    return STATUSES[cause_of(error)]


def error_body(status: int, message: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error; `code` names what happened, where a `Cause` does, and `field` what was wrong."""
    kind = _TYPES.get(status, "internal_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def body_of(error: BaseException) -> dict[str, Any]:
    """Return the JSON of an error that a leg ended with."""
    field = error.field if isinstance(error, BadField) else None
    return error_body(status_of(error), str(error) or type(error).__name__, cause_of(error).value, field)


def refuse(status: int, message: str, code: str | None = None) -> web.Response:
    """Return an error answer."""
    return _answer(_KEPT.get(status, status), error_body(status, message, code))


def answer_error(error: BaseException) -> web.Response:
    """Return the answer to a request that failed before its first byte."""
    return _answer(status_of(error), body_of(error))


def _answer(status: int, body: dict[str, Any]) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    answer = web.json_response(body, status=status, headers=headers)
    answer.enable_chunked_encoding()  # gateways lengthen the body and would keep a length that we set
    return answer


OPEN_PATHS = frozenset({"/health", "/health_generate", "/livez"})
"""What load balancers and supervisors ask for, who have no key."""
WRONG_KEY = "the API key is missing or wrong; send it as Authorization: Bearer KEY"


def has_key(request: web.Request, key: str) -> bool:
    """Return whether a request carries the key, in the same time whatever it carries."""
    given = request.headers.get("Authorization", "")
    return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {key}".encode())


def key_needed(key: str) -> Middleware:
    """Return what refuses requests without the key, but for the paths that anybody may ask."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS or has_key(request, key):
            return await handler(request)
        answer = refuse(401, WRONG_KEY)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    return guard


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give aiohttp's own refusals (unknown path, wrong method, body too long) the same body as ours."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        answer = refuse(error.status, f"{request.method} {request.path}: {error.reason}")
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
        return answer
