"""One bounded HTTP exchange with another machine, on the HTTP thread."""

from __future__ import annotations

import json

import aiohttp

from pdplane.control.http_thread import HttpThread
from pdplane.errors import RendezvousError
from pdplane.security import Secret

MAX_ANSWER = 1 << 20


async def exchange(
    http: HttpThread,
    method: str,
    url: str,
    secret: Secret | None,
    connect_timeout_s: float,
    request_timeout_s: float,
    *,
    body: str | None = None,
) -> tuple[int, str]:
    """One bounded HTTP exchange: status and text. Raises RendezvousError with status 0 when nobody answered."""
    headers = {} if secret is None else {"Authorization": f"Bearer {secret.bearer()}"}
    if body is not None:
        headers["Content-Type"] = "application/json"
    timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=connect_timeout_s)
    try:
        async with http.session().request(
            method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await _read(response)
    except TimeoutError as error:
        raise RendezvousError(url, 0, "nobody answered in time") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host that cannot be a name
        raise RendezvousError(url, 0, str(error) or type(error).__name__) from error


async def _read(response: aiohttp.ClientResponse) -> str:
    parts, size = [], 0
    async for part in response.content.iter_chunked(65536):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise ValueError(f"the answer is longer than {MAX_ANSWER} bytes")
    return b"".join(parts).decode("utf-8", "replace")


def reason_in(text: str) -> str:
    """The message inside an error body of ours, or the first line of another server's."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, RecursionError, KeyError, TypeError):
        message = text.strip().partition("\n")[0]
    return str(message)[:300] or "no reason given"
