"""The HTTP of `pdplane serve`: each request goes to a prefill and to a decode daemon, the client gets decode's answer.

Both daemons get the client's body, with the room and the address of prefill's rendezvous added. Decode's answer passes
through unchanged. When a half fails its reason goes to the client, and closing its connection ends the other half.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import resources
from typing import Any, NoReturn

import aiohttp
import attrs
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from pdplane.errors import PdplaneError
from pdplane.ids import Endpoint, new_room
from pdplane.serving.errors import WRONG_KEY, body_of, error_body, has_key, status_of
from pdplane.serving.fields import parse
from pdplane.serving.members import Member, Members, Role
from pdplane.serving.reading import DEFAULT_BODY, GoOn, Readers, take_body
from pdplane.serving.request_log import CLIENT_LEFT, REQUEST_ID, RequestLine, add_id, id_of

logger = logging.getLogger(__name__)

OTHER_HALF_S = 0.5
"""How long a failure waits for the other half's reason, which may say more."""
_CONNECT_S = 5.0
_FORWARDED = ("/v1/chat/completions", "/chat/completions", "/v1/completions", "/generate")
_OPEN_PATHS = frozenset({"/", "/health", "/favicon.ico"})
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Request-Id",
    "Access-Control-Max-Age": "600",
}


@attrs.frozen(kw_only=True)
class PairOptions:
    """How `serve` answers. `defaults` are put into OpenAI bodies that do not name these fields themselves.

    A stream without news sends a comment every `keepalive_s`, so that proxies and clients keep it open.
    """

    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ("*",)
    max_requests: int = 256
    keepalive_s: float = 5.0
    defaults: Mapping[str, Any] = attrs.Factory(dict)
    template_arguments: Mapping[str, Any] = attrs.Factory(dict)


class Denied(Exception):
    """An answer to the client that is an error: status, body, and whether trying again may help."""

    def __init__(self, status: int, body: Mapping[str, Any], *, again: bool = False) -> None:
        super().__init__(str(body))
        self.status, self.body, self.again = status, body, again

    @classmethod
    def of(cls, status: int, message: str, *, again: bool = False) -> Denied:
        return cls(status, error_body(status, message), again=again)


def pair_app(members: Members, options: PairOptions, session: Callable[[], aiohttp.ClientSession]) -> web.Application:
    """Return the application; `session` returns the client session of the loop that serves it."""
    routes = _PairRoutes(members, options, session)
    app = web.Application(middlewares=[routes.guarded])
    app.on_response_prepare.extend((add_id, routes.add_headers))
    for path in _FORWARDED:
        app.router.add_post(path, routes.forward)
    app.router.add_get("/", routes.page)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{id:.+}", routes.models)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/status", routes.status)
    app.cleanup_ctx.append(routes.checking)
    return app


