"""Peers without a connection, a life or a generation: what the machines do for them."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause, Why
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.layout import Layout
from pdplane.machine import actions, events
from pdplane.machine.actions import DecodeSettings, Fail, PrefillSettings, Release, Send
from pdplane.machine.decode import DecodeMachine
from pdplane.messages import Fingerprint, Refused, Registered, Status, StatusCode, legacy_identity
from tests.machine.witness import BOOTSTRAP, DECODE_LIFE, GONE, LAYOUT, REGISTRATION, PrefillWitness, manifest

LEGACY = legacy_identity(REGISTRATION.route)
ROOM = Room(7)
HERE = Endpoint("prefill", 4001)
CHANNEL = events.Channel(BOOTSTRAP, Rank(0), Life(""))


def registration(layout: Layout = LAYOUT, **changes: object) -> events.RegistrationReceived:
    changed = attrs.evolve(REGISTRATION, **changes)
    return events.RegistrationReceived(legacy_identity(changed.route), changed, layout)


def offer(room: Room = ROOM) -> events.PreallocationReceived:
    return events.PreallocationReceived(LEGACY, room, REGISTRATION.session, manifest())


def refusals(found: list[actions.PrefillAction]) -> list[str]:
    messages = [action.message for action in found if isinstance(action, Send)]
    return [message.field for message in messages if isinstance(message, Refused)]


# ---- decode ranks, as a prefill sees them


def test_a_legacy_decode_is_never_forgotten_for_its_silence() -> None:
    prefill = PrefillWitness()
    prefill.handle(registration())
    assert prefill.wake is None
    prefill.now += 10 * PrefillSettings().idle_peer_s
    prefill.handle(events.PrefillRequested(ROOM, 1, None, None))
    assert isinstance(prefill.handle(offer())[-1], actions.Offered)


def test_the_most_silent_one_makes_place_and_its_rooms_end() -> None:
    prefill = PrefillWitness(PrefillSettings(max_peers=2))
    prefill.handle(registration(), events.PrefillRequested(ROOM, 1, None, None), offer())
    for number in (1, 2):
        prefill.now += 1.0
        found = prefill.handle(registration(port=number, session=SessionId(f"decode:{number}")))
    assert any(isinstance(action, Fail) and action.room == ROOM for action in found)
    assert prefill.machine.counts().sessions["sessions"] == 2


def test_the_same_layout_in_other_words_is_the_same_registration() -> None:
    prefill = PrefillWitness()
    prefill.handle(registration())
    assert prefill.handle(registration(layout=LAYOUT, arena_base=REGISTRATION.arena_base)) == []
    spelt = attrs.evolve(REGISTRATION, layout=b'{"plan": {}}')
    assert prefill.handle(events.RegistrationReceived(LEGACY, spelt, LAYOUT)) == []
    assert prefill.machine.counts().sessions["sessions"] == 1


@pytest.mark.parametrize("changes", [{"arena_base": 8192}, {"port": 10}, {"host": "elsewhere"}])
def test_a_contradiction_ends_the_session_until_a_good_one(changes: dict[str, object]) -> None:
    prefill = PrefillWitness()
    prefill.handle(registration(), events.PrefillRequested(ROOM, 1, None, None), offer())
    found = prefill.handle(registration(**changes))
    assert refusals(found) == ["registration"]
    assert any(isinstance(action, Fail) for action in found)
    assert Send(LEGACY, Status(ROOM, StatusCode.FAILED, Rank(0))) in found
    assert prefill.machine.counts().sessions["sessions"] == 0
    prefill.handle(registration())
    assert prefill.machine.counts().sessions["sessions"] == 1


def test_an_unreadable_registration_ends_the_session_that_it_names() -> None:
    prefill = PrefillWitness()
    prefill.handle(registration())
    prefill.handle(events.RegistrationRejected(LEGACY, REGISTRATION.route, "layout", "no JSON"))
    assert prefill.machine.counts().sessions["sessions"] == 0


def test_no_legacy_registration_touches_a_native_session() -> None:
    prefill = PrefillWitness()
    native = events.RegistrationReceived(b"native", REGISTRATION, LAYOUT)
    prefill.handle(native)
    assert refusals(prefill.handle(registration(arena_base=8192))) == ["session"]
    assert prefill.machine.counts().sessions["sessions"] == 1


def test_its_ended_rooms_are_remembered_for_the_bootstrap_timeout() -> None:
    prefill = PrefillWitness()
    prefill.handle(registration(), events.PrefillRequested(ROOM, 1, None, None), offer())
    prefill.handle(events.RoomFinished(ROOM, 1, 42, None, None, 0))
    prefill.now += PrefillSettings().bootstrap_timeout_s - 1
    prefill.handle(events.PrefillRequested(ROOM, 2, None, None))
    assert prefill.ended[2] == "failed"
    prefill.now += 2
    prefill.handle(events.PrefillRequested(ROOM, 3, None, None))
    assert isinstance(prefill.handle(offer())[-1], actions.Offered)


# ---- prefill ranks, as a decode sees them


class Decode:
    """A decode machine with one legacy prefill; time stands still unless a test moves it."""

    def __init__(self, settings: DecodeSettings | None = None) -> None:
        settings = settings or DecodeSettings()
        self.machine = DecodeMachine(settings, LAYOUT, DECODE_LIFE, REGISTRATION, Fingerprint())
        self.now = 0.0

    def handle(self, *said: events.DecodeEvent) -> list[actions.DecodeAction]:
        found: list[actions.DecodeAction] = []
        for event in said:
            found = [a for a in self.machine.handle(event, self.now) if not isinstance(a, actions.WakeAt)]
        return found

    def offer(self, ticket: int = 1, room: Room = ROOM) -> None:
        self.handle(events.DecodeRequested(room, ticket, BOOTSTRAP, manifest(), ""), found(room))
        self.handle(events.NoticeFromPrefill(CHANNEL, Registered(REGISTRATION.session, Life(""))))

    def status(self, code: StatusCode, ticket: int = 1) -> list[actions.DecodeAction]:
        said = Status(ROOM, code, Rank(0), 42)
        return self.handle(events.StatusFromPrefill(CHANNEL, said, Generation(ticket)))

    @property
    def held(self) -> int:
        return self.machine.counts().quarantine["rooms"]


def found(room: Room = ROOM, endpoint: Endpoint = HERE) -> events.PeerFound:
    return events.PeerFound(room, BOOTSTRAP, 0, 1, LAYOUT, (events.PeerRank(Rank(0), endpoint, Life("")),))


def fails(actions_: list[actions.DecodeAction]) -> list[bool]:
    return [action.held for action in actions_ if isinstance(action, Fail)]


def test_success_alone_makes_a_room_ready() -> None:
    decode = Decode()
    decode.offer()
    assert isinstance(decode.status(StatusCode.SUCCESS)[-1], actions.Deliver)
    assert decode.held == 0


def test_a_failed_room_keeps_its_blocks_until_success() -> None:
    decode = Decode()
    decode.offer()
    assert fails(decode.status(StatusCode.FAILED)) == [True]
    assert decode.held == 1
    assert decode.status(StatusCode.SUCCESS) == [Release(ROOM, 1)]
    assert decode.held == 0


def test_each_word_begins_the_time_anew() -> None:
    decode = Decode()
    decode.offer()
    limit = DecodeSettings().quarantine_timeout_s
    decode.status(StatusCode.FAILED)
    decode.now += limit - 1
    decode.status(StatusCode.FAILED)
    decode.now += 2
    assert Release(ROOM, 1) not in decode.handle(events.Tick())
    decode.now += limit
    assert Release(ROOM, 1) in decode.handle(events.Tick())


def test_a_lost_peers_success_still_counts() -> None:
    decode = Decode()
    decode.offer()
    assert fails(decode.handle(events.ChannelBroken(CHANNEL, Why(Cause.UNREACHABLE, "restarted")))) == [True]
    assert decode.status(StatusCode.SUCCESS) == [Release(ROOM, 1)]


def test_a_room_without_an_offer_has_nothing_to_keep() -> None:
    decode = Decode()
    decode.handle(events.DecodeRequested(ROOM, 1, BOOTSTRAP, manifest(), ""))
    assert fails(decode.handle(events.RoomCancelled(ROOM, 1, GONE))) == [False]
    assert fails(decode.handle(events.DecodeRequested(ROOM, 2, BOOTSTRAP, manifest(), ""))) == []


def test_a_number_in_quarantine_or_just_ended_takes_no_new_use() -> None:
    decode = Decode()
    decode.offer()
    decode.status(StatusCode.FAILED)
    again = decode.handle(events.DecodeRequested(ROOM, 2, BOOTSTRAP, manifest(), ""))
    assert "may still be written to" in str(again[0].error)
    decode.status(StatusCode.SUCCESS)
    again = decode.handle(events.DecodeRequested(ROOM, 3, BOOTSTRAP, manifest(), ""))
    assert "cannot tell uses apart" in str(again[0].error)


def test_quarantined_rooms_count_among_the_live_ones() -> None:
    decode = Decode(DecodeSettings(max_rooms=1))
    decode.offer()
    decode.status(StatusCode.FAILED)
    refused = decode.handle(events.DecodeRequested(Room(8), 2, BOOTSTRAP, manifest(), ""))
    assert "too many live rooms" in str(refused[0].error)


def test_a_one_sided_transport_keeps_the_blocks_of_native_rooms_too() -> None:
    decode = Decode(DecodeSettings(one_sided=True))
    life = Life("p" * 32)
    channel = events.Channel(BOOTSTRAP, Rank(0), life)
    peer = events.PeerFound(ROOM, BOOTSTRAP, 0, 1, LAYOUT, (events.PeerRank(Rank(0), HERE, life),))
    decode.handle(events.DecodeRequested(ROOM, 1, BOOTSTRAP, manifest(), ""), peer)
    decode.handle(events.NoticeFromPrefill(channel, Registered(REGISTRATION.session, life)))
    assert fails(decode.handle(events.RoomCancelled(ROOM, 1, GONE))) == [True]


def test_a_new_address_is_a_new_life() -> None:
    decode = Decode()
    decode.offer()
    decode.now += 3.5  # too long ago to trust the last answer of the rendezvous
    decode.handle(events.DecodeRequested(Room(8), 2, BOOTSTRAP, manifest(), ""))
    moved = decode.handle(found(Room(8), Endpoint("prefill", 4002)))
    assert any(isinstance(action, actions.Disconnect) for action in moved)
    assert any(isinstance(action, actions.Connect) for action in moved)


def test_groups_of_one_rendezvous_are_told_apart_without_lives() -> None:
    decode = Decode()
    rank = events.PeerRank(Rank(0), HERE, Life(""))
    for room in (0, 1):
        decode.handle(events.DecodeRequested(Room(room), room + 1, BOOTSTRAP, manifest(), ""))
        decode.handle(events.PeerFound(Room(room), BOOTSTRAP, room, 2, LAYOUT, (rank,)))
    other = attrs.evolve(CHANNEL, dp_group=1)
    decode.handle(events.NoticeFromPrefill(other, Registered(REGISTRATION.session, Life(""))))
    assert decode.machine.counts().rooms == {"resolving": 1, "waiting": 1}
