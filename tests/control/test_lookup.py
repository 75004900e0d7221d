"""Look-ups and announcements against the real rendezvous, a scripted server, and addresses where nobody answers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import attrs
import pytest
from aiohttp import web

from pdplane.control.http_thread import HttpThread
from pdplane.control.lookup import (
    Announcement,
    Announcer,
    AnnouncerOptions,
    LookUpOptions,
    PrefillFound,
    PrefillNotFound,
    RankAddress,
    RendezvousClient,
)
from pdplane.control.rendezvous import rendezvous_app
from pdplane.ids import Endpoint, Life, Rank, Room, new_life
from pdplane.security import Secret
from tests.control.registrations import LAYOUT, native, registration
from tests.http_client import ask

SOON = LookUpOptions(deadline_s=20, unreachable_s=0.2, first_pause_s=0.01, longest_pause_s=0.05)
QUICK = AnnouncerOptions(repeat_s=0.05, first_pause_s=0.01, longest_pause_s=0.05)
LIFE = Life("0123456789abcdef" * 2)
SECRET = Secret(b"a secret of some length")


@pytest.fixture
def http() -> Iterator[HttpThread]:
    thread = HttpThread("pdplane-http-test")
    thread.start()
    yield thread
    thread.close()


def begin(look_up: RendezvousClient, bootstrap: Endpoint, room: int = 5) -> Future[PrefillFound | PrefillNotFound]:
    result: Future[PrefillFound | PrefillNotFound] = Future()
    look_up.find(bootstrap, Room(room), result.set_result)
    return result


def announcement(rank: int = 0, world_size: int = 1, dp_size: int = 1) -> Announcement:
    return Announcement(rank, world_size, dp_size, "127.0.0.1", 7000 + rank, 7100 + rank, LIFE, LAYOUT.encode())


def scripted(http: HttpThread, *answers: tuple[int, str]) -> Endpoint:
    """A server that gives its answers in order, the last one for ever."""
    script = list(answers)

    async def route(_request: web.Request) -> web.Response:
        status, text = script.pop(0) if len(script) > 1 else script[0]
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/route", route)
    return http.serve(app, "127.0.0.1", 0)


def unused_port() -> Endpoint:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Endpoint("127.0.0.1", server.getsockname()[1])


def test_finds_the_group_of_the_room(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)
    for rank in range(4):
        body = announcement(rank, world_size=4, dp_size=2).body()
        assert ask(bootstrap, "PUT", "/route", body).status == 200
    found = begin(RendezvousClient(http, SOON), bootstrap, room=7).result(10)
    ranks = (
        RankAddress(Rank(0), "127.0.0.1", 7002, 7102, LIFE),
        RankAddress(Rank(1), "127.0.0.1", 7003, 7103, LIFE),
    )
    assert found == PrefillFound(bootstrap, 2, 2, 1, LAYOUT.encode(), ranks)


def test_a_legacy_rank_has_no_router_port(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)
    assert ask(bootstrap, "PUT", "/route", registration()).status == 200
    found = begin(RendezvousClient(http, SOON), bootstrap).result(10)
    assert isinstance(found, PrefillFound)
    assert found.ranks == (RankAddress(Rank(0), "127.0.0.1", 7000),)


def test_waits_for_ranks_that_come_late(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)
    search = begin(RendezvousClient(http, SOON), bootstrap)
    announcer = Announcer(http, bootstrap, announcement(), options=QUICK)
    announcer.start()
    assert isinstance(search.result(10), PrefillFound)
    announcer.stop()


def test_a_legacy_server_without_ranks_is_asked_again(http: HttpThread) -> None:
    empty = json.dumps({"prefill_tp_size": None, "prefill_dp_size": None, "cache_layout": None})
    full = json.dumps({"prefill_tp_size": 1, "prefill_dp_size": 1, "cache_layout": LAYOUT})
    rank = json.dumps({"rank_ip": "10.0.0.1", "rank_port": 4000})
    bootstrap = scripted(http, (200, empty), (200, full), (500, "500 Internal Server Error"), (200, full), (200, rank))
    found = begin(RendezvousClient(http, SOON), bootstrap).result(10)
    assert isinstance(found, PrefillFound)
    assert found.ranks[0].host == "10.0.0.1"


def test_a_burst_shares_questions_and_none_gets_an_answer_older_than_its_own(http: HttpThread) -> None:
    asked: list[str] = []
    gate = asyncio.Event()
    sync = {"prefill_tp_size": 1, "prefill_dp_size": 1, "cache_layout": LAYOUT}

    async def route(request: web.Request) -> web.Response:
        asked.append(request.query["engine_rank"])
        await gate.wait()
        rank = {"rank_ip": "10.0.0.1", "rank_port": 4000 + len(asked)}
        return web.json_response(sync if request.query["engine_rank"] == "-1" else rank)

    async def open_gate() -> None:
        gate.set()

    app = web.Application()
    app.router.add_route("GET", "/route", route)
    bootstrap = http.serve(app, "127.0.0.1", 0)
    client = RendezvousClient(http, LookUpOptions())
    rooms = [begin(client, bootstrap, room) for room in range(200)]
    http.run(open_gate()).result(10)  # behind every question: the loop runs what is posted in order
    found = [room.result(10) for room in rooms]
    assert all(isinstance(each, PrefillFound) for each in found)
    assert sorted(asked) == ["-1", "-1", "0", "0"]


def test_says_at_the_deadline_what_is_missing(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)
    not_found = begin(RendezvousClient(http, LookUpOptions(deadline_s=0.1, first_pause_s=0.01)), bootstrap).result(10)
    assert isinstance(not_found, PrefillNotFound)
    assert f"127.0.0.1:{bootstrap.port}" in not_found.cause
    assert "503" in not_found.cause
    assert "not every prefill rank has registered" in not_found.cause


def test_an_address_where_nobody_listens_is_given_up_soon(http: HttpThread) -> None:
    nobody = unused_port()
    not_found = begin(RendezvousClient(http, LookUpOptions(deadline_s=10_000, unreachable_s=0.1)), nobody).result(10)
    assert isinstance(not_found, PrefillNotFound)
    assert str(nobody.port) in not_found.cause


def test_an_address_that_swallows_everything_is_given_up_at_the_deadline(http: HttpThread) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Endpoint("127.0.0.1", silent.getsockname()[1])
        options = LookUpOptions(deadline_s=0.5, unreachable_s=0.1, request_timeout_s=0.2)
        not_found = begin(RendezvousClient(http, options), address).result(10)
    assert isinstance(not_found, PrefillNotFound)
    assert "no answer came within" in not_found.cause


def test_a_rendezvous_that_is_slow_to_answer_is_waited_for(http: HttpThread) -> None:
    """Slower than `unreachable_s` and than `request_timeout_s`: it has until the deadline."""
    answered: list[str] = []

    async def route(request: web.Request) -> web.Response:
        await asyncio.sleep(0.4)
        answered.append(request.query["engine_rank"])
        rank = {"rank_ip": "10.0.0.1", "rank_port": 4000}
        return web.json_response(GOOD if answered[-1] == "-1" else rank)

    app = web.Application()
    app.router.add_get("/route", route)
    options = LookUpOptions(deadline_s=20, unreachable_s=0.1, request_timeout_s=0.2)
    found = begin(RendezvousClient(http, options), http.serve(app, "127.0.0.1", 0)).result(20)
    assert isinstance(found, PrefillFound)
    assert answered == ["-1", "0"]


@pytest.mark.parametrize("host", ["a b", "x" * 300, "..", "[", "\u0000", "h/../x"])
def test_a_host_that_cannot_be_one_is_not_found(http: HttpThread, host: str) -> None:
    options = LookUpOptions(deadline_s=1, unreachable_s=0.05)
    assert isinstance(begin(RendezvousClient(http, options), Endpoint(host, 1)).result(10), PrefillNotFound)


GOOD = {"prefill_tp_size": 1, "prefill_dp_size": 1, "cache_layout": "{}"}


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [
        (401, '{"error": {"message": "no token"}}', "it asks for a secret"),
        (404, "404: Not Found", "404"),
        (200, "hello", "not valid JSON"),
        (200, "[" * 100_000, "nested too deeply"),
        (200, "[]", "must be a JSON object"),
        (200, "x" * (2 << 20), "longer than"),
        (200, json.dumps(GOOD | {"prefill_tp_size": True}), "prefill_tp_size"),
        (200, json.dumps(GOOD | {"prefill_tp_size": 10**9}), "prefill_tp_size"),
        (200, json.dumps(GOOD | {"prefill_pp_size": 2}), "prefill_pp_size is 2: a newer legacy engine"),
        (200, json.dumps(GOOD | {"prefill_tp_size": 3, "prefill_dp_size": 2}), "multiple"),
        (200, json.dumps(GOOD | {"cache_layout": 7}), "cache_layout"),
        (200, json.dumps(GOOD | {"cache_layout": "\u00e9"}), "cache_layout"),
        (200, json.dumps(GOOD), "rank_ip"),
        (302, "elsewhere", "302"),
    ],
)
def test_an_answer_that_is_no_use_is_named_at_once(http: HttpThread, status: int, text: str, words: str) -> None:
    bootstrap = scripted(http, (status, text))
    options = LookUpOptions(deadline_s=10_000, unreachable_s=0.05)
    not_found = begin(RendezvousClient(http, options), bootstrap).result(10)
    assert isinstance(not_found, PrefillNotFound)
    assert words in not_found.cause


@pytest.mark.parametrize(
    "changes",
    [{"rank_port": 0}, {"pdplane": 2}, {"pdplane": 1, "router_port": 1}, {"pdplane": 1, "prefill_life": "x"}],
)
def test_a_rank_answer_of_wrong_fields_is_refused(http: HttpThread, changes: dict[str, Any]) -> None:
    rank = {"rank_ip": "10.0.0.1", "rank_port": 4000} | changes
    bootstrap = scripted(http, (200, json.dumps(GOOD)), (200, json.dumps(rank)))
    assert isinstance(begin(RendezvousClient(http, SOON), bootstrap).result(10), PrefillNotFound)


def test_every_look_up_is_answered_when_the_thread_closes() -> None:
    http = HttpThread()
    http.start()
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)
    look_up = RendezvousClient(http, SOON)
    waiting = [begin(look_up, bootstrap) for _ in range(20)]
    http.close()
    waiting.append(begin(look_up, bootstrap))
    for search in waiting:
        assert isinstance(search.result(10), PrefillNotFound)


def test_the_token_of_the_secret_is_sent(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(SECRET), "127.0.0.1", 0)
    announcer = Announcer(http, bootstrap, announcement(), secret=SECRET, options=QUICK)
    announcer.start()
    assert announcer.ready.wait(10)
    announcer.stop()
    assert isinstance(begin(RendezvousClient(http, SOON, SECRET), bootstrap).result(10), PrefillFound)
    assert isinstance(begin(RendezvousClient(http, SOON), bootstrap).result(10), PrefillNotFound)


def test_a_stranger_gets_nothing_that_it_could_use_and_is_not_quoted(http: HttpThread) -> None:
    """Whoever a client names as rendezvous: no credential of ours goes there, and nothing it says comes back."""
    heard: list[dict[str, str]] = []

    async def route(request: web.Request) -> web.Response:
        heard.append(dict(request.headers))
        challenge = {"WWW-Authenticate": f"Pdplane {'0' * 48}"}
        return web.Response(status=401, text='{"error": {"message": "internal words"}}', headers=challenge)

    app = web.Application()
    app.router.add_route("*", "/route", route)
    stranger = http.serve(app, "127.0.0.1", 0)
    not_found = begin(RendezvousClient(http, SOON, SECRET), stranger).result(10)
    assert isinstance(not_found, PrefillNotFound)
    assert "does not prove that it knows our secret" in not_found.cause
    assert "internal words" not in not_found.cause
    proof = heard[1]["Authorization"].split(" ")[2]
    ours = http.serve(rendezvous_app(SECRET), "127.0.0.1", 0)
    stolen = {"Authorization": f"Pdplane {'0' * 48} {proof}"}
    assert ask(ours, "GET", "/route?engine_rank=-1&target_dp_group=-1", headers=stolen).status == 401
    assert "internal words" not in str(begin(RendezvousClient(http, SOON), stranger).result(10))


def test_announces_until_it_is_heard(http: HttpThread) -> None:
    heard: list[str] = []
    bootstrap = scripted(http, *[(500, "500 Internal Server Error\n\nServer got itself in trouble")] * 3, (200, "OK"))
    announcer = Announcer(http, bootstrap, announcement(), on_ready=lambda: heard.append("ready"), options=QUICK)
    announcer.start()
    announcer.start()
    assert announcer.ready.wait(10)
    announcer.stop()
    announcer.stop()
    http.close()
    assert heard == ["ready"]


def test_announces_before_the_rendezvous_listens(http: HttpThread) -> None:
    address = unused_port()
    announcer = Announcer(http, address, announcement(), options=QUICK)
    announcer.start()
    _until(lambda: announcer.trouble is not None)
    assert not announcer.ready.is_set()
    assert str(address.port) in str(announcer.trouble)
    http.serve(rendezvous_app(), address.host, address.port)
    assert announcer.ready.wait(10)
    _until(lambda: announcer.trouble is None)
    announcer.stop()


def test_a_rendezvous_that_forgot_everybody_is_filled_again(http: HttpThread) -> None:
    first = HttpThread("pdplane-http-first")
    first.start()
    bootstrap = first.serve(rendezvous_app(), "127.0.0.1", 0)
    announcer = Announcer(http, bootstrap, announcement(), options=QUICK)
    announcer.start()
    assert announcer.ready.wait(10)
    first.close()
    http.serve(rendezvous_app(), bootstrap.host, bootstrap.port)
    assert isinstance(begin(RendezvousClient(http, SOON), bootstrap).result(10), PrefillFound)
    announcer.stop()


def test_a_refusal_is_kept_in_its_words(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)
    assert ask(bootstrap, "PUT", "/route", native(new_life())).status == 200
    announcer = Announcer(http, bootstrap, announcement(), options=QUICK)
    announcer.start()
    _until(lambda: announcer.trouble is not None)
    announcer.stop()
    assert "409" in str(announcer.trouble)
    assert "still lives" in str(announcer.trouble)
    assert not announcer.ready.is_set()


def _until(holds: Callable[[], bool]) -> None:
    """Wait, bounded, for a state that announces itself to nobody."""
    turn = threading.Event()
    for _ in range(2000):
        if holds():
            return
        turn.wait(0.005)
    pytest.fail("it never came true")


def test_a_registration_that_lapsed_counts_no_more(http: HttpThread) -> None:
    first = HttpThread("pdplane-http-lapsing")
    first.start()
    bootstrap = first.serve(rendezvous_app(), "127.0.0.1", 0)
    announcer = Announcer(http, bootstrap, announcement(), options=attrs.evolve(QUICK, lease_s=1.0))
    announcer.start()
    assert announcer.ready.wait(10)
    _until(lambda: announcer.is_registered)
    first.close()
    _until(lambda: not announcer.is_registered)
    assert not announcer.has_ended
    announcer.stop()
    assert not announcer.has_ended, "it was stopped"


def test_an_announcer_that_ended_by_a_bug_is_told(http: HttpThread) -> None:
    bootstrap = http.serve(rendezvous_app(), "127.0.0.1", 0)

    def bug() -> None:
        raise ZeroDivisionError

    announcer = Announcer(http, bootstrap, announcement(), on_ready=bug, options=QUICK)
    announcer.start()
    _until(lambda: announcer.has_ended)
