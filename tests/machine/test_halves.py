"""A half without a partner: who waits for what, until when, and who tells whom."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause, Why
from pdplane.ids import Generation, Room
from pdplane.machine import events
from pdplane.machine.actions import Offered, PrefillSettings, Send
from pdplane.messages import Cancel, Drain, Failed, Ping, UnknownSession, Window
from tests.machine.asked import registered_prefill, seen, told, windowed
from tests.machine.said import ROOM, connected, hello, offer, queued, registration, request
from tests.machine.witness import (
    DECODE_LIFE,
    GONE,
    LAYOUT,
    LEGACY,
    ME,
    OTHER,
    RAW,
    REGISTRATION,
    SESSION,
    PrefillWitness,
)


@pytest.fixture
def prefill() -> PrefillWitness:
    return registered_prefill()


PATIENCE = PrefillSettings(peer_timeout_s=10.0, bootstrap_timeout_s=120.0, waiting_timeout_s=300.0)
PAIRED = [hello(), registration(), connected()]
FAR_AWAY = [events.NoticeReceived(ME, Ping(DECODE_LIFE))]


@pytest.mark.parametrize(
    ("said", "until", "why"),
    [
        ([*PAIRED, request()], 10.0, "no decode rank offered blocks in 10 s"),
        ([*PAIRED, queued(), request()], 300.0, "decode had no blocks for it in 300 s"),
        ([*PAIRED, request(), queued()], 300.0, "decode had no blocks for it in 300 s"),
        ([registration(LEGACY), request()], 120.0, "no decode rank offered blocks in 120 s"),
        ([registration(RAW), request()], 120.0, "no decode rank offered blocks in 120 s"),
        ([*PAIRED, *offer(), events.NoticeReceived(ME, Cancel(ROOM, Generation(1), GONE)), request()], 2.0, "gone"),
        ([*PAIRED, request(), *offer()], 300.0, "not finished in 300 s"),
    ],
)
def test_how_long_a_request_waits(said: list[events.PrefillEvent], until: float, why: str) -> None:
    prefill = PrefillWitness(PATIENCE)
    prefill.handle(*said)
    while prefill.now < until:
        assert not prefill.ended, prefill.now
        assert prefill.wake is not None
        prefill.now = min(prefill.wake, until)
        prefill.handle(*FAR_AWAY) if prefill.now < until else None
    assert any(why in str(told) for told in seen(prefill.handle(events.Tick())))


@pytest.mark.parametrize("word", [offer(), [queued()]], ids=["offered", "in line"])
def test_a_decode_rank_whose_request_never_comes_is_told_after_the_peer_timeout(
    word: list[events.PrefillEvent],
) -> None:
    prefill = PrefillWitness(PATIENCE)
    prefill.handle(*PAIRED, *word)
    while prefill.now < 10.0:
        assert prefill.wake is not None
        prefill.now = prefill.wake
        found = prefill.handle(*FAR_AWAY)
    assert told(Cause.UNMATCHED, "no request came for this room in 10 s") in found


@pytest.mark.parametrize("first", [[queued(), request()], [request(), queued()]])
def test_a_rank_that_stood_in_line_offers(prefill: PrefillWitness, first: list[events.PrefillEvent]) -> None:
    prefill.handle(*first)
    assert prefill.handle(*offer()) == [windowed()]
    prefill.drain()


def test_a_rank_in_line_that_gives_up_ends_the_request(prefill: PrefillWitness) -> None:
    prefill.handle(request(), queued())
    word = events.NoticeReceived(ME, Cancel(ROOM, Generation(1), GONE))
    assert (1, "cancelled by decode: gone") in seen(prefill.handle(word))


def test_a_rank_in_line_is_told_that_its_request_ended(prefill: PrefillWitness) -> None:
    prefill.handle(request(), queued())
    assert told(Cause.CANCELLED, "gone") in prefill.handle(events.RoomCancelled(ROOM, 1, GONE))
    prefill.handle(request(2))
    assert told(Cause.REFUSED, "the prompt's tokens differ from decode's", 2) in prefill.handle(
        queued(2, prompt_hash="another")
    )


def test_a_word_from_a_session_that_was_lost_asks_for_a_registration(prefill: PrefillWitness) -> None:
    assert prefill.handle(queued(identity=OTHER)) == [Send(OTHER, UnknownSession(ROOM, SESSION))]


def test_a_decode_that_was_refused_may_say_what_it_does_not_fill() -> None:
    prefill = PrefillWitness()
    unlike = attrs.evolve(LAYOUT, prefix_granularity=8)
    prefill.handle(request(), hello(), events.RegistrationReceived(ME, REGISTRATION, unlike))
    words = [Window(ROOM, Generation(1), "hash"), Cancel(ROOM, Generation(1), Why(Cause.REFUSED, "it differs"))]
    found = prefill.handle(*(events.NoticeReceived(ME, word) for word in words))
    assert seen(found)[0] == (1, "cancelled by decode: it differs")


def test_draining_is_told_and_lets_go_on_what_was_begun(prefill: PrefillWitness) -> None:
    begun, early = Room(8), Room(9)
    prefill.handle(request(1, begun), *offer(1, room=early))
    why = Why(Cause.CLOSING, "it drains")
    assert prefill.handle(events.Draining("it drains")) == [
        Send(ME, Drain("it drains")),
        Send(ME, Failed(early, Generation(1), why)),
    ]
    assert prefill.handle(*offer(2)) == [told(why.cause, why.text, 2)]
    assert isinstance(prefill.handle(*offer(3, room=begun))[0], Offered)
