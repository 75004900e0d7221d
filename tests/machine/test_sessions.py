"""Who a prefill rank takes for a session's owner, and when it loses one."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause
from pdplane.ids import Generation, SessionId
from pdplane.machine import events
from pdplane.machine.actions import CancelPush, CloseData, OpenData, PrefillSettings, Release, Send
from pdplane.machine.sessions import MAX_CHECKS
from pdplane.messages import Fingerprint, Hello, Ping, Refused, Registered, Window
from tests.machine.asked import registered_prefill, seen, told, windowed
from tests.machine.said import NEW_LIFE, ROOM, connected, hello, offer, push, registration, request
from tests.machine.witness import (
    DECODE_LIFE,
    LAYOUT,
    ME,
    OTHER,
    PREFILL_LIFE,
    RAW,
    REGISTRATION,
    SESSION,
    PrefillWitness,
)


@pytest.fixture
def prefill() -> PrefillWitness:
    return registered_prefill()


def test_a_session_is_bound_when_its_life_answers_at_its_address() -> None:
    prefill = PrefillWitness()
    assert prefill.handle(hello()) == []
    assert prefill.handle(registration()) == [OpenData(SESSION, DECODE_LIFE)]
    assert prefill.handle(registration()) == []  # that question is open already
    assert prefill.handle(connected()) == [Send(ME, Registered(SESSION, PREFILL_LIFE))]
    assert prefill.handle(registration()) == [Send(ME, Registered(SESSION, PREFILL_LIFE))]


def test_a_session_is_refused_when_another_life_or_nobody_answers() -> None:
    prefill = PrefillWitness()
    prefill.handle(hello(), registration())
    assert prefill.handle(events.DataConnected(SESSION, DECODE_LIFE, NEW_LIFE)) == [
        CloseData(SESSION, DECODE_LIFE),
        Send(ME, Refused(SESSION, "life", NEW_LIFE, DECODE_LIFE)),
    ]
    prefill.handle(registration())
    assert prefill.handle(events.DataLost(SESSION, DECODE_LIFE, "connection refused")) == [
        Send(ME, Refused(SESSION, "data address", "reachable", "connection refused", Cause.UNREACHABLE))
    ]


def test_a_fingerprint_that_must_agree_is_refused_by_its_name() -> None:
    prefill = PrefillWitness()
    prefill.handle(events.NoticeReceived(ME, Hello("0", DECODE_LIFE, Fingerprint((("dtype", "f16"),)))))
    assert prefill.handle(registration()) == [Send(ME, Refused(SESSION, "dtype", "absent", "f16"))]


def test_an_advisory_difference_is_refused_only_when_exact() -> None:
    greeting = events.NoticeReceived(ME, Hello("0", DECODE_LIFE, Fingerprint((), (("blas", "mkl"),))))
    for exact, answer in (
        (False, OpenData(SESSION, DECODE_LIFE)),
        (True, Send(ME, Refused(SESSION, "blas", "absent", "mkl"))),
    ):
        assert PrefillWitness(PrefillSettings(exact=exact)).handle(greeting, registration()) == [answer]


def test_a_restarted_decode_takes_its_address_over_and_its_rooms_fail(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(), push())
    prefill.handle(hello(OTHER, NEW_LIFE))
    assert prefill.handle(registration(OTHER)) == [OpenData(SESSION, NEW_LIFE)]
    cause = f"session {SESSION} lost: the decode rank restarted"
    assert seen(prefill.handle(connected(NEW_LIFE))) == [
        CloseData(SESSION, DECODE_LIFE),
        Send(OTHER, Registered(SESSION, PREFILL_LIFE)),
        told(Cause.PEER_LOST, cause),
        CancelPush(SESSION, DECODE_LIFE, ROOM, Generation(1)),
        (1, cause),
    ]
    assert prefill.end_push("cancelled") == [Release(ROOM, 1)]
    # its generations start from one again, and are not taken for those of the life before
    assert prefill.handle(request(2), *offer(1, identity=OTHER))[-1] == windowed(2)
    prefill.drain()


def test_nobody_takes_a_session_over_by_naming_the_life_of_its_owner(prefill: PrefillWitness) -> None:
    prefill.handle(hello(OTHER))
    assert prefill.handle(registration(OTHER)) == [Send(ME, Ping(PREFILL_LIFE))]  # is the owner still there?
    assert prefill.handle(events.NoticeReceived(ME, Ping(DECODE_LIFE))) == [
        Send(OTHER, Refused(SESSION, "session", "owned by another peer", SESSION)),
        Send(ME, Ping(PREFILL_LIFE)),
    ]
    assert prefill.handle(registration(RAW)) == []  # a raw peer reads no notices
    assert prefill.machine.counts().sessions == {"peers": 3, "sessions": 1, "checking": 0}


@pytest.mark.parametrize("gone", [events.Undeliverable(ME), events.Tick()])
def test_a_decode_that_connects_again_gets_its_session_when_the_old_connection_is_gone(
    prefill: PrefillWitness, gone: events.PrefillEvent
) -> None:
    prefill.handle(request(), *offer())
    prefill.now = 5.0
    prefill.handle(hello(OTHER), registration(OTHER))
    prefill.now = 6.0
    found = prefill.handle(gone)  # a word did not reach it, or it fell silent
    assert found[:2] == [CloseData(SESSION, DECODE_LIFE), OpenData(SESSION, DECODE_LIFE)]
    assert prefill.handle(connected()) == [Send(OTHER, Registered(SESSION, PREFILL_LIFE))]
    assert prefill.machine.counts().sessions == {"peers": 1, "sessions": 1, "checking": 0}
    assert prefill.ended == {1: "failed"}


def test_a_contender_that_leaves_is_forgotten(prefill: PrefillWitness) -> None:
    prefill.handle(hello(OTHER), registration(OTHER), events.Undeliverable(OTHER))
    assert prefill.machine.counts().sessions == {"peers": 1, "sessions": 1, "checking": 0}
    assert prefill.handle(events.Undeliverable(ME)) == [CloseData(SESSION, DECODE_LIFE)]


def test_a_push_that_finds_another_life_at_the_address_ends_the_session(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(), push())
    found = prefill.handle(events.DataConnected(SESSION, DECODE_LIFE, NEW_LIFE))
    assert found[0] == CloseData(SESSION, DECODE_LIFE)
    assert prefill.ended == {1: "failed"}


def test_a_ping_is_answered_for_a_session_and_not_for_a_lost_one(prefill: PrefillWitness) -> None:
    ping = events.NoticeReceived(ME, Ping(DECODE_LIFE))
    assert prefill.handle(ping) == [Send(ME, Ping(PREFILL_LIFE))]
    prefill.handle(events.Undeliverable(ME))
    assert prefill.handle(ping) == []


def test_a_silent_decode_is_lost_after_three_pings(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer())
    assert prefill.wake == 6.0
    prefill.now = 6.0
    cause = f"session {SESSION} lost: the decode rank fell silent"
    assert seen(prefill.handle(events.Tick())) == [CloseData(SESSION, DECODE_LIFE), (1, cause), Release(ROOM, 1)]


def test_strangers_are_forgotten_before_sessions(prefill: PrefillWitness) -> None:
    few = PrefillWitness(PrefillSettings(max_peers=3))
    few.handle(hello(), registration(), connected())
    for number in range(50):
        few.handle(events.NoticeReceived(b"%d" % number, Window(ROOM, Generation(1), "")))
    assert few.machine.counts().sessions == {"peers": 3, "sessions": 1, "checking": 0}


def of(identity: bytes, address: str) -> events.RegistrationReceived:
    """A registration of a session of its own."""
    mine = attrs.evolve(REGISTRATION, session=SessionId(f"{identity.decode()}:9"))
    return events.RegistrationReceived(identity, mine, LAYOUT, address)


def test_junk_of_one_address_keeps_no_other_out() -> None:
    few = PrefillWitness(PrefillSettings(max_peers=8))
    few.handle(of(b"good", "10.0.0.1"))
    for number in range(50):
        few.now += 0.1
        few.handle(of(b"junk%d" % number, "10.0.0.66"))
    few.handle(of(b"late", "10.0.0.2"))
    for number in range(50, 100):
        few.handle(of(b"junk%d" % number, "10.0.0.66"))
    for identity in (b"good", b"late"):
        assert few.machine.may_offer(identity, SessionId(f"{identity.decode()}:9"))
    assert few.machine.counts().sessions["peers"] == 8


def test_registrations_that_wait_for_an_answer_are_bounded() -> None:
    """Each has a thread and a connection to an address of its sender's choice."""
    prefill = PrefillWitness()
    asked: list[object] = []
    for number in range(MAX_CHECKS + 10):
        identity = b"peer%d" % number
        asked += prefill.handle(hello(identity), of(identity, "10.0.0.66"))
    assert prefill.machine.counts().sessions["checking"] == MAX_CHECKS
    assert sum(isinstance(action, CloseData) for action in asked) == 10
    refused = [action for action in asked if isinstance(action, Send) and isinstance(action.message, Refused)]
    assert [send.identity for send in refused] == [b"peer%d" % number for number in range(10)]
