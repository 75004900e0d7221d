"""The prefill machine, case by case: what goes in, what comes out."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause, Why
from pdplane.ids import Generation, Life, Rank, Room, SessionId
from pdplane.machine import actions, events
from pdplane.machine.actions import CancelPush, Offered, OpenData, PrefillSettings, Release, Send, Succeed
from pdplane.messages import Cancel, Drain, Failed, Ping, Status, StatusCode, UnknownSession, Window
from tests.linked.memory import linked_layout
from tests.machine.asked import FAILED, SUCCESS, registered_prefill, seen, told, windowed
from tests.machine.said import NEW_LIFE, ROOM, finish, hello, offer, push, registration, request
from tests.machine.witness import (
    DECODE_LIFE,
    GONE,
    ME,
    OTHER,
    PREFILL_LIFE,
    RAW,
    REGISTRATION,
    SESSION,
    PrefillWitness,
    is_local,
    manifest,
    some_copies,
)


@pytest.fixture
def prefill() -> PrefillWitness:
    return registered_prefill()


def test_the_usual_life_of_a_room(prefill: PrefillWitness) -> None:
    assert prefill.handle(request()) == []
    (window,) = prefill.handle(*offer())
    assert window == windowed()
    assert isinstance(window, Offered)
    (destination,) = window.destinations
    assert (destination.session, destination.generation, destination.manifest) == (SESSION, 1, manifest())
    (pushed,) = prefill.handle(push())
    assert isinstance(pushed, actions.StartPush)
    assert (pushed.session, pushed.life, pushed.push.room, pushed.push.generation) == (SESSION, DECODE_LIFE, ROOM, 1)
    assert prefill.handle(finish()) == []  # not all of it is acknowledged
    assert prefill.end_push(None) == [
        Send(ME, Window(ROOM, Generation(1), "")),
        Send(ME, SUCCESS),
        Succeed(ROOM, 1),
        Release(ROOM, 1),
    ]
    prefill.drain()


def test_the_likeliest_first_tokens_go_before_the_status(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(), push())
    prefill.handle(attrs.evolve(finish(), top=((42, -0.5),)))
    first, *_ = prefill.end_push(None)
    assert first == Send(ME, Window(ROOM, Generation(1), "", ((42, -0.5),)))


def test_the_offer_may_come_before_the_request(prefill: PrefillWitness) -> None:
    assert prefill.handle(*offer()) == []
    assert prefill.handle(request()) == [windowed()]


def test_a_failed_push_fails_the_room_and_holds_the_blocks_until_the_others_end(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(), push(), push(), finish())
    cause = f"push to {SESSION} failed: reset"
    assert seen(prefill.end_push("reset")) == [
        told(Cause.TRANSFER, cause),
        CancelPush(SESSION, DECODE_LIFE, ROOM, Generation(1)),
        (1, cause),
    ]
    assert prefill.end_push(None) == [Release(ROOM, 1)]
    prefill.drain()


def test_the_number_of_a_failed_room_is_free_while_its_last_push_still_reads(prefill: PrefillWitness) -> None:
    prefill.handle(request(1), *offer(1), push(1), events.RoomCancelled(ROOM, 1, GONE))
    assert prefill.machine.counts().rooms == {"failing": 1}
    assert prefill.handle(request(2)) == []
    assert prefill.handle(*offer(2)) == [windowed(2, 2)]
    assert prefill.end_push("cancelled") == [Release(ROOM, 1)]
    assert prefill.handle(finish(2))[-2:] == [Succeed(ROOM, 2), Release(ROOM, 2)]


def test_a_live_room_is_refused_and_the_first_one_ends_well(prefill: PrefillWitness) -> None:
    prefill.handle(request(1), *offer())
    refused, release = prefill.handle(request(2))
    assert is_local(refused)
    assert release == Release(ROOM, 2)
    assert prefill.handle(finish(1))[-2:] == [Succeed(ROOM, 1), Release(ROOM, 1)]


@pytest.mark.parametrize("end", [finish(1), events.RoomCancelled(ROOM, 1, GONE)])
def test_an_ended_room_is_reusable_at_once_fifty_times(
    prefill: PrefillWitness, end: events.RoomFinished | events.RoomCancelled
) -> None:
    for use in range(50):
        prefill.handle(request(1 + use), *offer(1 + use))
        prefill.handle(attrs.evolve(end, ticket=1 + use))
        assert 1 + use in prefill.released
    assert prefill.machine.counts().tombstones == 1


def test_decode_cancels_its_own_use_and_no_other(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(5))
    for identity, generation in ((ME, 4), (OTHER, 5)):
        assert prefill.handle(events.NoticeReceived(identity, Cancel(ROOM, Generation(generation), GONE))) == []
    cause = "cancelled by decode: the client left"
    cancel = events.NoticeReceived(ME, Cancel(ROOM, Generation(5), Why(Cause.CANCELLED, "the client left")))
    assert seen(prefill.handle(cancel)) == [told(Cause.CANCELLED, cause, 5), (1, cause), Release(ROOM, 1)]


def test_callers_mistakes_fail_their_room(prefill: PrefillWitness) -> None:
    assert seen(prefill.handle(request(1), push(1)))[-2] == (1, "pushed while the room is opened")
    assert seen(prefill.handle(request(2), finish(2)))[-2] == (2, "finished while the room is opened")
    nobody = events.PushRequested(ROOM, 3, {SessionId("x:1"): some_copies()})
    assert seen(prefill.handle(request(3), *offer(1), nobody))[-2] == (
        3,
        "pushed to a session that the room does not have",
    )


# ---- offers that do not fit


def test_another_prompt_fails_the_room_while_it_waits_and_only_the_newcomer_later(prefill: PrefillWitness) -> None:
    cause = "prompt_len differs: ours 6, decode's 7"
    assert seen(prefill.handle(request(), *offer(1, prompt_len=7))) == [
        told(Cause.REFUSED, cause),
        (1, cause),
        Release(ROOM, 1),
    ]
    prefill.handle(hello(OTHER, NEW_LIFE))
    prefill.handle(request(2), *offer(2))
    assert prefill.handle(*offer(1, identity=OTHER)) == [Send(OTHER, UnknownSession(ROOM, SESSION))]
    assert prefill.machine.counts().rooms == {"offered": 1}


def test_the_hash_of_the_prompt_must_agree(prefill: PrefillWitness) -> None:
    prefill.handle(events.PrefillRequested(ROOM, 1, 6, "another hash"))
    cause = "the prompt's tokens differ from decode's"
    assert seen(prefill.handle(*offer())) == [told(Cause.REFUSED, cause), (1, cause), Release(ROOM, 1)]


def test_an_unusable_manifest_fails_the_room_at_once(prefill: PrefillWitness) -> None:
    prefill.handle(request())
    bad = events.PreallocationRejected(ME, ROOM, SESSION, "no JSON")
    assert seen(prefill.handle(events.NoticeReceived(ME, Window(ROOM, Generation(1), "")), bad)) == [
        told(Cause.REFUSED, "no JSON"),
        (1, "decode's offer is unusable: no JSON"),
        Release(ROOM, 1),
    ]


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [((1,), "has 1 blocks"), ((1, 1), "a block twice"), ((1, 99), "an id outside")],
)
def test_a_manifest_that_does_not_fit_decodes_own_layout_is_never_written_to(
    prefill: PrefillWitness, blocks: tuple[int, ...], reason: str
) -> None:
    good = manifest()
    bad = attrs.evolve(good, groups=(attrs.evolve(good.groups[0], block_ids=blocks), good.groups[1]))
    prefill.handle(request(), events.NoticeReceived(ME, Window(ROOM, Generation(1), "hash")))
    answer = seen(prefill.handle(events.PreallocationReceived(ME, ROOM, SESSION, bad)))
    assert isinstance(answer[0], Send)
    assert isinstance(answer[0].message, Failed)
    assert reason in answer[0].message.why.text
    assert answer[2:] == [Release(ROOM, 1)]


def test_a_stranger_cannot_harm_a_room(prefill: PrefillWitness) -> None:
    prefill.handle(request())
    assert prefill.handle(events.PreallocationRejected(RAW, ROOM, SESSION, "no JSON")) == [Send(RAW, FAILED)]
    assert prefill.handle(*offer(0, identity=RAW)) == [Send(RAW, FAILED)]
    assert prefill.machine.counts().rooms == {"opened": 1}


def test_a_native_offer_needs_its_window(prefill: PrefillWitness) -> None:
    prefill.handle(request())
    assert prefill.handle(*offer(0)) == [told(Cause.REFUSED, "no window notice came before the offer", 0)]
    assert prefill.machine.counts().rooms == {"opened": 1}


def test_a_newer_offer_of_the_same_decode_rank_ends_the_older_use(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(1))
    cause = "decode offered the room again"
    assert seen(prefill.handle(*offer(2))) == [told(Cause.CANCELLED, cause), (1, cause), Release(ROOM, 1)]
    assert prefill.handle(request(2)) == [windowed(2, 2)]
    assert prefill.handle(*offer(1)) == []  # late: it revives nothing
    assert prefill.machine.counts().rooms == {"offered": 1}


# ---- late and unknown


def test_an_offer_of_a_room_that_had_failed_is_told_so(prefill: PrefillWitness) -> None:
    prefill.handle(request(), events.RoomCancelled(ROOM, 1, GONE))
    assert prefill.handle(*offer(1)) == [told(Cause.CANCELLED, "gone")]
    assert prefill.handle(*offer(1)) == [told(Cause.CANCELLED, "gone")]
    assert prefill.handle(*offer(2)) == []  # the next use, waiting for its request
    assert prefill.machine.counts().rooms == {"early": 1}


def test_a_late_offer_of_a_room_that_succeeded_is_ignored(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer(), finish())
    assert prefill.handle(*offer()) == []
    counts = prefill.machine.counts()
    assert (counts.rooms, counts.rejected, counts.tombstones) == ({}, {"late": 1}, 1)


def test_an_unknown_session_is_told_by_notice_or_by_status() -> None:
    prefill = PrefillWitness()
    assert prefill.handle(*offer(1)) == [Send(ME, UnknownSession(ROOM, SESSION))]
    assert prefill.handle(*offer(0, identity=RAW)) == [Send(RAW, FAILED)]


def test_a_raw_peer_gets_statuses_only_and_waits_before_it_uses_a_room_again() -> None:
    prefill = PrefillWitness()
    assert prefill.handle(registration(RAW)) == []  # it says where we connect to: not before a room needs it
    assert prefill.handle(*offer(0, identity=RAW)) == []
    assert OpenData(SESSION, Life("")) in prefill.handle(request(1))
    assert prefill.handle(finish(1)) == [Send(RAW, SUCCESS), Succeed(ROOM, 1), Release(ROOM, 1)]
    assert prefill.handle(*offer(0, identity=RAW)) == [Send(RAW, FAILED)]
    assert is_local(prefill.handle(request(2))[0])
    prefill.now += PrefillSettings().tombstone_s
    prefill.handle(request(3))
    assert isinstance(prefill.handle(*offer(0, identity=RAW))[-1], Offered)


# ---- time and bounds


def test_an_orphan_offer_expires_and_decode_is_told(prefill: PrefillWitness) -> None:
    prefill.handle(*offer())
    ping = events.NoticeReceived(ME, Ping(DECODE_LIFE))
    found: list[actions.PrefillAction] = []
    while prefill.machine.counts().rooms:
        assert prefill.wake is not None
        prefill.now = prefill.wake
        found = prefill.handle(ping)
    assert prefill.now == 120.0
    assert found == [Send(ME, Ping(PREFILL_LIFE)), told(Cause.UNMATCHED, "no request came for this room in 120 s")]


@pytest.mark.parametrize(
    ("before", "cause", "after"),
    [
        ([], "no decode rank offered blocks in 120 s", 120.0),
        (offer(), "not finished in 300 s", 300.0),
        ([*offer(), push(), finish()], "not finished in 300 s", 300.0),
    ],
)
def test_deadlines_fire_by_wake_at(
    prefill: PrefillWitness, before: list[events.PrefillEvent], cause: str, after: float
) -> None:
    prefill.handle(request(), *before)
    while not prefill.ended:
        assert prefill.wake is not None
        prefill.now = prefill.wake
        found = prefill.handle(events.NoticeReceived(ME, Ping(DECODE_LIFE)))
    assert prefill.now == after
    assert (1, cause) in seen(found)


def test_a_request_gets_its_own_time_after_an_early_offer() -> None:
    prefill = PrefillWitness()
    two_ranks = attrs.evolve(REGISTRATION, tp_size=2)
    prefill.handle(events.RegistrationReceived(RAW, two_ranks, linked_layout(2)), *offer(0, identity=RAW))
    prefill.now = 119.0
    prefill.handle(request())
    assert prefill.machine.counts().rooms == {"opened": 1}  # the other decode rank has not offered yet
    assert prefill.wake == 239.0


def test_closing_ends_every_room_and_takes_no_new_one(prefill: PrefillWitness) -> None:
    prefill.handle(request(), *offer())
    assert seen(prefill.handle(events.Closing("bye"))) == [
        Send(ME, Drain("bye")),
        told(Cause.CLOSING, "bye"),
        (1, "bye"),
        Release(ROOM, 1),
    ]
    assert seen(prefill.handle(request(2))) == [(2, "bye"), Release(ROOM, 2)]
    assert prefill.handle(*offer(2)) == [told(Cause.CLOSING, "bye", 2)]


@pytest.mark.parametrize("offers", [10_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_orphan_offers_do_not_grow_the_tables(offers: int) -> None:
    prefill = PrefillWitness(PrefillSettings(max_rooms=100))
    prefill.handle(registration(RAW))
    for number in range(offers):
        sent = events.PreallocationReceived(RAW, Room(number), SESSION, manifest())
        prefill.machine.handle(sent, 0.0)
    counts = prefill.machine.counts()
    assert (counts.rooms, counts.tombstones) == ({"early": 100}, 0)
    assert prefill.handle(request(1, Room(offers - 1))) == [Send(RAW, Status(Room(0), StatusCode.FAILED, Rank(0)))]
    prefill.drain()


def test_malformed_offers_and_cancelled_rooms_leave_nothing(prefill: PrefillWitness) -> None:
    for number in range(5000):
        prefill.machine.handle(events.PreallocationRejected(RAW, Room(number), SESSION, "no JSON"), 0.0)
        prefill.handle(request(1 + number, Room(number)), events.RoomCancelled(Room(number), 1 + number, GONE))
    assert prefill.machine.counts().rooms == {}
    assert prefill.handle(request(9999, Room(3)), *offer(1, room=Room(3)))[-1] == attrs.evolve(
        windowed(9999), room=Room(3)
    )
    prefill.drain()
