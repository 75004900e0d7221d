"""The 841 cases of the three legacy messages, both directions, with the exact error texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdplane import wire
from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Rank, Room, SessionId
from pdplane.messages import Preallocation, Registration, Status, StatusCode
from tests.golden import Case, cases, each, frames

_CODES = {code.value: code for code in StatusCode}

Input = dict[str, Any]


def _registration_frames(given: Input) -> list[str]:
    registration = Registration(
        given["host"],
        given["port"],
        SessionId(given["session_id"]),
        given["arena_base"],
        bytes.fromhex(given["layout"]),
        given["tp_size"],
        given["tp_rank"],
    )
    return _hexes(wire.encode_registration(registration))


def _registration_route(given: Input) -> list[object]:
    route = wire.decode_route(frames(given["frames"]))
    return [route.host, route.port, route.session]


def _preallocation_frames(given: Input) -> list[str]:
    manifest = bytes.fromhex(given["manifest"] or "")
    return _hexes(
        wire.encode_preallocation(Preallocation(Room(given["room"]), SessionId(given["session_id"]), manifest))
    )


def _status(given: Input) -> Status:
    ids, logprob = given.get("spec_candidate_ids"), given.get("bootstrap_logprob")
    return Status(
        Room(given["room"]),
        _CODES.get(given["status"], given["status"]),
        Rank(given["prefill_rank"]),
        given.get("bootstrap_token", -1),
        None if ids is None else tuple(ids),
        given.get("cached_tokens", 0),
        None if logprob is None else bytes.fromhex(logprob),
    )


def _facts(status: Status) -> Input:
    return {
        "room": status.room,
        "status": status.code.value,
        "prefill_rank": status.prefill_rank,
        "bootstrap_token": status.first_token,
        "spec_candidate_ids": None if status.candidates is None else list(status.candidates),
        "cached_tokens": status.cached_tokens,
        "bootstrap_logprob": None if status.logprob is None else status.logprob.hex(),
    }


def _status_bare(given: Input) -> Input:
    """A status with nothing but room, code and rank: its defaults are what the wire's reader fills in."""
    status = _status(given)
    wire.encode_status(status)
    return _facts(status)


def _status_from_frames(given: Input) -> Input:
    status = wire.decode_status(frames(given["frames"]))
    assert wire.decode_status(wire.encode_status(status)) == status
    return _facts(status)


def _hexes(found: list[bytes]) -> list[str]:
    return [frame.hex() for frame in found]


RUN: dict[str, Callable[[Input], object]] = {
    "registration_frames": _registration_frames,
    "is_registration": lambda given: wire.is_registration(frames(given["frames"])),
    "registration_route": _registration_route,
    "preallocation_frames": _preallocation_frames,
    "preallocation_route": lambda given: list(wire.preallocation_route(frames(given["frames"]))),
    "status_to_frames": lambda given: _hexes(wire.encode_status(_status(given))),
    "status_bare": _status_bare,
    "status_from_frames": _status_from_frames,
}


def test_every_case_is_here() -> None:
    assert len(cases("wire")) == 787
    assert {case["op"] for case in cases("wire")} == set(RUN)


@each("wire", lambda case: "ok" in case["expected"] and "ambiguous" not in case)
def test_accepted(case: Case) -> None:
    assert RUN[case["op"]](case["input"]) == case["expected"]["ok"]


@each("wire", lambda case: case["expected"].get("kind") == "wire")
def test_refused_with_the_exact_text(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        RUN[case["op"]](case["input"])
    assert str(caught.value) == case["expected"]["error"]


@each("wire", lambda case: case["expected"].get("kind") == "type")
def test_values_that_no_frame_can_carry_are_not_written(case: Case) -> None:
    with pytest.raises(LocalProtocolError):
        RUN[case["op"]](case["input"])


@each("wire", lambda case: "ambiguous" in case)
def test_text_beyond_ascii_is_not_written(case: Case) -> None:
    """Such a case shows a stand-in's UTF-8; the Python peers raise, and so do we."""
    with pytest.raises(LocalProtocolError, match="must be ASCII"):
        RUN[case["op"]](case["input"])
