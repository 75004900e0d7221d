"""The rendezvous over real HTTP: the legacy server's recorded sequences, refusals, replacement, proofs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pdplane.control.http_thread import HttpThread
from pdplane.control.rendezvous import (
    LEASE_S,
    NONCE_HEADER,
    PROOF_HEADER,
    RankTable,
    answer_proof,
    rendezvous_app,
    request_proof,
)
from pdplane.errors import RendezvousError
from pdplane.ids import Endpoint, new_life
from pdplane.net import JsonValue
from pdplane.security import Nonces, Secret
from tests.control.registrations import CASES, native, other_layout, registration
from tests.http_client import Answer, ask

SYNC = "/route?engine_rank=-1&target_dp_group=-1"

# Where we answer otherwise than the legacy server, by (case, step): our status and the reason.
STRICTER = {
    ("empty_server", 1): (503, "nulls told a decode nothing that it could use; 503 says that asking again may help"),
    ("empty_server", 2): (404, "a missing rank is no server error"),
    ("single", 3): (404, "a rank outside the group is no server error"),
    ("single", 4): (404, "a group outside the instance is no server error"),
    ("world4_dp2", 9): (404, "a rank outside the group is no server error"),
    ("sizes_first_writer_wins", 1): (400, "a PUT whose sizes differ from the registered ranks' is refused"),
    ("sizes_first_writer_wins", 2): (503, "one of two ranks has registered, and half a table misleads a decode"),
    ("sizes_first_writer_wins", 3): (404, "the first rank's sizes hold, and the second rank was refused"),
    ("layout_mismatch", 1): (400, "another layout is the sender's fault"),
    ("layout_missing", 0): (400, "a missing field is the sender's fault"),
    ("layout_missing", 1): (503, "nothing has registered"),
    ("layout_not_string", 0): (400, "a field of the wrong type is the sender's fault"),
    ("role_other_is_ignored", 0): (400, "a role that does not register here is told so"),
    ("role_other_is_ignored", 1): (503, "a refused PUT leaves nothing behind"),
    ("role_other_is_ignored", 2): (404, "a missing rank is no server error"),
    ("missing_fields", 0): (400, "a missing field is the sender's fault"),
    ("missing_fields", 1): (400, "a missing field is the sender's fault"),
    ("missing_fields", 2): (400, "a missing field is the sender's fault"),
    ("dp_zero", 0): (400, "a size of zero is the sender's fault, and is not stored"),
    ("bad_json", 0): (400, "a body that is no JSON is the sender's fault"),
    ("get_missing_params", 3): (400, "a rank that is no number is the asker's fault"),
    ("half_sync_query", 1): (400, "half a sync question is the asker's fault"),
    ("half_sync_query", 2): (400, "half a sync question is the asker's fault"),
}


class Clock:
    """Seconds that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def http() -> Iterator[HttpThread]:
    thread = HttpThread("pdplane-http-test")
    thread.start()
    yield thread
    thread.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(http: HttpThread, clock: Clock) -> Endpoint:
    return http.serve(rendezvous_app(clock=clock), "127.0.0.1", 0)


def refused(answer: Answer, status: int, *words: str) -> None:
    assert answer.status == status, answer.body
    error = answer.json["error"]
    assert error["code"] == status
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_answers_as_the_legacy_server(server: Endpoint, case: dict[str, Any]) -> None:
    for step, (request, expected) in enumerate(zip(case["input"], case["expected"], strict=True)):
        answer = ask(server, request["method"], request["path"], request.get("body"))
        if (case["name"], step) in STRICTER:
            refused(answer, STRICTER[case["name"], step][0])
            continue
        assert answer.status == expected["status"], (step, answer.body)
        assert answer.headers["Content-Type"] == expected["content_type"]
        assert answer.body == expected["body"]


