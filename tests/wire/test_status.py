"""Statuses of both legacy generations: what their writers send, and what their readers take."""

from __future__ import annotations

import struct

import pytest

from pdplane import wire
from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Rank, Room
from pdplane.messages import Status, StatusCode
from tests.golden import Case, each, frames, refused

# Rows that the oldest reader accepts and docs/legacy_wire.md section 12 refuses, with the reason.
STRICTER = {
    "parse_lenient_space": "blanks are not part of the i64 grammar",
    "parse_lenient_underscore": "1_0 is a Python literal, not a decimal",
    "parse_negative_room": "no room is negative",
    "parse_status_unknown_9": "an unknown number would poison the room by its size",
    "parse_status_negative": "an unknown number",
    "parse_token_huge": "beyond i64",
    "parse_bad_cached_tokens_ignored": "the sixth frame has a meaning now, and text in it is an error",
}

_OLD_FIELDS = {
    "frame_count": {"frame_count"},
    "integer": {"room", "status", "prefill_rank", "bootstrap_token"},
    "candidates": {"candidates"},
}
_NEW_FIELDS = {
    "room": "room",
    "status": "status",
    "two": "frame_count",
    "spec": "candidates",
    "cached": "cached_tokens",
    "logprob": "logprob",
}


def _written(case: Case) -> bool:
    return "frames" in case["expected"]


def _parsed(case: Case) -> bool:
    return case["name"].startswith("parse_")


def _status(given: dict[str, object]) -> Status:
    names = {"token": "bootstrap_token", "rank": "prefill_rank", "spec": "spec_candidate_ids"}
    given = {names.get(key, key): value for key, value in given.items()}
    ids, logprob = given.get("spec_candidate_ids"), given.get("logprob")
    return Status(
        Room(int(str(given["room_s"]))),
        StatusCode(given["status"]),
        Rank(int(str(given["prefill_rank"]))),
        int(str(given.get("bootstrap_token", -1))),
        tuple(ids) if isinstance(ids, list) else None,
        int(str(given.get("cached", 0))),
        None if logprob is None else struct.pack("<d", logprob),
    )


@each("legacy/status_messages", _written)
def test_the_first_five_frames_are_the_oldest_writer_s(case: Case) -> None:
    assert wire.encode_status(_status(case["input"]))[:5] == frames(case["expected"]["frames"])


@each("legacy/status_newer_wire", _written)
def test_all_seven_frames_are_the_newer_writer_s(case: Case) -> None:
    assert wire.encode_status(_status(case["input"])) == frames(case["expected"]["frames"])


@each("legacy/status_newer_wire", _written)
def test_what_the_oldest_reader_takes_from_seven_frames(case: Case) -> None:
    room, status, rank, token, ids = case["expected"]["legacy_python_parse"]
    found = wire.decode_status(wire.encode_status(_status(case["input"])))
    assert [str(found.room), found.code.value, found.prefill_rank, found.first_token] == [room, status, rank, token]
    assert found.candidates == (tuple(ids) if ids else None)


@each("legacy/status_messages", lambda case: case["name"].startswith("emit_endpoint_"))
def test_the_oldest_writer_cuts_a_host_at_its_colon(case: Case) -> None:
    """Why IPv6 is for new nodes only: this is where their statuses go, so such a host never works for them."""
    host = case["input"]["endpoint"]
    assert case["expected"]["endpoint"] == f"tcp://{host.partition(':')[0]}:{case['input']['port']}"


@each("legacy/status_messages", lambda case: _parsed(case) and case["name"] not in STRICTER)
def test_parsed_as_the_oldest_reader(case: Case) -> None:
    found, expected = wire.decode_status(frames(case["input"]["frames"])), case["expected"]
    assert (found.room, found.code.value) == (int(expected["room_s"]), expected["status"])
    assert (found.prefill_rank, found.first_token) == (expected["prefill_rank"], int(expected["bootstrap_token_s"]))
    ids = expected["spec_candidate_ids"]
    assert found.candidates == (None if ids is None else tuple(ids))


@each("legacy/status_newer_wire", _parsed)
def test_parsed_as_the_newer_reader(case: Case) -> None:
    found, expected = wire.decode_status(frames(case["input"]["frames"])), case["expected"]
    assert (found.room, found.code.value) == (int(expected["room_s"]), expected["status"])
    assert (found.prefill_rank, found.first_token) == (expected["prefill_rank"], expected["bootstrap_token"])
    assert (found.candidates, found.cached_tokens) == (expected["spec_candidate_ids"], expected["cached_tokens"])
    logprob = expected["bootstrap_logprob"]
    assert found.logprob == (None if logprob is None else struct.pack("<d", logprob))


@each("legacy/status_messages", lambda case: case["name"] in STRICTER)
def test_each_reason_is_needed(case: Case) -> None:
    assert not refused(case)
    with pytest.raises(WireError):
        wire.decode_status(frames(case["input"]["frames"]))


@each("legacy/status_messages", refused)
def test_refused_as_the_oldest_reader(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_status(frames(case["input"]["frames"]))
    assert caught.value.field in _OLD_FIELDS[case["expected"]["error"]["category"]]


@each("legacy/status_newer_wire", refused)
def test_refused_as_the_newer_reader(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_status(frames(case["input"]["frames"]))
    assert caught.value.field == _NEW_FIELDS[case["expected"]["error"]["category"]]


def test_a_logprob_of_another_length_is_not_written() -> None:
    with pytest.raises(LocalProtocolError, match="8 bytes"):
        wire.encode_status(Status(Room(1), StatusCode.SUCCESS, Rank(0), logprob=b"1234"))


@pytest.mark.parametrize("digits", [b"0" * 100_000 + b"7", b"+" + b"0" * 100_000 + b"7"])
def test_leading_zeros_of_any_number(digits: bytes) -> None:
    assert wire.decode_status([digits, b"5", b"0"]).room == 7


@pytest.mark.parametrize(
    "digits", [b"9" * 100_000, b"0" * 100_000 + b"x", b"7\n", b"1_0", "\u0667".encode(), b"", b"+"]
)
def test_what_python_s_int_accepts_or_chokes_on(digits: bytes) -> None:
    with pytest.raises(WireError, match="room is not an integer"):
        wire.decode_status([digits, b"5", b"0"])
