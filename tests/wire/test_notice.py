"""Notices: every kind both ways, and what is refused."""

from __future__ import annotations

import json

import pytest

from pdplane import wire
from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import MAX_ROOM, Generation, Life, Room, SessionId
from pdplane.messages import (
    Cancel,
    Drain,
    Failed,
    Fingerprint,
    Hello,
    Notice,
    Ping,
    Refused,
    Registered,
    UnknownSession,
    Window,
)
from pdplane.wire.notice import MAX_CAUSE

LIFE = Life("0" * 32)
SESSION = SessionId("[fd00::2]:5000")
ALL: list[Notice] = [
    Hello("1", LIFE, Fingerprint((("config", "ab"), ("dtype", "float32")), (("blas", "OpenBLAS"),))),
    Hello("1", LIFE),
    Registered(SESSION, LIFE),
    Refused(SESSION, "dtype", "float32", "bfloat16"),
    Window(Room(MAX_ROOM), Generation(2**64 - 1), "ab" * 32),
    Window(Room(1), Generation(0), ""),
    UnknownSession(Room(0), SESSION),
    Failed(Room(1), Generation(1), "the engine ran out of memory: \u00e9"),
    Cancel(Room(1), Generation(0), ""),
    Ping(LIFE),
    Drain("SIGTERM"),
]


@pytest.mark.parametrize("notice", ALL, ids=repr)
def test_both_ways(notice: Notice) -> None:
    frames = wire.encode_notice(notice)
    assert frames[0] == b"pdplane/1"
    assert wire.is_notice(frames)
    assert not wire.is_registration(frames)
    assert wire.decode_notice(frames) == notice


def test_extra_keys_are_ignored() -> None:
    marker, kind, body = wire.encode_notice(Ping(LIFE))
    more = json.dumps({**json.loads(body), "later": 1}).encode()
    assert wire.decode_notice([marker, kind, more]) == Ping(LIFE)


def test_a_long_cause_is_cut_rather_than_lost() -> None:
    found = wire.decode_notice(wire.encode_notice(Drain("\ud800" + "x" * 100_000)))
    assert isinstance(found, Drain)
    assert found.cause == "?" + "x" * (MAX_CAUSE - 1)


@pytest.mark.parametrize(
    ("frames", "field"),
    [
        ([], "frame_count"),
        ([b"pdplane/1", b"ping"], "frame_count"),
        ([b"pdplane/2", b"ping", b"{}"], "frame_count"),
        ([b"pdplane/1", b"pong", b"{}"], "kind"),
        ([b"pdplane/1", b"\xff", b"{}"], "kind"),
        ([b"pdplane/1", b"ping", b"{}"], "ping.life"),
        ([b"pdplane/1", b"ping", b""], "ping"),
        ([b"pdplane/1", b"ping", b"[]"], "ping"),
        ([b"pdplane/1", b"ping", b'{"life":7}'], "ping.life"),
        ([b"pdplane/1", b"ping", b'{"life":"' + b"x" * 129 + b'"}'], "ping.life"),
        ([b"pdplane/1", b"ping", b" " * 70_000], "ping"),
        ([b"pdplane/1", b"cancel", b'{"room":true,"generation":0,"cause":""}'], "cancel.room"),
        ([b"pdplane/1", b"cancel", b'{"room":1,"generation":18446744073709551616,"cause":""}'], "cancel.generation"),
        ([b"pdplane/1", b"cancel", b'{"room":9223372036854775808,"generation":0,"cause":""}'], "cancel.room"),
        ([b"pdplane/1", b"hello", b'{"version":"1","life":"a","fingerprint":{"required":[["a"]],"advisory":[]}}'],
         "hello.fingerprint.required"),
    ],
)  # fmt: skip
def test_refused_with_the_field_named(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_notice(frames)
    assert caught.value.field == field


@pytest.mark.parametrize("notice", [Ping(Life("")), Window(Room(-1), Generation(0), "a"), "ping"], ids=repr)
def test_what_no_peer_could_read_is_not_written(notice: Notice) -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_notice(notice)
