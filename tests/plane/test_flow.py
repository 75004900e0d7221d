"""The two planes over real loopback sockets: what an embedder does with them."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import numpy as np
import pytest

from pdplane.errors import LocalProtocolError, RoomFailed, WireError
from pdplane.ids import Endpoint, GroupId, new_room
from pdplane.kv.manifest import Manifest, blocks_needed, build_manifest
from pdplane.plane import rooms as events
from pdplane.security import Secret
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import Meeting, meet, pages
from tests.samples import KV, SNAPSHOT
from tests.waiting import PATIENCE_S, until

SECRET = Secret(b"a secret of some length")


def test_blocks_travel_and_every_count_returns_to_its_start(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode()
    for seed in range(1, 4):
        delivered = meet(prefill, decode).serve(seed)
        assert (delivered.first_token, delivered.logprob, delivered.candidates) == (42, -0.125, None)
    for side in (prefill, decode):
        until(lambda side=side: side.plane.statistics()["tombstones"] == 0, "the end of the tombstones")
        counts = side.plane.statistics()
        assert counts["rooms"] == {}
        assert counts["handles"] == 0
        assert counts["rejected"] == {}
    assert prefill.plane.statistics()["pushes"] == 0
    fence = decode.plane.statistics()["fence"]
    assert fence == dict.fromkeys(fence, 0)


def test_layerwise_steps_travel_in_several_pushes(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    meeting = meet(prefill, decode, prompt_len=22)
    window = meeting.work.wait_window(PATIENCE_S)
    assert (window.prefix_len, window.prompt_len) == (0, 22)
    source = prefill.fill(22)
    steps = prefill.plane.layout.steps
    assert len(steps) == 3
    for step in range(len(steps)):
        meeting.work.push(source, range(step, step + 1))
    meeting.work.finish(first_token=np.int64(7), candidates=[np.int32(1), 2], cached_tokens=3)
    delivered = meeting.waiting.wait(PATIENCE_S)
    assert (delivered.first_token, delivered.candidates, delivered.cached_tokens) == (7, (1, 2), 3)
    layout = prefill.plane.layout
    sent, landed = pages(layout, prefill.plane.arena, source), pages(layout, decode.plane.arena, meeting.target)
    assert (sent == landed).all()


def test_a_first_token_is_optional(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    for values in ({}, {"cached_tokens": 8}, {"first_token": 0}, {"candidates": (3, 4)}):
        meeting = meet(prefill, decode)
        meeting.work.wait_window(PATIENCE_S)
        meeting.work.push(prefill.fill(10))
        meeting.work.finish(**values)
        nothing = {"first_token": None, "logprob": None, "candidates": None, "cached_tokens": 0, "top": ()}
        wanted = nothing | values
        delivered = attrs.asdict(meeting.waiting.wait(PATIENCE_S))
        assert delivered.pop("nbytes") > 0
        assert delivered == wanted
        meeting.give_back()


def test_blocks_that_are_pushed_twice_do_not_count_for_those_that_are_missing(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode()
    meeting = meet(prefill, decode, prompt_len=22)
    meeting.work.wait_window(PATIENCE_S)
    source = prefill.fill(22)
    meeting.work.push(source, range(1), range(9))
    meeting.work.push(source, range(2, 3))
    for steps, chunk in ((range(1), range(9)), (range(3), range(8)), (range(1), None), (range(2, 3), None)):
        with pytest.raises(LocalProtocolError, match=r"blocks of layer\.[02]\.\w+ were pushed before"):
            meeting.work.push(source, steps, chunk)
    meeting.work.push(source, range(1), range(9, 22))
    meeting.work.push(source, range(1, 2))
    meeting.work.finish(first_token=1)
    meeting.waiting.wait(PATIENCE_S)
    sent, landed = (
        pages(side.plane.layout, side.plane.arena, blocks)
        for side, blocks in ((prefill, source), (decode, meeting.target))
    )
    assert (sent == landed).all()


def test_a_push_says_which_blocks_it_needs(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    meeting = meet(prefill, decode, prompt_len=22)
    with pytest.raises(LocalProtocolError, match="no window yet"):
        prefill.plane.open(5).slots()
    meeting.work.wait_window(PATIENCE_S)
    source, work = prefill.fill(22), meeting.work
    last = len(source[KV]) - 1
    assert work.slots() == {KV: range(last + 1), SNAPSHOT: range(1)}
    assert work.slots(range(9)) == {KV: range(2), SNAPSHOT: range(0)}
    wrong = {
        "this push sends the slots 0 to 1 of group 'kv', source_blocks have 1 blocks": ({KV: source[KV][:1]}, range(9)),
        "this push sends the slots 0 to 1 of group 'kv', source_blocks have 0 blocks": ({}, range(9)),
        f"slots 0 to {last} of group 'kv', source_blocks have {last} blocks": ({KV: source[KV][:last]}, None),
        "the unknown group 'x'": ({**source, GroupId("x"): (1,)}, range(9)),
        f"the window has {last + 1} slots": ({KV: (*source[KV], 1)}, range(9)),
        "are no chunk of a prompt of 22": (source, range(9, 40)),
    }
    for text, (blocks, chunk) in wrong.items():
        with pytest.raises(LocalProtocolError, match=text):
            work.push(blocks, chunk=chunk)
    work.push({KV: source[KV][:2]}, chunk=range(9))  # the blocks of later chunks may be unknown still
    work.push(source, chunk=range(9, 22))
    work.finish(first_token=1)
    meeting.waiting.wait(PATIENCE_S)
    sides = ((prefill, source), (decode, meeting.target))
    sent, landed = (pages(side.plane.layout, side.plane.arena, blocks) for side, blocks in sides)
    assert (sent == landed).all()


def test_only_what_decode_lacks_travels(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    layout = prefill.plane.layout
    target = decode.pool.allocate(blocks_needed(layout, 22, prefix_len=8))
    manifest = build_manifest(layout, target, prefix_len=8, prompt_len=22)
    waiting = decode.plane.open(1, prefill=prefill.rendezvous, manifest=manifest)
    work = prefill.plane.open(1, prompt_len=22)
    window = work.wait_window(PATIENCE_S)
    assert (window.prefix_len, window.prompt_len) == (8, 22)
    source = {group: ids[-len(target[group]) :] for group, ids in prefill.fill(22).items()}
    work.push(source)
    work.finish(first_token=1, cached_tokens=8)
    assert waiting.wait(PATIENCE_S).cached_tokens == 8
    assert (pages(layout, prefill.plane.arena, source) == pages(layout, decode.plane.arena, target)).all()


def test_bytes_that_are_missing_at_success_fail_the_room(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode(waiting_timeout_s=1)
    meeting = meet(prefill, decode)
    meeting.work.wait_window(PATIENCE_S)
    meeting.work.push(prefill.fill(10), range(1))
    meeting.work.finish(first_token=1)
    with pytest.raises(RoomFailed, match="bytes missing"):
        meeting.waiting.wait(PATIENCE_S)


def test_futures_can_be_awaited(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()

    async def serve() -> int:
        meeting = meet(prefill, decode)
        await asyncio.wait_for(asyncio.wrap_future(meeting.work.window), PATIENCE_S)
        meeting.work.push(prefill.fill(10))
        await asyncio.wrap_future(meeting.work.finish(first_token=5))
        return (await asyncio.wait_for(asyncio.wrap_future(meeting.waiting.done), PATIENCE_S)).first_token

    async def give_up() -> None:
        waiting = meet(prefill, decode).waiting
        wrapper = asyncio.wrap_future(waiting.done)
        wrapper.cancel()
        await asyncio.sleep(0)
        assert not waiting.done.cancelled()
        waiting.cancel()

    assert asyncio.run(serve()) == 5
    asyncio.run(give_up())


def test_a_step_loop_polls_events(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(record_events=True), start_decode(record_events=True)
    good, bad = meet(prefill, decode), meet(prefill, decode, prompt_len=5)
    good.serve()
    bad.work.wait_window(PATIENCE_S)
    bad.work.cancel("changed our mind")
    bad.work.released.result(PATIENCE_S)
    with pytest.raises(RoomFailed, match="changed our mind"):
        bad.waiting.wait(PATIENCE_S)
    told: dict[int, list[Any]] = {good.work.room: [], bad.work.room: []}
    ends = (events.RoomWindowed, events.RoomSucceeded, events.RoomReleased, events.RoomDelivered, events.RoomEnded)
    for event in [*prefill.plane.poll(), *decode.plane.poll()]:
        if isinstance(event, ends):
            told[event.room].append(type(event))
    assert told[good.work.room] == [
        events.RoomWindowed, events.RoomSucceeded, events.RoomReleased, events.RoomDelivered
    ]  # fmt: skip
    assert told[bad.work.room] == [events.RoomWindowed, events.RoomEnded, events.RoomReleased, events.RoomEnded]
    assert prefill.plane.poll() == decode.plane.poll() == []


def test_a_number_is_free_at_once_after_its_end(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    for seed in range(1, 6):
        meet(prefill, decode, room=7).serve(seed)
        failing = meet(prefill, decode, room=7)
        failing.work.wait_window(PATIENCE_S)
        (failing.work if seed % 2 else failing.waiting).cancel("not this time")
        with pytest.raises(RoomFailed, match="not this time"):
            failing.waiting.wait(PATIENCE_S)
        with pytest.raises(RoomFailed, match="not this time"):
            failing.work.done.result(PATIENCE_S)
        failing.give_back()


def test_the_late_offer_of_a_use_that_was_cancelled_does_not_disturb_the_next(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode()
    prefill.plane.open(7, prompt_len=20).cancel("the client left")
    work = prefill.plane.open(7, prompt_len=10)
    old, manifest = decode.lend(20)
    late = decode.plane.open(7, prefill=prefill.rendezvous, manifest=manifest)
    with pytest.raises(RoomFailed, match="the client left"):
        late.wait(PATIENCE_S)
    decode.pool.release(old)
    target, manifest = decode.lend(10)
    waiting = decode.plane.open(7, prefill=prefill.rendezvous, manifest=manifest)
    Meeting(prefill, decode, work, waiting, target, 10).serve()


def test_a_live_room_is_refused_to_a_second_caller(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    first = meet(prefill, decode, room=7)
    first.work.wait_window(PATIENCE_S)
    second = meet(prefill, decode, room=7)
    for future in (second.work.window, second.work.done, second.waiting.done):
        with pytest.raises(LocalProtocolError, match="room 7 is live"):
            future.result(PATIENCE_S)
    second.work.released.result(PATIENCE_S)
    first.serve()


def test_either_request_may_come_first(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    room = new_room()
    work = prefill.plane.open(room)
    until(lambda: prefill.plane.statistics()["rooms"] == {"opened": 1})
    target, manifest = decode.lend(10)
    waiting = decode.plane.open(room, prefill=prefill.rendezvous, manifest=manifest)
    work.wait_window(PATIENCE_S)
    work.push(prefill.fill(10))
    work.finish(first_token=1)
    assert waiting.wait(PATIENCE_S).first_token == 1

    other = new_room()
    waiting = decode.plane.open(other, prefill=prefill.rendezvous, manifest=manifest)
    until(lambda: prefill.plane.statistics()["rooms"] == {"early": 1})
    work = prefill.plane.open(other)
    work.wait_window(PATIENCE_S)
    work.push(prefill.fill(10))
    work.finish(first_token=2)
    assert waiting.wait(PATIENCE_S).first_token == 2
    decode.pool.release(target)


def test_an_offer_that_nobody_asks_for_expires_and_decode_is_told(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(bootstrap_timeout_s=1), start_decode()
    _, manifest = decode.lend(10)
    waiting = decode.plane.open(3, prefill=prefill.rendezvous, manifest=manifest)
    with pytest.raises(RoomFailed, match="no request came"):
        waiting.wait(PATIENCE_S)
    late = prefill.plane.open(3)
    with pytest.raises(RoomFailed, match="no request came"):
        late.wait_window(PATIENCE_S)


@pytest.mark.parametrize("room", [-1, 2**63, True])
def test_a_room_that_no_frame_can_carry_is_refused(start_prefill: StartPrefill, room: int) -> None:
    prefill = start_prefill()
    if room is True:
        assert type(prefill.plane.open(room).room) is int
        return
    with pytest.raises(LocalProtocolError, match="room is"):
        prefill.plane.open(room)


def test_what_cannot_travel_is_refused_to_the_caller_and_harms_nobody(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode()
    where = {"prefill": prefill.rendezvous}
    _, manifest = decode.lend(10)
    with pytest.raises(LocalProtocolError, match="prompt_hash"):
        decode.plane.open(1, manifest=manifest, prompt_hash="\ud800", **where)
    for wrong in (Manifest((), 0, 10), Manifest(manifest.groups, 0, 10**9), Manifest(manifest.groups, 3, 10)):
        with pytest.raises(WireError):
            decode.plane.open(1, manifest=wrong, **where)
    meeting = meet(prefill, decode)
    meeting.work.wait_window(PATIENCE_S)
    for wrong_values in ({"first_token": -1}, {"first_token": 2**31}, {"first_token": 1, "candidates": [2**31]}):
        with pytest.raises(LocalProtocolError):
            meeting.work.finish(**wrong_values)
    with pytest.raises(LocalProtocolError, match="steps"):
        meeting.work.push({}, range(2, 9))
    meeting.serve()
    assert prefill.plane.alive
    assert decode.plane.alive


def test_ipv6(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(host="::1"), start_decode(host="::1")
    assert decode.plane.session == f"[::1]:{decode.plane.data.port}"
    assert prefill.rendezvous == Endpoint("::1", prefill.rendezvous.port)
    meet(prefill, decode).serve()


def test_an_ipv4_prefill_serves_an_ipv6_decode(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode(host="::1")
    meet(prefill, decode).serve()


def test_the_loopback_transport_carries_the_same_rooms(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(transport="loopback"), start_decode(transport="loopback")
    meet(prefill, decode).serve()


def test_one_secret_on_both_sides(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    meet(start_prefill(secret=SECRET), start_decode(secret=SECRET)).serve()


def test_two_decode_planes_on_one_prefill_share_numbers(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, one, two = start_prefill(), start_decode(), start_decode()
    meetings = [meet(prefill, decode) for decode in (one, two, one, two)]
    for seed, meeting in enumerate(meetings):
        meeting.serve(seed)
    assert prefill.plane.statistics()["sessions"]["sessions"] == 2


def test_two_prefills_serve_one_decode(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    one, two, decode = start_prefill(), start_prefill(), start_decode()
    meetings = [meet(prefill, decode) for prefill in (one, two, one, two)]
    for seed, meeting in enumerate(meetings):
        meeting.serve(seed)
    assert decode.plane.statistics()["sessions"] == {"peers": 2, "sessions": 2}
