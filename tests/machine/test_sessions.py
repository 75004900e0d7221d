"""Who a prefill rank takes for a session's owner, and when it loses one."""

from __future__ import annotations

import pytest

from pdplane.errors import Cause
from pdplane.ids import Generation
from pdplane.machine import events
from pdplane.machine.actions import CancelPush, CloseData, OpenData, PrefillSettings, Release, Send
from pdplane.messages import Fingerprint, Hello, Ping, Refused, Registered, Window
from tests.machine.asked import registered_prefill, seen, told, windowed
from tests.machine.said import NEW_LIFE, ROOM, connected, hello, offer, push, registration, request
from tests.machine.witness import (
    DECODE_LIFE,
    ME,
    OTHER,
    PREFILL_LIFE,
    RAW,
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