class _PairRoutes:
    def __init__(self, members: Members, options: PairOptions, session: Callable[[], aiohttp.ClientSession]) -> None:
        self._members, self._options, self._session = members, options, session
        self._running = 0
        self._readers = Readers()

    async def checking(self, _app: web.Application) -> AsyncIterator[None]:
        """Check the members while the application runs."""
        task = asyncio.create_task(self._members.keep_checking(self._session()), name="pdplane-serve-checks")
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    # ---- around every request

    @property
    def guarded(self) -> Middleware:
        """Handle every request: its id, the key, errors as JSON."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.method == "OPTIONS":
                return web.Response(status=204, headers=_PREFLIGHT)
            try:
                self._check_key(request)
                return await handler(request)
            except Denied as refusal:
                return _refused(refusal)
            except web.HTTPException as error:
                return _refused(Denied.of(error.status, f"{request.method} {request.path}: {error.reason}"))

        return guard

    def _check_key(self, request: web.Request) -> None:
        key = self._options.api_key
        if key is None or request.path in _OPEN_PATHS:
            return
        if not has_key(request, key):
            raise Denied.of(401, WRONG_KEY)

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the origin of a page that may read a response."""
        origin, allowed = request.headers.get("Origin"), self._options.allowed_origins
        if origin is None or not ("*" in allowed or origin in allowed):
            return
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in allowed else origin
        response.headers["Vary"] = "Origin"
        response.headers["Access-Control-Expose-Headers"] = f"{REQUEST_ID}, Retry-After"

    # ---- what the daemons are

    async def page(self, _request: web.Request) -> web.Response:
        """Return one static page: a chat, and what the daemons are doing."""
        text = resources.files("pdplane.serving").joinpath("page.html").read_text("utf-8")
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": _PAGE_POLICY})

    async def health(self, _request: web.Request) -> web.Response:
        complaint = self._members.complaint()
        if complaint is None:
            return web.json_response({"status": "ok"})
        return web.json_response({"status": complaint}, status=503, headers={"Retry-After": "1"})

    async def models(self, request: web.Request) -> web.Response:
        """Pass a model question on to a decode daemon."""
        member = self._chosen("decode", frozenset())
        try:
            async with self._session().get(f"{member.url}{request.path}", timeout=_asking()) as answer:
                return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)
        except (aiohttp.ClientError, OSError) as error:
            raise Denied.of(502, f"decode at {member.url}: {str(error) or type(error).__name__}") from error

    async def status(self, _request: web.Request) -> web.Response:
        """Return every daemon with its counts, for the page and for `pdplane top`."""
        daemons = await asyncio.gather(*(self._described(member) for member in self._members))
        return web.json_response({"running": self._running, "daemons": daemons})

    async def _described(self, member: Member) -> dict[str, Any]:
        found: dict[str, Any] = {"role": member.role, "url": member.url, "reason": member.reason}
        found |= {"in_flight": member.in_flight, "served": member.served, "statistics": None}
        found["model"] = member.info.get("served_model_name")
        if member.reason is None:
            try:
                async with self._session().get(f"{member.url}/statistics", timeout=_asking()) as answer:
                    found["statistics"] = await answer.json()
            except (aiohttp.ClientError, OSError, ValueError):
                return found
        return found

    # ---- one request

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answer a request by a pair, and log how that ended."""
        line = RequestLine(request)
        try:
            return line.answered(await self._forwarded(request, line))
        except Denied as refusal:
            line.status = refusal.status
            line.failed(refusal.body)
            raise
        except asyncio.CancelledError:
            line.end = CLIENT_LEFT
            raise
        finally:
            line.write("serve")

    async def _forwarded(self, request: web.Request, line: RequestLine) -> web.StreamResponse:
        """Send a request to a pair, and to another one when a daemon of it cannot be reached."""
        if self._running >= self._options.max_requests:
            raise Denied.of(429, f"{self._running} requests are running already", again=True)
        self._running += 1
        try:
            nbytes, body = await self._taken(request)
            unreachable: set[str] = set()
            while True:
                pair = _Pair(
                    self._chosen("prefill", frozenset(unreachable)), self._chosen("decode", frozenset(unreachable))
                )
                line.facts |= {"prefill": pair.prefill.url, "decode": pair.decode.url}
                room = line.facts["rooms"] = new_room()
                asked = await self._readers.run(nbytes, partial(_addressed, body, pair.prefill.bootstrap, room))
                exchange = _Exchange(request, body, asked, pair, self._session(), self._options.keepalive_s, line)
                try:
                    with pair.counted():
                        return await exchange.run()
                except Unreachable as error:
                    error.member.leave(str(error))
                    unreachable.add(error.member.url)
        except PdplaneError as error:
            raise Denied(status_of(error), body_of(error), again=status_of(error) == 503) from error
        finally:
            self._running -= 1

    async def _taken(self, request: web.Request) -> tuple[int, dict[str, Any]]:
        """Return how long a body is, and what it says."""
        longest = max((member.longest_body for member in self._members), default=DEFAULT_BODY)
        data = await take_body(request, longest)
        return len(data), await self._readers.run(len(data), lambda _go_on: self._read(data, request.path))

    def _chosen(self, role: Role, but: frozenset[str]) -> Member:
        member = self._members.choose(role, but)
        if member is None:
            raise Denied.of(503, self._members.complaint() or f"no other {role} daemon can be reached", again=True)
        return member

    def _read(self, data: bytes, path: str) -> dict[str, Any]:
        body = parse(data)
        for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
            if name in body:
                raise Denied.of(400, f"{name} is given by this server; leave it out")
        return body if path == "/generate" else self._with_defaults(body)

    def _with_defaults(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return an OpenAI body with the server's defaults for what it leaves out."""
        defaults = dict(self._options.defaults)
        if body.get("max_completion_tokens") is not None:
            defaults.pop("max_tokens", None)
        whole = defaults | {name: value for name, value in body.items() if value is not None}
        if self._options.template_arguments and "messages" in whole:
            own = whole.get("chat_template_kwargs", {})
            if not isinstance(own, dict):
                raise Denied.of(400, "chat_template_kwargs must be an object")
            whole["chat_template_kwargs"] = {**self._options.template_arguments, **own}
        return whole


