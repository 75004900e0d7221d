"""Our prefill plane beside decode ranks of the older generation."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable

import numpy as np
import pytest

from pdplane import wire
from pdplane.errors import LocalProtocolError, RoomFailed
from pdplane.ids import SessionId
from pdplane.kv.arena import Pool
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import blocks_needed
from pdplane.testing.legacy_peer import Contact, LegacyDecode
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import Blocks, PrefillSide, meet, pages
from tests.raw_peers import RawDealer
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S, until

StartLegacy = Callable[..., LegacyDecode]


@pytest.fixture
def start_legacy(opened: contextlib.ExitStack) -> StartLegacy:
    def start(layout: Layout | None = None, **options: object) -> LegacyDecode:
        decode = LegacyDecode(layout or two_group_layout(num_lcm_blocks=16), **options)
        decode.arena.bytes[:] = 0xEE
        return opened.enter_context(decode)

    return start


def offer(prefill: PrefillSide, decode: LegacyDecode, room: int, prompt_len: int = 10) -> tuple[Contact, Blocks]:
    blocks = Pool(decode.layout).allocate(blocks_needed(decode.layout, prompt_len))
    return decode.offer(prefill.rendezvous, room, blocks, prompt_len=prompt_len), blocks


def serve(prefill: PrefillSide, room: int, prompt_len: int = 10) -> Blocks:
    """The prefill leg of one room: everything pushed, Success said; the source blocks."""
    work = prefill.plane.open(room, prompt_len=prompt_len)
    work.wait_window(PATIENCE_S)
    source = prefill.fill(prompt_len)
    work.push(source)
    work.finish(first_token=42, logprob=-0.125, cached_tokens=4).result(PATIENCE_S)
    work.released.result(PATIENCE_S)
    return source


def test_a_legacy_decode_rank_needs_a_first_token(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill, decode = start_prefill(), start_legacy()
    contact, _ = offer(prefill, decode, 7)
    work = prefill.plane.open(7)
    work.wait_window(PATIENCE_S)
    work.push(prefill.fill(10))
    assert refused(work.finish) == "room 7: a legacy decode rank takes part, it needs a first token"
    work.finish(first_token=42)
    assert decode.wait(7, contact).token == 42


def refused(work: Callable[[], object]) -> str:
    with pytest.raises((RoomFailed, LocalProtocolError)) as caught:
        work()
    return str(caught.value)


def test_a_room_is_served_whole_and_nothing_else_is_touched(
    start_prefill: StartPrefill, start_legacy: StartLegacy
) -> None:
    prefill, decode = start_prefill(), start_legacy()
    contact, target = offer(prefill, decode, 7)
    source = serve(prefill, 7)
    status = decode.wait(7, contact)
    assert (status.code, status.token, status.candidates, len(status.frames)) == (5, 42, (), 7)
    sent = pages(prefill.plane.layout, prefill.plane.arena, source)
    assert (sent == pages(decode.layout, decode.arena, target)).all()
    untouched = decode.arena.nbytes - len(sent)
    assert np.count_nonzero(decode.arena.bytes == 0xEE) >= untouched


def test_what_we_lack_to_serve_it_stands_in_the_failure(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    """Nobody answers at its session, as a Mooncake engine does not answer our greeting."""
    prefill, decode = start_prefill(legacy_lacks="start it with Mooncake"), start_legacy()
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        decode.session = SessionId(f"127.0.0.1:{foreign.getsockname()[1]}")
        contact, _ = offer(prefill, decode, 7)
        work = prefill.plane.open(7, prompt_len=10)
        work.wait_window(PATIENCE_S)
        work.push(prefill.fill(10))
        work.finish(first_token=42)
        assert "(start it with Mooncake)" in refused(lambda: work.done.result(PATIENCE_S))
        assert "said 0" in refused(lambda: decode.wait(7, contact))


def test_an_early_offer_waits_for_its_request(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill, decode = start_prefill(), start_legacy()
    contact, _ = offer(prefill, decode, 7)
    until(lambda: prefill.plane.statistics()["rooms"].get("early") == 1, "the early offer")
    serve(prefill, 7)
    assert decode.wait(7, contact).token == 42


def test_one_registration_serves_many_rooms(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill, decode = start_prefill(), start_legacy()
    for room in range(1, 4):
        contact, _ = offer(prefill, decode, room)
        prefill.pool.release(serve(prefill, room))
        assert decode.wait(room, contact).token == 42
    assert prefill.plane.statistics()["sessions"]["sessions"] == 1


def test_an_abort_reaches_the_peer(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill, decode = start_prefill(), start_legacy()
    contact, _ = offer(prefill, decode, 7)
    work = prefill.plane.open(7)
    work.wait_window(PATIENCE_S)
    work.cancel("the caller left")
    assert "prefill rank 0 said 0" in refused(lambda: decode.wait(7, contact))


def test_an_ended_room_takes_no_new_use_for_a_while(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    """Without generations a late word of the first use could not be told from the second's."""
    prefill, decode = start_prefill(), start_legacy()
    contact, _ = offer(prefill, decode, 7)
    prefill.pool.release(serve(prefill, 7))
    decode.wait(7, contact)
    assert "cannot tell uses apart" in refused(lambda: prefill.plane.open(7).wait_window(PATIENCE_S))
    contact, _ = offer(prefill, decode, 7)
    assert "said 0" in refused(lambda: decode.wait(7, contact))


