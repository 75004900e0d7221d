"""Decode gives a use up before its request reaches prefill: the request hears of it, and a new use is not harmed."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause, Why
from pdplane.ids import Generation, Life, Room, SessionId
from pdplane.machine import actions, events
from pdplane.machine.actions import Offered, PrefillSettings, Release, Succeed
from pdplane.messages import Cancel, Window
from tests.machine.asked import registered_prefill, seen, told, windowed
from tests.machine.said import NEW_LIFE, ROOM, connected, finish, hello, offer, registration, request
from tests.machine.witness import (
    DECODE_LIFE,
    GONE,
    LAYOUT,
    LEGACY,
    ME,
    OTHER,
    REGISTRATION,
    PrefillWitness,
    is_local,
)

CAUSE = "cancelled by decode: the client left"
GRACE_S = PrefillSettings().reoffer_s


@pytest.fixture
def prefill() -> PrefillWitness:
    return registered_prefill()


def cancel(generation: int = 1, identity: bytes = ME) -> events.NoticeReceived:
    return events.NoticeReceived(
        identity, Cancel(ROOM, Generation(generation), Why(Cause.CANCELLED, "the client left"))
    )


def stranger(life: Life = NEW_LIFE) -> list[events.PrefillEvent]:
    """Says hello and registers; nobody has answered for it at the session's address."""
    return [hello(OTHER, life), registration(OTHER)]


def announced(generation: int = 1, prompt_hash: str = "hash", identity: bytes = ME) -> list[events.PrefillEvent]:
    """A use that was never offered: its window notice names the prompt, then it is cancelled."""
    notice = Window(ROOM, Generation(generation), prompt_hash)
    return [events.NoticeReceived(identity, notice), cancel(generation, identity)]


def after_the_grace(prefill: PrefillWitness) -> list[object]:
    prefill.now += GRACE_S
    return seen(prefill.handle(events.Tick()))


@pytest.mark.parametrize(
    "gone",
    [
        [*offer(), cancel()],
        announced(),
        [*offer(prompt_len=60)],
        [*offer(), hello(OTHER, life=connected().life), registration(OTHER), events.Undeliverable(ME)],
    ],
    ids=["offered and cancelled", "never offered", "an unusable offer", "its connection was lost"],
)
def test_the_request_that_comes_after_it_ends_after_a_short_grace(
    prefill: PrefillWitness, gone: list[events.PrefillEvent]
) -> None:
    prefill.handle(*gone)
    assert prefill.handle(request()) == []
    (failed, release) = after_the_grace(prefill)
    assert isinstance(failed, tuple)
    assert failed[0] == 1
    assert "decode" in str(failed[1])
    assert release == Release(ROOM, 1)
    prefill.drain()


def test_a_request_that_waits_already_ends_at_once(prefill: PrefillWitness) -> None:
    prefill.handle(request())
    assert seen(prefill.handle(*announced())) == [(1, CAUSE), Release(ROOM, 1)]
    prefill.drain()


def test_a_new_use_offered_within_the_grace_goes_on(prefill: PrefillWitness) -> None:
    prefill.handle(*offer(1), cancel(1), request())
    assert prefill.handle(*offer(2)) == [windowed(1, 2)]
    prefill.now += GRACE_S
    assert prefill.handle(events.Tick()) == []
    prefill.drain()


def test_once_a_rank_offers_the_new_use_it_has_the_usual_time() -> None:
    prefill = registered_prefill(tp_size=2)
    prefill.handle(*offer(1), cancel(1), request(), *offer(2))
    prefill.now += GRACE_S
    assert prefill.handle(events.Tick()) == []
    assert prefill.machine.counts().rooms == {"opened": 1}  # the other decode rank is still waited for


@pytest.mark.parametrize("gone", [[*offer(), cancel()], announced()])
def test_another_prompt_is_another_use(prefill: PrefillWitness, gone: list[events.PrefillEvent]) -> None:
    prefill.handle(*gone)
    prefill.handle(attrs.evolve(request(), prompt_hash="another"))
    assert after_the_grace(prefill) == []
    assert prefill.machine.counts().rooms == {"opened": 1}