def test_every_stricter_answer_belongs_to_a_recorded_step() -> None:
    steps = {(case["name"], step): row for case in CASES for step, row in enumerate(case["expected"])}
    for key, (status, reason) in STRICTER.items():
        assert steps[key]["status"] != status, (key, reason)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dp_size": 0}, "dp_size"),
        ({"world_size": 3, "dp_size": 2}, "world_size"),
        ({"world_size": 10**30}, "world_size"),
        ({"pp_size": 2}, "pp_size is 2: a newer legacy engine"),
        ({"world_size": True}, "world_size"),
        ({"world_size": 1.0}, "world_size"),
        ({"engine_rank": -1}, "engine_rank"),
        ({"engine_rank": 1}, "engine_rank"),
        ({"rank_port": 0}, "rank_port"),
        ({"rank_port": 70000}, "rank_port"),
        ({"rank_port": "12x"}, "rank_port"),
        ({"role": "Router"}, "Router"),
        ({"role": 7}, "role"),
        ({"rank_ip": ""}, "rank_ip"),
        ({"rank_ip": "a b"}, "rank_ip"),
        ({"rank_ip": "http://x/"}, "rank_ip"),
        ({"rank_ip": None}, "rank_ip"),
        ({"cache_layout": "null"}, "cache_layout"),
        ({"cache_layout": "[" * 100_000}, "cache_layout"),
        ({"cache_layout": "\u00e9"}, "cache_layout"),
        ({"pdplane": 2}, "pdplane"),
        ({"pdplane": 1}, "prefill_life"),
        ({"pdplane": 1, "prefill_life": "x" * 32, "router_port": 1}, "prefill_life"),
        ({"pdplane": 1, "prefill_life": "0" * 32}, "router_port"),
    ],
)
def test_a_bad_put_is_refused_and_leaves_nothing(server: Endpoint, changes: dict[str, Any], word: str) -> None:
    refused(ask(server, "PUT", "/route", registration(**changes)), 400, word)
    refused(ask(server, "GET", SYNC), 503, "no prefill rank")


@pytest.mark.parametrize("body", ["", "null", "[1]", '"x"', "[" * 100_000, b"\xff\xfe", "x" * (1 << 20) + "x"])
def test_a_body_that_is_no_object_is_refused(server: Endpoint, body: str | bytes) -> None:
    refused(ask(server, "PUT", "/route", body), 400, "body")


@pytest.mark.parametrize("path", ["engine_rank=9&target_dp_group=0", "engine_rank=0&target_dp_group=99999999"])
def test_a_rank_that_cannot_exist_is_404(server: Endpoint, path: str) -> None:
    assert ask(server, "PUT", "/route", registration()).status == 200
    refused(ask(server, "GET", f"/route?{path}"), 404)


@pytest.mark.parametrize("rank", ["abc", "1e9", "-2", "0x1", "9" * 400])
def test_a_rank_that_is_no_number_is_400(server: Endpoint, rank: str) -> None:
    refused(ask(server, "GET", f"/route?engine_rank={rank}&target_dp_group=0"), 400)


def test_answers_503_until_all_ranks_are_there(server: Endpoint) -> None:
    for rank in range(3):
        body = registration(world_size=4, engine_rank=rank, rank_port=7000 + rank)
        assert ask(server, "PUT", "/route", body).status == 200
    answer = ask(server, "GET", SYNC)
    refused(answer, 503, "1 of 4", ": 3")
    assert answer.headers["Retry-After"] == "1"
    refused(ask(server, "GET", "/route?engine_rank=3&target_dp_group=0"), 404, "rank 3")
    assert ask(server, "PUT", "/route", registration(world_size=4, engine_rank=3)).status == 200
    assert ask(server, "GET", SYNC).json["prefill_tp_size"] == 4


def test_native_ranks_are_told_apart(server: Endpoint) -> None:
    life = new_life()
    assert ask(server, "PUT", "/route", native(life)).status == 200
    assert ask(server, "GET", SYNC).json["pdplane"] == 1
    assert ask(server, "GET", "/route?engine_rank=0&target_dp_group=0").json == {
        "rank_ip": "127.0.0.1",
        "rank_port": 7000,
        "pdplane": 1,
        "router_port": 7100,
        "prefill_life": life,
    }


def test_a_live_rank_is_not_replaced_until_its_lease_lapses(server: Endpoint, clock: Clock) -> None:
    first, second = new_life(), new_life()
    assert ask(server, "PUT", "/route", native(first)).status == 200
    clock.now = LEASE_S - 1
    assert ask(server, "PUT", "/route", native(first)).status == 200
    clock.now += LEASE_S - 1
    for intruder in (native(second, rank_port=1), registration(), native(second, cache_layout=other_layout())):
        refused(ask(server, "PUT", "/route", intruder), 409, first)
    assert ask(server, "GET", "/route?engine_rank=0&target_dp_group=0").json["prefill_life"] == first
    clock.now += 1
    refused(ask(server, "GET", "/route?engine_rank=0&target_dp_group=0"), 404)
    assert ask(server, "PUT", "/route", native(second, cache_layout=other_layout())).status == 200
    assert ask(server, "GET", SYNC).json["cache_layout"] == other_layout()


def test_a_life_that_everybody_is_told_moves_no_rank(server: Endpoint) -> None:
    life, where = new_life(), "/route?engine_rank=0&target_dp_group=0"
    mine = native(life, token="known to us alone")
    assert ask(server, "PUT", "/route", mine).status == 200
    told = ask(server, "GET", where)
    assert "known to us alone" not in str(told)
    for thief in (native(life, rank_port=1), native(life, rank_port=1, token="a guess"), registration(rank_port=1)):
        refused(ask(server, "PUT", "/route", thief), 409, life)
    assert ask(server, "GET", where).json == told.json
    assert ask(server, "PUT", "/route", mine | {"rank_port": 7009}).status == 200