def test_another_model_is_refused_with_the_first_room(
    start_prefill: StartPrefill, start_legacy: StartLegacy, caplog: pytest.LogCaptureFixture
) -> None:
    """This wire has no word for a refused registration: decode hears Failed, the operator reads the reason."""
    prefill, decode = start_prefill(), start_legacy()
    other = two_group_layout(heads=2, total_heads=2, num_lcm_blocks=16)
    decode.meet(prefill.rendezvous, 7, layout=wire.encode_layout(other))
    contact, _ = offer(prefill, decode, 7)
    assert "said 0" in refused(lambda: decode.wait(7, contact))
    assert any("is refused" in record.message and "partition" in record.message for record in caplog.records)
    assert prefill.plane.statistics()["rejected"]["registration"] == 1


def test_a_contradiction_ends_the_session_until_a_good_registration(
    start_prefill: StartPrefill, start_legacy: StartLegacy
) -> None:
    prefill, decode = start_prefill(), start_legacy()
    contact, _ = offer(prefill, decode, 1)
    work = prefill.plane.open(1)
    work.wait_window(PATIENCE_S)
    push = contact.pushes[0]
    push.send_multipart(decode.registration(base=b"\1" * 8))
    assert "said 0" in refused(lambda: decode.wait(1, contact))
    assert "registered again" in refused(lambda: work.done.result(PATIENCE_S))
    contact, _ = offer(prefill, decode, 2)
    assert "said 0" in refused(lambda: decode.wait(2, contact))
    push.send_multipart(decode.registration())
    contact, _ = offer(prefill, decode, 3)
    serve(prefill, 3)
    assert decode.wait(3, contact).token == 42


def test_a_restarted_peer_begins_anew(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill = start_prefill()
    with LegacyDecode(two_group_layout(num_lcm_blocks=16)) as first:
        contact, _ = offer(prefill, first, 1)
        prefill.pool.release(serve(prefill, 1))
        first.wait(1, contact)
    second = start_legacy()
    contact, _ = offer(prefill, second, 2)
    serve(prefill, 2)
    assert second.wait(2, contact).token == 42


def test_garbage_is_dropped_and_counted(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill, decode = start_prefill(), start_legacy()
    contact = decode.meet(prefill.rendezvous, 1)
    for frames in ([b"\xff"], [b""], [b"None"], [b"1", b"nobody:1", b"{}"], [b"01", decode.session.encode(), b""]):
        contact.pushes[0].send_multipart(frames)
    contact.pushes[0].send_multipart(decode.registration(host=b"fd00::2"))
    contact, _ = offer(prefill, decode, 2)
    serve(prefill, 2)
    assert decode.wait(2, contact).token == 42
    rejected = prefill.plane.statistics()["rejected"]
    assert rejected["unknown_session"] == 1
    assert rejected["wire_endpoint"] == 1


def test_native_and_legacy_decodes_share_a_prefill(
    start_prefill: StartPrefill, start_decode: StartDecode, start_legacy: StartLegacy
) -> None:
    prefill, legacy = start_prefill(), start_legacy()
    contact, _ = offer(prefill, legacy, 1)
    prefill.pool.release(serve(prefill, 1))
    assert legacy.wait(1, contact).token == 42
    assert meet(prefill, start_decode(), room=2).serve().first_token == 42


def test_nobody_poses_as_a_legacy_peer_on_the_router(start_prefill: StartPrefill, start_legacy: StartLegacy) -> None:
    prefill, decode = start_prefill(), start_legacy()
    decode.meet(prefill.rendezvous, 1)
    until(lambda: prefill.plane.statistics()["sessions"]["sessions"] == 1, "the registration")
    assert prefill.plane.control is not None
    name = f"legacy {decode.host} {decode.port} {decode.session}".encode()
    with RawDealer(prefill.plane.control, identity=name) as impostor:
        impostor.send(*decode.registration(base=b"\1" * 8))
        until(lambda: prefill.plane.statistics()["rejected"].get("reserved_identity") == 1, "the count")
    assert prefill.plane.statistics()["sessions"]["sessions"] == 1
