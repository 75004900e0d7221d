"""Notices: every kind both ways, and what is refused."""

from __future__ import annotations

import json

import pytest

from pdplane import wire
from pdplane.errors import Cause, LocalProtocolError, Why, WireError
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
from pdplane.wire.notice import MAX_REASON

LIFE = Life("0" * 32)
LONG = Hello(
    "1", LIFE, Fingerprint(tuple((str(number), "x" * 512) for number in range(64)), (("y", "\u00e9" * 512),) * 16)
)
SESSION = SessionId("[fd00::2]:5000")
ALL: list[Notice] = [
    Hello("1", LIFE, Fingerprint((("config", "ab"), ("dtype", "float32")), (("blas", "OpenBLAS"),))),
    Hello("1", LIFE),
    Registered(SESSION, LIFE),
    Refused(SESSION, "dtype", "float32", "bfloat16"),
    Refused(SESSION, "session", "owned by another peer", SESSION, Cause.LIVE),
    Window(Room(MAX_ROOM), Generation(2**64 - 1), "ab" * 32),
    Window(Room(1), Generation(0), ""),
    Window(Room(1), Generation(0), "", ((7, -0.5), (0, -1e-300), (2**63 - 1, -3.0e38))),
    Window(Room(1), Generation(0), "", ((7, -0.5),) * 20),
    UnknownSession(Room(0), SESSION),
    Failed(Room(1), Generation(1), Why(Cause.INTERNAL, "the engine ran out of memory: \u00e9")),
    Cancel(Room(1), Generation(0), Why(Cause.CANCELLED, "")),
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


ENDED = {"room": 1, "generation": 2, "cause": "did not finish within 3 s"}
REFUSED = {"session": "h:1", "field": "a", "ours": "b", "theirs": "c"}


@pytest.mark.parametrize(
    ("more", "cause"),
    [({"what": cause.value}, cause) for cause in Cause]
    + [({}, None), *(({"what": word}, None) for word in (None, "", "FULL", "of tomorrow", 200, True, [], {"a": 1}))],
)
def test_a_cause_is_one_of_ours_or_the_kinds_own(more: dict[str, object], cause: Cause | None) -> None:
    """Peers of other versions name none or others; whatever they send, a status can come of our enum only."""
    for kind in (b"failed", b"cancel"):
        notice = wire.decode_notice([b"pdplane/1", kind, json.dumps(ENDED | more).encode()])
        assert isinstance(notice, Failed | Cancel)
        assert notice.why == Why(cause or Cause.PEER_FAILED, "did not finish within 3 s")
    refused = wire.decode_notice([b"pdplane/1", b"refused", json.dumps(REFUSED | more).encode()])
    assert refused == Refused(SessionId("h:1"), "a", "b", "c", cause or Cause.REFUSED)


def test_a_long_text_is_cut_rather_than_lost() -> None:
    found = wire.decode_notice(wire.encode_notice(Drain("\ud800" + "x" * 100_000)))
    assert isinstance(found, Drain)
    assert found.text == "?" + "x" * (MAX_REASON - 1)


def _window(top: str) -> list[bytes]:
    return [b"pdplane/1", b"window", f'{{"room":1,"generation":0,"prompt_hash":"","top":{top}}}'.encode()]


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
        *((_window(top), f"window.top{place}") for top, place in [
            ("7", ""), ("{}", ""), ("[7]", "[0]"), ("[[7]]", ""), ("[[7,-1,2]]", ""), (f"[{'[7,-1],' * 20}[7,-1]]", ""),
            ("[[-1,-1]]", "[0][0]"), ("[[true,-1]]", "[0][0]"), ("[[7,true]]", "[0][1]"), ('[[7,"-1"]]', "[0][1]"),
            (f"[[7,1{'0' * 400}]]", "[0][1]"),
        ]),
    ],
)  # fmt: skip
def test_refused_with_the_field_named(frames: list[bytes], field: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.decode_notice(frames)
    assert caught.value.field == field


@pytest.mark.parametrize("notice", [Ping(Life("")), Window(Room(-1), Generation(0), "a"), "ping", LONG], ids=repr)
def test_what_no_peer_could_read_is_not_written(notice: Notice) -> None:
    with pytest.raises(LocalProtocolError):
        wire.encode_notice(notice)