def test_a_legacy_rank_is_moved_from_its_own_address_only() -> None:
    table = RankTable()
    table.put(JsonValue(registration(), "body"), 0.0, "10.0.0.1")
    with pytest.raises(RendezvousError, match="a legacy rank at"):
        table.put(JsonValue(registration(rank_port=1), "body"), 0.0, "10.0.0.66")
    table.put(JsonValue(registration(rank_port=7009), "body"), 0.0, "10.0.0.1")


def test_another_layout_is_refused_while_other_ranks_live(server: Endpoint) -> None:
    lives = [new_life(), new_life()]
    for rank, life in enumerate(lives):
        assert ask(server, "PUT", "/route", native(life, world_size=2, engine_rank=rank)).status == 200
    changed = native(lives[0], world_size=2, engine_rank=0, cache_layout=other_layout())
    refused(ask(server, "PUT", "/route", changed), 400, "cache_layout differs")
    refused(ask(server, "PUT", "/route", native(lives[0], world_size=4)), 400, "world_size differs")


def test_a_legacy_rank_is_replaced_from_its_own_host_only(server: Endpoint, clock: Clock) -> None:
    assert ask(server, "PUT", "/route", registration()).status == 200
    clock.now = 1000 * LEASE_S
    refused(ask(server, "PUT", "/route", registration(rank_ip="127.0.0.2")), 409, "127.0.0.1")
    assert ask(server, "PUT", "/route", registration(rank_port=7009)).status == 200
    assert ask(server, "GET", "/route?engine_rank=0&target_dp_group=0").json == {
        "rank_ip": "127.0.0.1",
        "rank_port": 7009,
    }


SECRET = Secret(b"sixteen bytes or more")


def proving(server: Endpoint, method: str, path: str, body: bytes = b"", secret: Secret = SECRET) -> dict[str, str]:
    """The headers of a request that proves the secret, after asking for a nonce."""
    refused_first = ask(server, method, path, body or None)
    scheme, nonce = refused_first.headers["WWW-Authenticate"].split(" ")
    proof = request_proof(secret, nonce, method, str(server), path, body)
    return {"Authorization": f"{scheme} {nonce} {proof}", NONCE_HEADER: "mine"}


def test_a_secret_is_proved_by_both_sides(http: HttpThread) -> None:
    server = http.serve(rendezvous_app(SECRET), "127.0.0.1", 0)
    body = json.dumps(registration()).encode()
    registered = ask(server, "PUT", "/route", body, proving(server, "PUT", "/route", body))
    assert registered.status == 200
    assert registered.headers[PROOF_HEADER] == answer_proof(SECRET, "mine", 200, registered.body.encode())
    assert ask(server, "GET", SYNC, headers=proving(server, "GET", SYNC)).status == 200
    assert ask(server, "GET", "/health").status == 200


def test_a_proof_is_good_for_its_request_alone(http: HttpThread) -> None:
    server = http.serve(rendezvous_app(SECRET), "127.0.0.1", 0)
    other = http.serve(rendezvous_app(SECRET), "127.0.0.1", 0)
    body = json.dumps(registration()).encode()
    right = proving(server, "PUT", "/route", body)
    for headers, where, path, sent in (
        ({}, server, "/route", body),
        ({"Authorization": "Bearer x"}, server, "/route", body),
        ({"Authorization": "Pdplane \u00e9 \u00e9"}, server, "/route", body),
        (right, server, "/route?x=1", body),
        (right, server, "/route", body + b" "),
        (right, other, "/route", body),
        (proving(server, "PUT", "/route", body, Secret(b"another secret, as long")), server, "/route", body),
    ):
        refused(ask(where, "PUT", path, sent, headers), 401)


def test_a_nonce_ages() -> None:
    nonces = Nonces()
    nonce = nonces.issue(100.0)
    assert [nonces.knows(nonce, now) for now in (98.0, 100.0, 159.0, 161.0)] == [False, True, True, False]
    assert not Nonces().knows(nonce, 100.0)
    assert not any(nonces.knows(text, 100.0) for text in ("", "zz", "00", nonce[:-2], nonce + "00"))


def test_reads_can_be_open_while_writes_are_not(http: HttpThread) -> None:
    server = http.serve(rendezvous_app(SECRET, open_reads=True), "127.0.0.1", 0)
    refused(ask(server, "PUT", "/route", registration()), 401)
    refused(ask(server, "GET", SYNC), 503)