@pytest.mark.parametrize(
    "word",
    [
        [cancel(1)],  # of a use that was not announced
        announced(prompt_hash="another"),
        announced(prompt_hash=""),
        announced(identity=OTHER),  # a stranger's
        [*stranger(), *announced(identity=OTHER)],
        [*stranger(), connected(NEW_LIFE), *announced()],  # from the connection that lost the session
        [events.NoticeReceived(ME, Window(ROOM, Generation(2), "hash")), cancel(1)],
        [events.NoticeReceived(ME, Window(Room(8), Generation(1), "hash")), cancel(1)],
    ],
)
def test_a_cancel_that_proves_no_part_harms_nobody(prefill: PrefillWitness, word: list[events.PrefillEvent]) -> None:
    prefill.handle(request())
    prefill.handle(*word)
    assert prefill.machine.counts().rooms == {"opened": 1}
    prefill.handle(*word[-2:])
    prefill.handle(events.RoomCancelled(ROOM, 1, GONE), request(2))
    assert after_the_grace(prefill) == []  # nor is there a tombstone of it


@pytest.mark.parametrize(
    "over",
    [
        [request(1), *announced(1)],
        [request(1), *offer(1, prompt_len=60)],
        [*announced(1), request(1)],
        [*offer(1), cancel(1), request(1)],
    ],
    ids=["declined", "an unusable offer", "declined before", "taken back"],
)
def test_the_next_use_of_the_number_is_another_one(prefill: PrefillWitness, over: list[events.PrefillEvent]) -> None:
    prefill.handle(*over)
    after_the_grace(prefill)
    assert prefill.ended
    assert prefill.handle(*offer(2)) == []
    assert prefill.handle(request(2)) == [windowed(2, 2)]


def test_the_next_use_may_be_declined_as_well(prefill: PrefillWitness) -> None:
    prefill.handle(request(1), *announced(1), *announced(2))
    prefill.handle(request(2))
    assert after_the_grace(prefill) == [(2, CAUSE), Release(ROOM, 2)]


def test_what_is_remembered_of_a_legacy_room_stays() -> None:
    """Its late words look like those of a new use: no native decode rank opens the number to them."""
    prefill = PrefillWitness()
    native = attrs.evolve(REGISTRATION, session=SessionId("native:1"), host="native")
    prefill.handle(
        registration(LEGACY),
        hello(),
        events.RegistrationReceived(ME, native, LAYOUT),
        events.DataConnected(native.session, DECODE_LIFE, DECODE_LIFE),
        request(1),
        *offer(0, identity=LEGACY),
    )
    assert prefill.handle(finish(1))[-2:] == [Succeed(ROOM, 1), Release(ROOM, 1)]
    prefill.handle(*announced())
    refused, _ = prefill.handle(request(2))
    assert is_local(refused)


def test_a_cancel_takes_no_other_rooms_notice(prefill: PrefillWitness) -> None:
    prefill.handle(request())
    notice, sent = offer(3)
    other = events.NoticeReceived(ME, Cancel(Room(8), Generation(2), GONE))
    assert isinstance(prefill.handle(notice, other, sent)[0], Offered)


def test_a_use_that_failed_here_first_is_not_mistaken_for_a_new_one(prefill: PrefillWitness) -> None:
    """Prefill cancels, decode has not offered yet and cancels too: the number's next request has its usual time."""
    prefill.handle(request(1), events.RoomCancelled(ROOM, 1, GONE), *announced())
    prefill.handle(request(2))
    assert after_the_grace(prefill) == []
    assert prefill.handle(*offer(2)) == [windowed(2, 2)]


def test_the_late_offer_of_a_use_that_ended_in_the_grace_is_told(prefill: PrefillWitness) -> None:
    prefill.handle(*offer(1), cancel(1), request())
    after_the_grace(prefill)
    assert prefill.handle(*offer(1)) == [told(Cause.CANCELLED, CAUSE, 1)]


def test_a_short_bootstrap_timeout_bounds_the_grace() -> None:
    prefill = PrefillWitness(PrefillSettings(peer_timeout_s=1.0))
    prefill.handle(hello(), registration(), connected(), *offer(), cancel(), request())
    assert prefill.wake == 1.0


def test_withdrawn_uses_do_not_grow_the_tables(prefill: PrefillWitness) -> None:
    for number in range(70_000):
        notice = Window(Room(number), Generation(1 + number), "hash")
        prefill.machine.handle(events.NoticeReceived(ME, notice), 0.0)
        word = Cancel(Room(number), Generation(1 + number), GONE)
        prefill.machine.handle(events.NoticeReceived(ME, word), 0.0)
    counts = prefill.machine.counts()
    assert (counts.rooms, counts.tombstones) == ({}, 65536)
    found: list[actions.PrefillAction] = prefill.handle(request())
    assert found == []
