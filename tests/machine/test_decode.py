"""The decode machine, case by case: what goes in, what comes out."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause, RoomFailed, Why
from pdplane.ids import Endpoint, Generation, Rank, Room
from pdplane.machine import actions, events
from pdplane.machine.actions import (
    CloseFence,
    Connect,
    DecodeSettings,
    Deliver,
    Delivered,
    Disconnect,
    Fail,
    LookUp,
    Offer,
    Tell,
)
from pdplane.messages import Cancel, Drain, Failed, Ping, Queued, Refused, Status, StatusCode, UnknownSession, Window
from tests.machine.said import (
    NEW_LIFE,
    ROOM,
    failed,
    found_life,
    given,
    landed,
    registered,
    stand,
    status,
    success,
    want,
)
from tests.machine.witness import (
    BOOTSTRAP,
    CHANNEL,
    FOUND,
    GONE,
    HELLO,
    LAYOUT,
    PREFILL_LIFE,
    REGISTRATION,
    SESSION,
    DecodeWitness,
    is_local,
    manifest,
    whole,
)

ENDPOINT = Endpoint("prefill", 4001)
INTRODUCED = [Tell(CHANNEL, attrs.evolve(HELLO, version="")), Tell(CHANNEL, REGISTRATION)]
BYTES = whole(manifest())
DELIVERED = Delivered(42, None, None, 0, nbytes=BYTES)


def opened(generation: int = 1, room: Room = ROOM) -> list[actions.DecodeAction]:
    return [
        actions.OpenFence(room, Generation(generation), manifest(), ((Rank(0), PREFILL_LIFE),)),
        Tell(CHANNEL, Window(room, Generation(generation), "hash")),
        Offer(CHANNEL, room, manifest()),
    ]


def broken(cause: Cause, text: str, generation: int = 1) -> list[object]:
    return [
        CloseFence(ROOM, Generation(generation)),
        Tell(CHANNEL, Cancel(ROOM, Generation(generation), Why(cause, text))),
        (generation, text),
    ]


def seen(found: list[actions.DecodeAction]) -> list[object]:
    """Actions with errors as (ticket, text), since errors do not compare."""
    return [
        (a.ticket, a.error.text if isinstance(a.error, RoomFailed) else str(a.error)) if isinstance(a, Fail) else a
        for a in found
    ]


@pytest.fixture
def decode() -> DecodeWitness:
    """One room waits: its window is open, its blocks are offered."""
    witness = DecodeWitness()
    witness.handle(want(), FOUND, registered())
    return witness


# ---- one room


def test_the_usual_life_of_a_room() -> None:
    decode = DecodeWitness()
    assert decode.handle(want()) == [LookUp(BOOTSTRAP, ROOM)]
    assert decode.handle(FOUND) == [Connect(CHANNEL, ENDPOINT), *INTRODUCED]
    assert decode.handle(registered()) == opened()
    assert decode.handle(landed(8)) == []
    assert decode.handle(landed()) == []
    assert decode.handle(*success()) == [CloseFence(ROOM, Generation(1)), Deliver(ROOM, 1, DELIVERED)]
    assert decode.handle(want(2)) == opened(2)  # the peer is known: no look-up
    decode.drain()


def test_success_and_bytes_may_come_in_either_order(decode: DecodeWitness) -> None:
    assert decode.handle(*success()) == []
    assert decode.wake == 2.0  # a ping
    assert decode.handle(landed()) == [CloseFence(ROOM, Generation(1)), Deliver(ROOM, 1, DELIVERED)]


def test_success_without_every_byte_fails_soon_and_repeats_do_not_prolong_it(decode: DecodeWitness) -> None:
    decode.handle(*success(), landed(8))
    while not decode.ended:
        assert decode.wake is not None
        decode.now = decode.wake
        decode.handle(events.NoticeFromPrefill(CHANNEL, Ping(PREFILL_LIFE)), *success())
    assert decode.now == DecodeSettings().late_bytes_s
    assert decode.ended == {1: "failed"}


@pytest.mark.parametrize("nbytes", [0, 8, whole(manifest()) - 1])
def test_too_few_bytes_are_never_delivered(decode: DecodeWitness, nbytes: int) -> None:
    assert decode.handle(landed(nbytes), *success()) == []


def test_too_many_bytes_fail_the_room(decode: DecodeWitness) -> None:
    text = "prefill rank 0 sent more bytes than the manifest holds"
    assert seen(decode.handle(landed(whole(manifest()) + 1))) == broken(Cause.PEER_FAILED, text)


@pytest.mark.parametrize(
    ("ending", "cause", "text"),
    [
        (failed(), Cause.PEER_FAILED, "prefill: engine"),
        (status(StatusCode.FAILED), Cause.PEER_FAILED, "prefill rank 0 failed it"),
        (events.RoomCancelled(ROOM, 1, GONE), Cause.CANCELLED, "gone"),
        (events.Closing("bye"), Cause.CLOSING, "bye"),
    ],
)
def test_what_breaks_a_room_closes_its_window_first(
    decode: DecodeWitness, ending: events.DecodeEvent, cause: Cause, text: str
) -> None:
    assert seen(decode.handle(ending)) == broken(cause, text)
    assert decode.handle(landed(), *success()) == []  # it revives nothing
    decode.drain()


def test_failed_is_final_before_ready_and_nothing_after_it(decode: DecodeWitness) -> None:
    decode.handle(failed(), landed(), *success())
    assert decode.ended == {1: "failed"}
    decode.handle(want(2), landed(generation=2), *success(2))
    assert decode.handle(failed(2), status(StatusCode.FAILED)) == []
    assert decode.ended == {1: "failed", 2: "delivered"}


def test_a_success_without_token_delivers_none(decode: DecodeWitness) -> None:
    delivered = Deliver(ROOM, 1, Delivered(None, None, None, 0, nbytes=BYTES))
    assert decode.handle(landed(), *success(token=-1))[-1] == delivered


def test_the_likeliest_first_tokens_come_with_the_notice_before_the_status(decode: DecodeWitness) -> None:
    notice, sent = success()
    assert isinstance(notice, events.NoticeFromPrefill)
    told = attrs.evolve(notice, notice=Window(ROOM, Generation(1), "", ((42, -0.5), (7, -2.0))))
    (*_, delivered) = decode.handle(landed(), told, sent)
    assert delivered == Deliver(ROOM, 1, Delivered(42, None, None, 0, ((42, -0.5), (7, -2.0)), BYTES))


def test_a_live_room_is_refused_and_the_first_one_ends_well(decode: DecodeWitness) -> None:
    (refused,) = decode.handle(want(2))
    assert is_local(refused)
    assert decode.handle(landed(), *success())[-1] == Deliver(ROOM, 1, DELIVERED)


# ---- stale and foreign


def test_a_stale_status_never_completes_the_next_use(decode: DecodeWitness) -> None:
    decode.handle(failed(), want(2), landed(generation=2))
    assert decode.handle(*success(1, token=13)) == []
    assert decode.handle(*success(0, token=13)) == []
    assert decode.handle(*success(2)) == [CloseFence(ROOM, Generation(2)), Deliver(ROOM, 2, DELIVERED)]


def test_a_window_notice_names_the_next_status_and_no_other(decode: DecodeWitness) -> None:
    decode.handle(landed())
    assert decode.handle(*success(1, rank=3)) == []
    assert decode.handle(*success(0)) == []
    assert decode.machine.counts().rejected == {"foreign_rank": 1, "late": 1}


def test_late_and_unknown_are_told_apart(decode: DecodeWitness) -> None:
    decode.handle(failed(), failed(), landed(), events.Landed(Room(99), Generation(1), Rank(0), 4))
    assert decode.machine.counts().rejected == {"late": 2, "unknown_room": 1}
    decode.now = DecodeSettings().tombstone_s
    decode.handle(failed())
    assert decode.machine.counts().rejected == {"late": 2, "unknown_room": 2}


def test_a_prefill_cannot_fail_the_room_of_another(decode: DecodeWitness) -> None:
    elsewhere = Endpoint("elsewhere", 8998)
    channel = events.Channel(elsewhere, Rank(0), NEW_LIFE)
    other = attrs.evolve(
        FOUND, room=Room(8), bootstrap=elsewhere, ranks=(events.PeerRank(Rank(0), ENDPOINT, NEW_LIFE),)
    )
    decode.handle(events.DecodeRequested(Room(8), 2, elsewhere, manifest(), "hash"), other)
    said = [
        events.NoticeFromPrefill(channel, Failed(ROOM, Generation(1), Why(Cause.PEER_FAILED, "x"))),
        events.StatusFromPrefill(channel, Status(ROOM, StatusCode.FAILED, Rank(0))),
    ]
    assert decode.handle(*said) == []
    assert decode.machine.counts().rejected == {"foreign_peer": 2}


def test_an_answer_about_another_rendezvous_changes_nothing() -> None:
    decode = DecodeWitness()
    decode.handle(want())
    assert decode.handle(events.PeerMissing(ROOM, Endpoint("elsewhere", 8998), Why(Cause.UNREACHABLE, "nobody"))) == []
    assert seen(decode.handle(events.PeerMissing(ROOM, BOOTSTRAP, Why(Cause.UNREACHABLE, "nobody")))) == [(1, "nobody")]


# ---- peers


def test_an_unlike_layout_or_half_an_instance_is_refused_by_name() -> None:
    for wrong, cause in (
        (attrs.evolve(FOUND, layout=attrs.evolve(LAYOUT, prefix_granularity=8)), "prefix_granularity differs"),
        (attrs.evolve(FOUND, ranks=FOUND.ranks * 2), "does not name every prefill rank"),
    ):
        decode = DecodeWitness()
        answer, connect, *introduced, _, cancel, disconnect = seen(decode.handle(want(), wrong))
        assert cause in str(answer)
        assert (connect, introduced) == (Connect(CHANNEL, ENDPOINT), INTRODUCED)  # prefill hears those that it refuses
        assert isinstance(cancel, Tell)
        assert disconnect == Disconnect(CHANNEL)


def test_a_refused_decode_tells_its_callers_the_field(decode: DecodeWitness) -> None:
    refused = events.NoticeFromPrefill(CHANNEL, Refused(SESSION, "dtype", "f32", "f16"))
    cause = "prefill refuses this decode: dtype differs: prefill has f32, this decode has f16"
    assert seen(decode.handle(refused)) == [*broken(Cause.REFUSED, cause), Disconnect(CHANNEL)]


def test_an_unknown_session_registers_once_more_and_offers_again(decode: DecodeWitness) -> None:
    unknown = events.NoticeFromPrefill(CHANNEL, UnknownSession(ROOM, SESSION))
    assert decode.handle(unknown) == INTRODUCED
    assert decode.handle(unknown) == []  # that is on its way
    assert decode.handle(registered()) == opened()[1:]
    assert decode.handle(registered()) == []


def test_a_registration_without_answer_is_repeated() -> None:
    decode = DecodeWitness()
    decode.handle(want(), FOUND)
    decode.now = 2.0
    assert decode.handle(events.Tick()) == INTRODUCED


def test_a_restarted_prefill_is_found_by_the_cut_data_connection(decode: DecodeWitness) -> None:
    assert decode.handle(events.WriterCut(Rank(0), PREFILL_LIFE, "reset")) == [LookUp(BOOTSTRAP, Room(0))]
    assert decode.handle(events.WriterCut(Rank(0), PREFILL_LIFE, "reset")) == []
    answer = attrs.evolve(found_life(NEW_LIFE), room=Room(0))
    assert seen(decode.handle(answer)) == [*broken(Cause.PEER_LOST, "prefill restarted"), Disconnect(CHANNEL)]
    assert decode.handle(want(2)) == [LookUp(BOOTSTRAP, ROOM)]
    assert decode.handle(found_life(NEW_LIFE))[0] == Connect(attrs.evolve(CHANNEL, life=NEW_LIFE), ENDPOINT)


def test_a_cut_alone_harms_nothing_while_the_life_is_in_service(decode: DecodeWitness) -> None:
    decode.handle(events.WriterCut(Rank(0), PREFILL_LIFE, "reset"), attrs.evolve(FOUND, room=Room(0)))
    assert decode.handle(landed(), *success())[-1] == Deliver(ROOM, 1, DELIVERED)


def test_a_prefill_that_is_gone_fails_its_rooms_at_once(decode: DecodeWitness) -> None:
    decode.handle(events.WriterCut(Rank(0), PREFILL_LIFE, "reset"))
    gone = events.PeerMissing(Room(0), BOOTSTRAP, Why(Cause.UNREACHABLE, "connection refused"))
    assert seen(decode.handle(gone)) == [
        *broken(Cause.PEER_LOST, "prefill is gone: connection refused"),
        Disconnect(CHANNEL),
    ]


def test_a_silent_prefill_is_lost_after_three_pings(decode: DecodeWitness) -> None:
    for now in (2.0, 4.0):
        assert decode.wake == now
        decode.now = now
        assert decode.handle(events.Tick()) == [Tell(CHANNEL, Ping(HELLO.life))]
    decode.now = 6.0
    cause = f"prefill at {BOOTSTRAP} fell silent for 6 s"
    assert seen(decode.handle(events.Tick())) == [*broken(Cause.PEER_LOST, cause), Disconnect(CHANNEL)]
    assert decode.machine.counts().sessions == {"peers": 0, "sessions": 0}


def test_a_room_that_offered_nothing_yet_looks_for_another_life() -> None:
    decode = DecodeWitness()
    decode.handle(want(), FOUND)
    decode.now = 6.0
    assert decode.handle(events.Tick()) == [LookUp(BOOTSTRAP, ROOM), Disconnect(CHANNEL)]
    found = decode.handle(found_life(NEW_LIFE))
    assert found[0] == Connect(attrs.evolve(CHANNEL, life=NEW_LIFE), ENDPOINT)


def test_a_draining_prefill_ends_its_rooms_and_gets_no_new_one(decode: DecodeWitness) -> None:
    decode.handle(events.NoticeFromPrefill(CHANNEL, Drain("bye")))
    other = attrs.evolve(want(2), room=Room(8))
    assert decode.handle(other) == [LookUp(BOOTSTRAP, Room(8))]
    assert seen(decode.handle(attrs.evolve(FOUND, room=Room(8))))[-1] == (2, "prefill is draining")
    assert decode.handle(landed(), *success())[-1] == Deliver(ROOM, 1, DELIVERED)


# ---- time and bounds


def test_deadlines_fire_by_wake_at() -> None:
    decode = DecodeWitness()
    decode.handle(want())
    assert decode.wake == 120.0
    decode.now = 120.0
    cause = f"prefill at {BOOTSTRAP} did not register us after 120.0 s"
    assert seen(decode.handle(events.Tick())) == [(1, cause)]


def test_a_waiting_room_names_what_is_missing(decode: DecodeWitness) -> None:
    found: list[actions.DecodeAction] = []
    while not decode.ended:
        assert decode.wake is not None
        decode.now = decode.wake
        found = decode.handle(events.NoticeFromPrefill(CHANNEL, Ping(PREFILL_LIFE)))
        found = found if decode.ended else decode.handle(events.Tick())
    assert decode.now == 300.0
    missing = "no Success from prefill ranks [0], bytes missing from prefill ranks [0]"
    assert seen(found)[:3] == broken(Cause.TIMED_OUT, f"timed out after 300.0 s: {missing}")


def test_rooms_are_bounded_and_closing_takes_no_new_one() -> None:
    decode = DecodeWitness(DecodeSettings(max_rooms=2))
    decode.handle(want(1), want(2, Room(8)))
    assert seen(decode.handle(want(3, Room(9)))) == [(3, "too many live rooms"), LookUp(BOOTSTRAP, Room(9))]
    decode.handle(events.Closing("bye"))
    assert seen(decode.handle(want(4))) == [(4, "bye")]
    decode.drain()


# ---- no blocks for a room


def declined(bootstrap: Endpoint = BOOTSTRAP, room: Room = ROOM) -> events.DecodeDeclined:
    return events.DecodeDeclined(room, 9, bootstrap, "hash", Why(Cause.FULL, "busy"))


def test_prefill_is_told_of_a_room_that_gets_no_blocks(decode: DecodeWitness) -> None:
    decode.handle(events.RoomCancelled(ROOM, 1, Why(Cause.CANCELLED, "over")))
    assert decode.handle(declined()) == [
        Tell(CHANNEL, Window(ROOM, Generation(9), "hash")),
        Tell(CHANNEL, Cancel(ROOM, Generation(9), Why(Cause.FULL, "busy"))),
    ]
    assert decode.machine.counts().rooms == {}


def test_prefill_is_told_of_a_room_that_the_machine_refuses() -> None:
    decode = DecodeWitness(DecodeSettings(max_rooms=1))
    decode.handle(want(1), FOUND, registered())
    assert seen(decode.handle(want(2, Room(8)))) == [
        (2, "too many live rooms"),
        Tell(CHANNEL, Window(Room(8), Generation(2), "hash")),
        Tell(CHANNEL, Cancel(Room(8), Generation(2), Why(Cause.FULL, "too many live rooms"))),
    ]


def test_nobody_is_told_whom_it_does_not_concern(decode: DecodeWitness) -> None:
    assert decode.handle(declined()) == []  # another use of the number is live


GIVEN_UP = [Tell(CHANNEL, Window(ROOM, Generation(1), "hash")), Tell(CHANNEL, Cancel(ROOM, Generation(1), GONE))]


@pytest.mark.parametrize("begun", [[want()], [stand()], [want(), FOUND], [stand(), FOUND]])
def test_a_use_given_up_during_its_look_up_is_told_once_prefill_knows_us(begun: list[events.DecodeEvent]) -> None:
    decode = DecodeWitness()
    decode.handle(*begun)
    assert seen(decode.handle(events.RoomCancelled(ROOM, 1, GONE))) == [(1, "gone")]
    decode.handle(*([FOUND] if len(begun) == 1 else []))
    assert decode.handle(registered()) == GIVEN_UP
    assert decode.handle(registered()) == []
    decode.drain()


@pytest.mark.parametrize("end", [[events.PeerMissing(ROOM, BOOTSTRAP, GONE)], [want(2), FOUND, registered()]])
def test_a_word_about_a_use_that_nobody_waits_for_is_dropped(end: list[events.DecodeEvent]) -> None:
    """There is no such prefill, or the number is in use again."""
    decode = DecodeWitness()
    decode.handle(want(), events.RoomCancelled(ROOM, 1, GONE), *end)
    assert decode.machine.counts().partings == 0


def test_a_prefill_that_was_not_known_is_looked_up_to_be_told() -> None:
    decode = DecodeWitness()
    assert decode.handle(declined()) == [LookUp(BOOTSTRAP, ROOM)]
    decode.handle(FOUND)
    window, cancel = decode.handle(registered())
    assert window == Tell(CHANNEL, Window(ROOM, Generation(9), "hash"))
    assert cancel == Tell(CHANNEL, Cancel(ROOM, Generation(9), Why(Cause.FULL, "busy")))
    decode.drain()


def test_a_refused_decode_says_what_it_does_not_fill() -> None:
    decode = DecodeWitness()
    decode.handle(want(), FOUND)
    refused = events.NoticeFromPrefill(CHANNEL, Refused(SESSION, "dtype", "f32", "f16"))
    why = Why(Cause.REFUSED, "prefill refuses this decode: dtype differs: prefill has f32, this decode has f16")
    assert seen(decode.handle(refused)) == [
        (1, why.text),
        GIVEN_UP[0],
        Tell(CHANNEL, Cancel(ROOM, Generation(1), why)),
        Disconnect(CHANNEL),
    ]


# ---- a room in line for blocks


QUEUED = Tell(CHANNEL, Queued(ROOM, SESSION, Generation(1), "hash"))


def test_prefill_hears_that_a_room_stands_in_line_and_then_gets_its_offer() -> None:
    decode = DecodeWitness()
    decode.handle(stand(), FOUND)
    assert decode.handle(registered()) == [QUEUED]
    assert decode.handle(given()) == opened()
    decode.handle(landed(), *success())
    assert decode.ended == {1: "delivered"}


def test_blocks_that_come_before_prefill_was_found_are_offered_when_it_is() -> None:
    decode = DecodeWitness()
    assert decode.handle(stand(), given()) == []
    assert decode.handle(FOUND, registered()) == opened()


def test_a_room_in_line_waits_longer_than_for_a_silent_prefill() -> None:
    settings = DecodeSettings(peer_timeout_s=10.0, waiting_timeout_s=300.0, ping_interval_s=1000.0)
    decode = DecodeWitness(settings)
    decode.handle(stand())
    assert decode.wake == 10.0
    decode.handle(FOUND, registered())
    assert decode.wake == 300.0
    decode.now = 300.0
    assert (1, "no blocks were free after 300.0 s") in seen(decode.handle(events.Tick()))


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (failed(), "prefill: engine"),
        (found_life(NEW_LIFE), "prefill restarted"),
        (events.NoticeFromPrefill(CHANNEL, Refused(SESSION, "a", "b", "c")), "prefill refuses this decode: a differs"),
    ],
)
def test_a_room_in_line_ends_with_its_prefills_half(word: events.DecodeEvent, text: str) -> None:
    decode = DecodeWitness()
    decode.handle(stand(), FOUND, registered(), events.WriterCut(Rank(0), PREFILL_LIFE, "reset"))
    assert any(text in str(told) for told in seen(decode.handle(word)))
    assert decode.ended == {1: "failed"}


def test_a_prefill_that_forgot_our_session_hears_again_that_a_room_stands_in_line() -> None:
    decode = DecodeWitness()
    decode.handle(stand(), FOUND, registered(), events.NoticeFromPrefill(CHANNEL, UnknownSession(ROOM, SESSION)))
    assert decode.handle(registered()) == [QUEUED]


@pytest.mark.parametrize("late", [given(2), events.BlocksGiven(Room(8), 1, manifest())])
def test_blocks_of_another_use_are_not_taken(late: events.DecodeEvent) -> None:
    decode = DecodeWitness()
    assert decode.handle(stand(), FOUND, registered(), late) == []
    assert decode.machine.counts().rooms == {"queued": 1}