@attrs.frozen(eq=False)
class _Pair:
    prefill: Member
    decode: Member

    @contextmanager
    def counted(self) -> Iterator[None]:
        for member in (self.prefill, self.decode):
            member.in_flight += 1
            member.served += 1
        try:
            yield
        finally:
            for member in (self.prefill, self.decode):
                member.in_flight -= 1


class Unreachable(Exception):
    """Nothing listens at a member's address: the request never reached it."""

    def __init__(self, member: Member, error: BaseException) -> None:
        super().__init__(f"cannot connect: {error}")
        self.member = member


@attrs.define(eq=False)
class _Exchange:
    """One request at one pair of daemons."""

    request: web.Request
    body: Mapping[str, Any]
    asked: bytes
    pair: _Pair
    session: aiohttp.ClientSession
    keepalive_s: float
    line: RequestLine
    out: web.StreamResponse | None = None
    responses: list[aiohttp.ClientResponse] = attrs.Factory(list)

    async def run(self) -> web.StreamResponse:
        """Answer the client. Raises Unreachable or Denied, and then nothing was sent."""
        prefill = asyncio.create_task(self._prefill())
        decode = asyncio.create_task(self._post(self.pair.decode))
        lost = [asyncio.create_task(member.lost.wait()) for member in (self.pair.prefill, self.pair.decode)]
        try:
            return await self._answer(prefill, decode, lost)
        finally:
            for task in (prefill, decode, *lost):
                task.cancel()
            for response in self.responses:
                response.close()  # which ends a half that still runs
            await asyncio.gather(prefill, decode, *lost, return_exceptions=True)

    async def _answer(
        self,
        prefill: asyncio.Task[None],
        decode: asyncio.Task[aiohttp.ClientResponse],
        lost: list[asyncio.Task[Any]],
    ) -> web.StreamResponse:
        try:
            response = await self._begun(prefill, decode, lost)
            if self.out is None and not _is_stream(response):
                body = await self._unless_lost(response.read(), lost)
                return _passed_on(response, body)
            return await self._stream(response, prefill, lost)
        except (Denied, Unreachable) as error:
            if self.out is None:
                raise
            reason = error.body if isinstance(error, Denied) else error_body(502, f"{error.member.role}: {error}")
            self.line.failed(reason)
            await self.out.write(_event(reason))
            await self.out.write_eof()
            return self.out

    async def _begun(
        self,
        prefill: asyncio.Task[None],
        decode: asyncio.Task[aiohttp.ClientResponse],
        lost: list[asyncio.Task[Any]],
    ) -> aiohttp.ClientResponse:
        """Return decode's response once its head is there. Raises the reason of a half that failed before."""
        waiting: set[asyncio.Task[Any]] = {prefill, decode, *lost}
        streams = bool(self.body.get("stream"))
        while True:
            done, _ = await asyncio.wait(
                waiting, timeout=self.keepalive_s if streams else None, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                await self._keep_open()
            if decode in done:
                return await self._head(decode, prefill)
            if prefill in done and prefill.exception() is not None:
                await asyncio.wait({decode}, timeout=OTHER_HALF_S)
                raise prefill.exception() or AssertionError
            if gone := done & set(lost):
                self._is_lost(lost.index(gone.pop()))
            waiting -= done

    async def _head(
        self, decode: asyncio.Task[aiohttp.ClientResponse], prefill: asyncio.Task[None]
    ) -> aiohttp.ClientResponse:
        response = decode.result()
        if response.status == 200:
            return response
        refusal = await _refusal_in(response, "decode")
        if refusal.status in (502, 503):
            await asyncio.wait({prefill}, timeout=OTHER_HALF_S)
            if prefill.done() and isinstance(error := prefill.exception(), Denied) and error.status == 400:
                raise error
        raise refusal

    async def _stream(
        self, response: aiohttp.ClientResponse, prefill: asyncio.Task[None], lost: list[asyncio.Task[Any]]
    ) -> web.StreamResponse:
        out = await self._opened()
        try:
            while piece := await self._unless_lost(response.content.readany(), lost):
                await out.write(piece)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, ConnectionResetError) and self.request.transport is None:
                raise
            raise Denied.of(
                502, f"decode at {self.pair.decode.url} broke off: {str(error) or type(error).__name__}"
            ) from error
        await out.write_eof()
        return out

    async def _unless_lost(self, awaitable: Awaitable[bytes], lost: list[asyncio.Task[Any]]) -> bytes:
        """Await decode's bytes for as long as decode is not lost; prefill has done its part then."""
        read = asyncio.ensure_future(awaitable)
        try:
            await asyncio.wait({read, lost[1]}, return_when=asyncio.FIRST_COMPLETED)
            if not read.done():
                self._is_lost(1)
            return read.result()
        finally:
            read.cancel()  # of no effect when it has ended; else the client left, or decode is lost

    def _is_lost(self, index: int) -> NoReturn:
        member = (self.pair.prefill, self.pair.decode)[index]
        raise Denied.of(502, f"{member.role} at {member.url} does not answer: {member.reason}")

    async def _keep_open(self) -> None:
        out = await self._opened()
        await out.write(b": keepalive\n\n")

    async def _opened(self) -> web.StreamResponse:
        if self.out is None:
            self.out = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            )
            await self.out.prepare(self.request)
        return self.out

    async def _prefill(self) -> None:
        """Run prefill's half, of whose answer only a failure matters."""
        response = await self._post(self.pair.prefill)
        async with response:
            if response.status != 200:
                raise await _refusal_in(response, "prefill")
            await response.read()

    async def _post(self, member: Member) -> aiohttp.ClientResponse:
        headers = {REQUEST_ID: id_of(self.request), "Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        try:
            response = await self.session.post(
                f"{member.url}{self.request.path}", data=self.asked, headers=headers, timeout=timeout
            )
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(member, error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise Denied.of(502, f"{member.role} at {member.url}: {str(error) or type(error).__name__}") from error
        self.responses.append(response)
        return response


def _addressed(body: Mapping[str, Any], rendezvous: Endpoint, room: int, _go_on: GoOn) -> bytes:
    """Return the body that both daemons get, with a new room and the address of prefill's rendezvous."""
    place = {
        "bootstrap_host": rendezvous.host,
        "bootstrap_port": rendezvous.port,
        "bootstrap_room": room,
    }
    return json.dumps({**body, **place}).encode()


async def _refusal_in(response: aiohttp.ClientResponse, role: Role) -> Denied:
    """Return a daemon's error as it is, or one that describes an answer without any."""
    again = "Retry-After" in response.headers
    try:
        body = json.loads(await response.read())
        body["error"]["message"]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, RecursionError):
        return Denied.of(502, f"{role} answered {response.status} without a reason", again=again)
    return Denied(response.status, body, again=again)


def _refused(refusal: Denied) -> web.Response:
    headers = {"Retry-After": "1"} if refusal.again else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(refusal.body, status=refusal.status, headers=headers)


def _passed_on(response: aiohttp.ClientResponse, body: bytes) -> web.Response:
    return web.Response(body=body, status=response.status, content_type=response.content_type)


def _is_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _asking() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=5.0)
