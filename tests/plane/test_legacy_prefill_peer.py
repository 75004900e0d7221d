"""Our decode plane beside prefill ranks of the older generation: their writes pass every fence."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from pdplane.errors import LocalProtocolError, RoomFailed
from pdplane.kv.arena import Pool
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import blocks_needed
from pdplane.plane.rooms import DecodeRoom
from pdplane.testing.legacy_peer import FAILED, SUCCESS, TRANSFERRING, LegacyPrefill, LegacyRendezvous, status_frames
from tests.plane.conftest import StartDecode
from tests.plane.sides import Blocks, DecodeSide, pages
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S, until

StartLegacy = Callable[..., LegacyPrefill]
PROMPT = 10


@pytest.fixture
def rendezvous() -> Iterator[LegacyRendezvous]:
    with LegacyRendezvous() as http:
        yield http


@pytest.fixture
def start_legacy(opened: contextlib.ExitStack, rendezvous: LegacyRendezvous) -> StartLegacy:
    def start(layout: Layout | None = None, **options: int) -> LegacyPrefill:
        played = LegacyPrefill(layout or two_group_layout(num_lcm_blocks=16), rendezvous.endpoint, **options)
        played.arena.bytes[:] = np.random.default_rng(3).integers(0, 256, played.arena.nbytes, np.uint8)
        return opened.enter_context(played)

    return start


def ask(decode: DecodeSide, prefill: LegacyPrefill, room: int) -> tuple[DecodeRoom, Blocks]:
    blocks, manifest = decode.lend(PROMPT)
    return decode.plane.open(room, prefill=prefill.rendezvous, manifest=manifest), blocks


def source(prefill: LegacyPrefill) -> Blocks:
    return Pool(prefill.layout).allocate(blocks_needed(prefill.layout, PROMPT))


def failure(room: DecodeRoom) -> str:
    with pytest.raises((RoomFailed, LocalProtocolError)) as caught:
        room.wait(PATIENCE_S)
    return str(caught.value)


def quarantined(decode: DecodeSide) -> dict[str, int]:
    return decode.plane.statistics()["quarantine"]


def test_a_room_is_filled_by_a_legacy_prefill(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, target = ask(decode, prefill, 7)
    prefill.serve(7, source(prefill))
    delivered = room.wait(PATIENCE_S)
    assert (delivered.first_token, delivered.logprob, delivered.cached_tokens) == (42, None, 0)
    sent = pages(prefill.layout, prefill.arena, source(prefill))
    assert (sent == pages(decode.plane.layout, decode.plane.arena, target)).all()
    room.released.result(0)


def test_what_we_lack_to_serve_it_is_told_at_once(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode(legacy_lacks="start it with Mooncake")
    room, _ = ask(decode, prefill, 7)
    assert "is a legacy peer, and start it with Mooncake" in failure(room)
    assert not prefill._pull.poll(0)


def test_seven_frames_tell_more(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, _ = ask(decode, prefill, 7)
    (offer,) = prefill.wait(7)
    prefill.report(offer, SUCCESS, 42, candidates=(5, -1), cached_tokens=4, logprob=-0.5)
    delivered = room.wait(PATIENCE_S)
    assert (delivered.logprob, delivered.candidates, delivered.cached_tokens) == (-0.5, (5, -1), 4)


def test_it_registers_once_for_many_rooms(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    for number in range(1, 4):
        room, blocks = ask(decode, prefill, number)
        prefill.serve(number, source(prefill))
        room.wait(PATIENCE_S)
        decode.pool.release(blocks)
    assert len(prefill.registrations) == 1
    assert not prefill._pull.poll(0)


def test_blocks_of_a_failed_room_wait_for_the_writers_word(
    start_decode: StartDecode, start_legacy: StartLegacy
) -> None:
    """After a Failed it may write on; only its Success says that it does not."""
    prefill, decode = start_legacy(), start_decode()
    room, _ = ask(decode, prefill, 7)
    (offer,) = prefill.wait(7)
    prefill.report(offer, FAILED)
    assert "prefill rank 0 failed it" in failure(room)
    prefill.write(offer, source(prefill))
    assert not room.released.done()
    assert quarantined(decode) == {"rooms": 1, "blocks": 4}
    assert "may still be written to" in failure(ask(decode, prefill, 7)[0])
    prefill.report(offer, SUCCESS, 42)
    room.released.result(PATIENCE_S)
    assert quarantined(decode) == {"rooms": 0, "blocks": 0}


def test_a_silent_writer_keeps_them_for_a_time(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode(quarantine_timeout_s=0.2)
    room, _ = ask(decode, prefill, 7)
    prefill.wait(7)
    room.cancel("the caller left")
    assert "the caller left" in failure(room)
    room.released.result(PATIENCE_S)


def test_closing_ends_the_quarantine(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, _ = ask(decode, prefill, 7)
    prefill.wait(7)
    room.cancel()
    failure(room)
    decode.plane.close()
    room.released.result(0)


def test_statuses_that_mean_nothing_are_counted(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, _ = ask(decode, prefill, 7)
    (offer,) = prefill.wait(7)
    for frames in (
        status_frames(7, 9, 0),
        status_frames(7, SUCCESS, 3, 42),
        status_frames(99, SUCCESS, 0, 42),
        [b"7", b"5"],
        [b"x", b"5", b"0"],
    ):
        prefill.say(offer.registration, frames)
    prefill.report(offer, TRANSFERRING)
    prefill.report(offer, SUCCESS, 42)
    assert room.wait(PATIENCE_S).first_token == 42
    prefill.report(offer, FAILED)
    prefill.report(offer, SUCCESS, 41)
    until(lambda: decode.plane.statistics()["rejected"].get("late") == 2, "the late statuses")
    rejected = decode.plane.statistics()["rejected"]
    assert (rejected["foreign_rank"], rejected["unknown_room"], rejected["status"]) == (1, 1, 1)
    assert (rejected["wire_status"], rejected["wire_frame_count"], rejected["wire_room"]) == (1, 1, 1)


def test_a_success_without_a_token_is_delivered_as_such(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, _ = ask(decode, prefill, 7)
    (offer,) = prefill.wait(7)
    prefill.report(offer, SUCCESS)
    assert room.wait(PATIENCE_S).first_token is None
    room.released.result(PATIENCE_S)


def test_silence_fails_the_room_in_time(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode(waiting_timeout_s=1)
    room, _ = ask(decode, prefill, 7)
    assert "no Success from prefill ranks [0]" in failure(room)
    assert not room.released.done()


def test_a_dead_rendezvous_is_a_dead_prefill(opened: contextlib.ExitStack, start_decode: StartDecode) -> None:
    decode = start_decode(ping_interval_s=0.1, waiting_timeout_s=60)
    with LegacyRendezvous() as http, LegacyPrefill(two_group_layout(num_lcm_blocks=16), http.endpoint) as prefill:
        room, _ = ask(decode, prefill, 7)
        prefill.wait(7)
    assert "fell silent" in failure(room)


def test_a_restarted_prefill_is_found_at_its_new_address(
    start_decode: StartDecode, rendezvous: LegacyRendezvous
) -> None:
    decode, layout = start_decode(ping_interval_s=0.1, waiting_timeout_s=60), two_group_layout(num_lcm_blocks=16)
    with LegacyPrefill(layout, rendezvous.endpoint) as first:
        room, _ = ask(decode, first, 7)
        first.wait(7)
    with LegacyPrefill(layout, rendezvous.endpoint) as second:
        assert "restarted" in failure(room)
        room, _ = ask(decode, second, 8)
        second.serve(8, source(second))
        assert room.wait(PATIENCE_S).first_token == 42


def test_another_model_is_refused_before_any_offer(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    other = two_group_layout(heads=2, total_heads=2, num_lcm_blocks=16)
    prefill, decode = start_legacy(other), start_decode()
    room, _ = ask(decode, prefill, 7)
    assert "partition differs" in failure(room)
    room.released.result(0)


def test_without_the_channel_a_legacy_prefill_is_named(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode(legacy=False)
    room, _ = ask(decode, prefill, 7)
    assert "legacy peer" in failure(room)


def test_an_ended_room_takes_no_new_use_for_a_while(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, _ = ask(decode, prefill, 7)
    prefill.serve(7, source(prefill))
    room.wait(PATIENCE_S)
    assert "cannot tell uses apart" in failure(ask(decode, prefill, 7)[0])


def test_chunks_and_layers_arrive_in_any_pieces(start_decode: StartDecode, start_legacy: StartLegacy) -> None:
    prefill, decode = start_legacy(), start_decode()
    room, target = ask(decode, prefill, 7)
    (offer,) = prefill.wait(7)
    blocks = source(prefill)
    for chunk in (range(5), range(5, 9), range(9, PROMPT)):
        for step in prefill.layout.steps:
            prefill.write(offer, blocks, fields=step, chunk=chunk)
    prefill.report(offer, SUCCESS, 42)
    room.wait(PATIENCE_S)
    sent = pages(prefill.layout, prefill.arena, blocks)
    assert (sent == pages(decode.plane.layout, decode.plane.arena, target)).all()


def test_a_rank_that_died_behind_a_living_rendezvous_is_noticed(
    start_decode: StartDecode, rendezvous: LegacyRendezvous
) -> None:
    """The legacy decode never noticed: its rendezvous answers on."""
    decode = start_decode(ping_interval_s=0.1, waiting_timeout_s=60)
    with LegacyPrefill(two_group_layout(num_lcm_blocks=16), rendezvous.endpoint) as prefill:
        room, _ = ask(decode, prefill, 7)
        prefill.wait(7)
    assert "fell silent" in failure(room)


def test_an_address_where_nobody_listens_is_noticed(start_decode: StartDecode, rendezvous: LegacyRendezvous) -> None:
    decode = start_decode(ping_interval_s=0.1, waiting_timeout_s=60)
    with LegacyPrefill(two_group_layout(num_lcm_blocks=16), rendezvous.endpoint) as prefill:
        pass
    room, _ = ask(decode, prefill, 7)
    assert "fell silent" in failure(room)


def test_a_rank_that_is_there_again_is_told_our_session_again(
    start_decode: StartDecode, start_legacy: StartLegacy
) -> None:
    prefill, decode = start_legacy(), start_decode(ping_interval_s=5)
    room, _ = ask(decode, prefill, 7)
    prefill.serve(7, source(prefill))
    room.wait(PATIENCE_S)
    prefill.restart()
    prefill.hear()
    assert len(prefill.registrations) == 1
    room, _ = ask(decode, prefill, 8)
    prefill.serve(8, source(prefill))
    assert room.wait(PATIENCE_S).first_token == 42
