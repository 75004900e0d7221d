"""The HTTP of `serve` in front of scripted daemons: what passes through, and what a failing half makes of it."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import pytest
from aiohttp import web

from pdplane.control.http_thread import HttpThread
from pdplane.ids import Endpoint
from pdplane.serving.members import Member, Members
from pdplane.serving.pair import PairOptions, pair_app
from pdplane.serving.reading import DEFAULT_BODY

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def good(_request: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "fine"})


async def stuck(_request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits for so long")


def refusing(status: int, message: str) -> Answer:
    async def refuse(_request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return refuse


def streaming(*pieces: bytes, breaks: bool = False, after_s: float = 0.0) -> Answer:
    async def stream(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(after_s)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if breaks:
            assert request.transport is not None
            request.transport.abort()
        return response

    return stream


@attrs.define
class Script:
    """A daemon that answers as it is told and keeps what it was asked."""

    role: str
    answer: Answer = good
    asked: list[dict[str, Any]] = attrs.Factory(list)
    ids: list[str] = attrs.Factory(list)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", good)
        app.router.add_get("/server_info", self._info)
        app.router.add_post("/{path:.*}", self._post)
        return app

    async def _info(self, _request: web.Request) -> web.Response:
        info = {"disaggregation_mode": self.role, "bootstrap_host": "10.1.2.3", "bootstrap_port": 4711}
        return web.json_response(info)

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(await request.json())
        self.ids.append(request.headers["X-Request-Id"])
        return await self.answer(request)


@attrs.define
class Front:
    """A `serve` before one scripted prefill and two scripted decodes."""

    http: HttpThread
    prefill: Script
    decodes: tuple[Script, Script]
    members: Members
    at: Endpoint

    def post(self, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.at.host, self.at.port, timeout=20)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()


@pytest.fixture
def make_front() -> Iterator[Callable[..., Front]]:
    http = HttpThread("serve-under-test")
    http.start()

    def make(prefill: Answer = good, decode: Answer = good, **options: object) -> Front:
        scripts = Script("prefill", prefill), Script("decode", decode), Script("decode", decode)
        found = [Member(one.role, f"http://{http.serve(one.app(), '127.0.0.1', 0)}") for one in scripts]  # type: ignore[arg-type]
        members = Members(found)

        async def checked() -> None:
            for member in members:
                await members.check(member, http.session())

        http.run(checked()).result(10)
        at = http.serve(pair_app(members, PairOptions(**options), http.session), "127.0.0.1", 0)
        return Front(http, scripts[0], scripts[1:], members, at)

    yield make
    http.close()


def message(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


def test_both_halves_get_the_body_and_the_meeting_point(make_front: Callable[..., Front]) -> None:
    front = make_front(defaults={"temperature": 0.5, "max_tokens": 512})
    status, headers, body = front.post(
        {"prompt": "a", "temperature": 0, "seed": None}, headers={"X-Request-Id": "mine"}
    )
    assert (status, json.loads(body), headers["X-Request-Id"]) == (200, {"text": "fine"}, "mine")
    asked = front.prefill.asked + front.decodes[0].asked + front.decodes[1].asked
    room = asked[0]["bootstrap_room"]
    meeting = {"bootstrap_host": "10.1.2.3", "bootstrap_port": 4711, "bootstrap_room": room}
    assert asked == [{"prompt": "a", "temperature": 0, "max_tokens": 512, **meeting}] * 2
    assert front.prefill.ids == ["mine"]


def test_requests_are_spread_over_equals(make_front: Callable[..., Front]) -> None:
    front = make_front()
    for _ in range(4):
        assert front.post({"prompt": "a"})[0] == 200
    assert [len(decode.asked) for decode in front.decodes] == [2, 2]


@pytest.mark.parametrize(
    ("prefill", "decode", "status", "says"),
    [
        (refusing(400, "the prompt is empty"), stuck, 400, "the prompt is empty"),
        (stuck, refusing(502, "prefill is gone"), 502, "prefill is gone"),
        (refusing(400, "bad field"), refusing(502, "the other half failed"), 400, "bad field"),
        (stuck, refusing(503, "no blocks"), 503, "no blocks"),
    ],
)
def test_the_reason_of_the_half_that_failed_is_the_answer(
    make_front: Callable[..., Front], prefill: Answer, decode: Answer, status: int, says: str
) -> None:
    assert (lambda got: (got[0], message(got[2])))(make_front(prefill, decode).post({"prompt": "a"})) == (status, says)


def test_a_stream_passes_through_and_stays_open_meanwhile(make_front: Callable[..., Front]) -> None:
    front = make_front(decode=streaming(b"data: 1\n\n", b"data: [DONE]\n\n", after_s=0.5), keepalive_s=0.1)
    status, headers, body = front.post({"prompt": "a", "stream": True})
    assert (status, headers["Content-Type"]) == (200, "text/event-stream")
    assert body.startswith(b": keepalive\n\n")
    assert body.replace(b": keepalive\n\n", b"") == b"data: 1\n\ndata: [DONE]\n\n"


def test_a_stream_that_breaks_off_ends_with_the_reason(make_front: Callable[..., Front]) -> None:
    front = make_front(decode=streaming(b"data: 1\n\n", breaks=True))
    _, _, body = front.post({"prompt": "a", "stream": True})
    *_, last = body.decode().split("data: ")
    assert "broke off" in json.loads(last)["error"]["message"]


def test_an_unreachable_daemon_has_the_request_tried_with_another_one(make_front: Callable[..., Front]) -> None:
    front = make_front()
    first = next(member for member in front.members if member.role == "decode")
    first.url = "http://127.0.0.1:9"
    for _ in range(3):
        assert front.post({"prompt": "a"})[0] == 200
    assert "cannot connect" in (first.reason or "")
    for member in front.members:
        member.url = "http://127.0.0.1:9"
    status, _, body = front.post({"prompt": "a"})
    assert status == 503
    assert "cannot connect" in message(body)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ([], 400, "JSON object"),
        ({"bootstrap_room": 1}, 400, "bootstrap_room"),
        ({"prompt": "a", "chat_template_kwargs": 1, "messages": []}, 400, "chat_template_kwargs"),
        ({"prompt": "x" * DEFAULT_BODY}, 400, "allows"),
        ({"prompt": functools.reduce(lambda inner, _depth: [inner], range(100), [])}, 400, "nested deeper"),
        ({"prompt": [[]] * 200_001}, 400, "lists, objects and fields"),
    ],
    ids=["a list", "a room", "arguments", "long", "deep", "wide"],
)
def test_bad_bodies_name_what_is_wrong(make_front: Callable[..., Front], body: object, status: int, says: str) -> None:
    got, _, answer = make_front(template_arguments={"enable_thinking": False}).post(body)
    assert (got, says in message(answer)) == (status, True)


def test_keys_origins_and_bounds(make_front: Callable[..., Front]) -> None:
    front = make_front(api_key="k", allowed_origins=("http://page",), max_requests=0)
    status, headers, _ = front.post({"prompt": "a"}, headers={"Origin": "http://page"})
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert headers["Access-Control-Allow-Origin"] == "http://page"
    given = {"Authorization": "Bearer k", "Origin": "http://elsewhere"}
    status, headers, _ = front.post({"prompt": "a"}, headers=given)
    assert (status, headers["Retry-After"]) == (429, "1")
    assert "Access-Control-Allow-Origin" not in headers
    connection = http.client.HTTPConnection(front.at.host, front.at.port, timeout=20)
    connection.request("OPTIONS", "/v1/models", headers={"Origin": "http://page"})
    response = connection.getresponse()
    assert (response.status, "POST" in (response.getheader("Access-Control-Allow-Methods") or "")) == (204, True)
    connection.close()
