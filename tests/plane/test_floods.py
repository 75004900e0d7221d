"""Many rooms that nobody wants, many that end early: bounded, and gone in time."""

from __future__ import annotations

import pytest

from pdplane import wire
from pdplane.errors import RoomFailed
from pdplane.ids import Room, SessionId
from pdplane.messages import Preallocation
from tests.plane import hostile
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import PrefillSide, meet
from tests.raw_peers import RawDealer
from tests.waiting import PATIENCE_S, until

SESSION = SessionId("127.0.0.1:7001")


def drained(prefill: PrefillSide) -> bool:
    counts = prefill.plane.statistics()
    return not counts["rooms"] and not counts["tombstones"] and not counts["handles"]


@pytest.mark.parametrize("manifest", ["good", "bad"])
def test_offers_without_requests_are_bounded_and_expire(
    start_prefill: StartPrefill, start_decode: StartDecode, manifest: str
) -> None:
    prefill, decode = start_prefill(bootstrap_timeout_s=1, tombstone_s=0.2), start_decode()
    blocks, found = decode.lend(10)
    decode.pool.release(blocks)
    body = wire.encode_manifest(found) if manifest == "good" else b'{"groups":[],"prefix_len":0,"prompt_len":10}'
    assert prefill.plane.control is not None
    with RawDealer(prefill.plane.control) as raw:
        raw.send(*hostile.registration(prefill.plane.layout))
        for number in range(6000):
            raw.send(*wire.encode_preallocation(Preallocation(Room(number), SESSION, body)))
            while raw.hears(0):
                raw.receive()
        rooms = sum(prefill.plane.statistics()["rooms"].values())
        assert rooms <= 4096
        meet(prefill, decode, room=123_456).serve()  # in the middle of it
        raw.send(b"pdplane/1", b"ping", b'{"life":"x"}')
        raw.send(*hostile.registration(prefill.plane.layout, layout=b"null"))
        raw.receive_until(b"refused")  # so all that was sent before has been read
        until(lambda: drained(prefill), "the end of every room")
        meet(prefill, decode, room=5999).serve()  # a number that the flood had used
    if manifest == "good":
        assert prefill.plane.statistics()["totals"]["failed"] >= 1000


def test_a_request_is_worth_more_than_an_offer_that_nobody_asked_for(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode()
    blocks, found = decode.lend(10)
    decode.pool.release(blocks)
    assert prefill.plane.control is not None
    with RawDealer(prefill.plane.control) as raw:
        raw.send(*hostile.registration(prefill.plane.layout))
        for number in range(4096):
            raw.send(*wire.encode_preallocation(Preallocation(Room(number), SESSION, wire.encode_manifest(found))))
        until(lambda: prefill.plane.statistics()["rooms"] == {"early": 4096})
        work = prefill.plane.open(123_456)
        until(lambda: prefill.plane.statistics()["rooms"] == {"early": 4095, "opened": 1})
        work.cancel()


def test_rooms_cancelled_before_anything_came(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(tombstone_s=0.2), start_decode(tombstone_s=0.2)
    for number in range(1000):
        prefill.plane.open(number).cancel("the client left")
    _, manifest = decode.lend(10)
    rooms = [decode.plane.open(n, prefill=prefill.rendezvous, manifest=manifest) for n in range(2000, 2300)]
    for room in rooms:
        room.cancel("the client left")
    for room in rooms:
        with pytest.raises(RoomFailed, match="the client left"):
            room.wait(PATIENCE_S)
    until(lambda: drained(prefill), "the end of every room")
    until(lambda: decode.plane.statistics()["tombstones"] == 0, "the end of the tombstones")
    meet(prefill, start_decode(), room=5).serve()
