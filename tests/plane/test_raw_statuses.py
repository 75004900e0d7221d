"""What a prefill may say in the wrong order, of another use, or of nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdplane.errors import Cause, RoomFailed, Why
from pdplane.ids import Generation, Room
from pdplane.kv.arena import Pool
from pdplane.kv.manifest import blocks_needed
from pdplane.messages import Failed, StatusCode, UnknownSession, Window
from pdplane.plane.rooms import DecodeRoom
from tests.plane.conftest import StartDecode
from tests.plane.raw_prefill import Offer, RawPrefill
from tests.plane.sides import Blocks, DecodeSide, pages
from tests.waiting import PATIENCE_S, until

ROOM = Room(6)


@pytest.fixture
def decode(start_decode: StartDecode) -> DecodeSide:
    return start_decode()


@pytest.fixture
def raw(decode: DecodeSide) -> Iterator[RawPrefill]:
    with RawPrefill(decode.plane.layout) as raw:
        yield raw


def begin(raw: RawPrefill, decode: DecodeSide) -> tuple[DecodeRoom, Blocks]:
    blocks, manifest = decode.lend(10)
    return decode.plane.open(ROOM, prefill=raw.rendezvous, manifest=manifest), blocks


def succeed(raw: RawPrefill, offer: Offer, token: int) -> None:
    raw.say(Window(ROOM, offer.generation, ""))
    raw.report(ROOM, StatusCode.SUCCESS, token)


def serve(raw: RawPrefill, decode: DecodeSide, offer: Offer, room: DecodeRoom, target: Blocks) -> None:
    """Everything that a good prefill does; the token is 42."""
    source = Pool(raw.layout).allocate(blocks_needed(raw.layout, 10))
    arena = decode.plane.arena.zeros(raw.layout.arena_bytes)
    arena.bytes[:] = 7
    raw.push(offer, arena, source)
    succeed(raw, offer, 42)
    assert room.wait(PATIENCE_S).first_token == 42
    assert (pages(raw.layout, decode.plane.arena, target) == 7).all()


def rejected(decode: DecodeSide) -> dict[str, int]:
    found: dict[str, int] = decode.plane.statistics()["rejected"]
    return found


def test_failed_is_final(raw: RawPrefill, decode: DecodeSide) -> None:
    room, _ = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    raw.report(ROOM, StatusCode.FAILED)
    succeed(raw, offer, 1)
    with pytest.raises(RoomFailed, match="prefill rank 0 failed it"):
        room.wait(PATIENCE_S)
    until(lambda: rejected(decode) == {"late": 1})


def test_a_failure_after_the_end_changes_nothing(raw: RawPrefill, decode: DecodeSide) -> None:
    room, target = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    serve(raw, decode, offer, room, target)
    raw.report(ROOM, StatusCode.FAILED)
    succeed(raw, offer, 1)
    raw.say(Failed(ROOM, offer.generation, Why(Cause.PEER_FAILED, "too late")))
    until(lambda: rejected(decode) == {"late": 3})
    assert decode.plane.statistics()["rooms"] == {}


def test_success_after_our_own_cancel_revives_nothing(raw: RawPrefill, decode: DecodeSide) -> None:
    room, _ = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    room.cancel("the client left")
    with pytest.raises(RoomFailed, match="the client left"):
        room.wait(PATIENCE_S)
    succeed(raw, offer, 1)
    until(lambda: rejected(decode) == {"late": 1})
    assert decode.plane.statistics()["rooms"] == {}


def test_a_stale_success_never_completes_the_next_use(raw: RawPrefill, decode: DecodeSide) -> None:
    first, _ = begin(raw, decode)
    raw.accept()
    old = raw.hear_offer()
    first.cancel()
    second, target = begin(raw, decode)
    new = raw.hear_offer()
    assert new.generation > old.generation
    succeed(raw, old, 9)
    raw.say(Failed(ROOM, old.generation, Why(Cause.PEER_FAILED, "of the last use")))
    until(lambda: rejected(decode) == {"late": 2})
    serve(raw, decode, new, second, target)


def test_success_without_bytes_is_no_success(raw: RawPrefill, decode: DecodeSide) -> None:
    room, target = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    succeed(raw, offer, 42)
    until(lambda: decode.plane.statistics()["rooms"] == {"waiting": 1})
    assert not room.done.done()
    source = Pool(raw.layout).allocate(blocks_needed(raw.layout, 10))
    raw.push(offer, decode.plane.arena.zeros(raw.layout.arena_bytes), source)
    assert room.wait(PATIENCE_S).first_token == 42
    decode.pool.release(target)


def test_success_without_a_token_is_delivered_as_such(raw: RawPrefill, decode: DecodeSide) -> None:
    room, _ = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    source = Pool(raw.layout).allocate(blocks_needed(raw.layout, 10))
    raw.push(offer, decode.plane.arena.zeros(raw.layout.arena_bytes), source)
    succeed(raw, offer, -1)
    assert room.wait(PATIENCE_S).first_token is None


def test_unknown_codes_and_foreign_rooms_are_counted(raw: RawPrefill, decode: DecodeSide) -> None:
    room, target = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    for code in (StatusCode.BOOTSTRAPPING, StatusCode.WAITING_FOR_INPUT, StatusCode.TRANSFERRING):
        raw.say(Window(ROOM, offer.generation, ""))
        raw.report(ROOM, code)
    raw.say(Window(Room(99), Generation(1), ""))
    raw.report(Room(99), StatusCode.SUCCESS, 1)
    until(lambda: rejected(decode) == {"status": 3, "unknown_room": 1})
    serve(raw, decode, offer, room, target)


def test_a_prefill_that_lost_the_session_gets_it_and_the_room_again(raw: RawPrefill, decode: DecodeSide) -> None:
    room, target = begin(raw, decode)
    raw.accept()
    offer = raw.hear_offer()
    raw.say(UnknownSession(ROOM, offer.preallocation.session))
    raw.accept()
    assert raw.hear_offer() == offer
    serve(raw, decode, offer, room, target)
