"""Who owns a session: whoever answers at its address, and nobody else."""

from __future__ import annotations

import json
import socket

import attrs
import pytest

from pdplane import wire
from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, SessionId, new_life
from pdplane.messages import Hello, Preallocation, Registration, Window
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import DecodeSide, Meeting, PrefillSide, meet
from tests.raw_peers import RawDealer
from tests.waiting import PATIENCE_S, until

QUICK = {"ping_interval_s": 0.5}  # on both sides: each misses the other after three intervals of its own


def registration(decode: DecodeSide, session: SessionId | None = None) -> Registration:
    plane = decode.plane
    return Registration(
        "127.0.0.1", plane.data.port, session or plane.session, 4096, wire.encode_layout(plane.layout), 1, 0
    )


def thief(prefill: PrefillSide) -> RawDealer:
    assert prefill.plane.control is not None
    return RawDealer(prefill.plane.control)


@pytest.fixture
def prefill(start_prefill: StartPrefill) -> PrefillSide:
    return start_prefill()


def test_another_life_cannot_claim_a_live_session(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    meet(prefill, decode).serve()
    running = meet(prefill, decode)
    running.work.wait_window(PATIENCE_S)
    with thief(prefill) as raw:
        raw.send(*wire.encode_notice(Hello("1", new_life())))
        raw.send(*wire.encode_registration(registration(decode)))
        refused = json.loads(raw.receive_until(b"refused")[-1])
        assert refused["field"] == "life"
    running.serve()


def test_the_life_of_another_does_not_help(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    meet(prefill, decode).serve()
    with thief(prefill) as raw:
        raw.send(*wire.encode_notice(Hello("1", decode.plane.life)))
        raw.send(*wire.encode_registration(registration(decode)))
        assert json.loads(raw.receive_until(b"refused")[-1])["field"] == "session"
    meet(prefill, decode).serve()


def test_a_decode_that_connects_again_has_its_session_at_once(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    for _connection in range(2):  # the old one has not been missed yet when the new one comes
        with thief(prefill) as raw:
            raw.send(*wire.encode_notice(Hello("1", decode.plane.life)))
            raw.send(*wire.encode_registration(registration(decode)))
            assert json.loads(raw.receive_until(b"registered")[-1])["session"] == decode.plane.session


def test_a_peer_without_hello_cannot_claim_a_live_session(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    meet(prefill, decode).serve()
    with thief(prefill) as raw:
        raw.send(*wire.encode_registration(registration(decode)))
        raw.send(*wire.encode_preallocation(Preallocation(9, decode.plane.session, b"")))
        assert wire.decode_status(raw.receive()).room == 9
    meet(prefill, decode).serve()


def test_rooms_of_a_session_come_from_its_own_connection_only(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    meet(prefill, decode).serve()
    _, manifest = decode.lend(10)
    work = prefill.plane.open(11, prompt_len=10)
    with thief(prefill) as raw:
        raw.send(*wire.encode_notice(Window(11, 1, "")))
        raw.send(*wire.encode_preallocation(Preallocation(11, decode.plane.session, wire.encode_manifest(manifest))))
        assert json.loads(raw.receive_until(b"unknown_session")[-1])["room"] == 11
    assert not work.window.done()
    assert prefill.plane.statistics()["rejected"] == {"unknown_session": 1}
    work.cancel("the test is over")


def test_a_decode_restarted_on_its_port_takes_over_at_once(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, first = start_prefill(**QUICK), start_decode(**QUICK)
    meet(prefill, first).serve()
    port = first.plane.data.port
    first.plane.close()
    second = start_decode(data_port=port, **QUICK)
    assert second.plane.session == first.plane.session
    meet(prefill, second).serve()
    until(lambda: prefill.plane.statistics()["sessions"] == {"peers": 1, "sessions": 1, "checking": 0})


def test_a_session_where_nobody_answers_is_refused(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    for session in ("127.0.0.1:1", "no port", "[::1", "nowhere.invalid:7", "a..b:7", f"{decode.plane.session}0"):
        with thief(prefill) as raw:
            raw.send(*wire.encode_notice(Hello("1", new_life())))
            raw.send(*wire.encode_registration(registration(decode, SessionId(session))))
            assert json.loads(raw.receive_until(b"refused")[-1])["field"] == "data address"
    meet(prefill, decode).serve()
    counts = prefill.plane.statistics()
    assert counts["sessions"]["sessions"] == 1
    assert counts["data_connections"] == 1


def test_a_prefill_that_restarts_is_found_by_the_first_request(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    first, decode = start_prefill(), start_decode()
    meet(first, decode).serve()
    first.plane.close()
    again = start_prefill(bootstrap_port=first.rendezvous.port)
    meet(again, decode).serve()
    assert decode.plane.statistics()["sessions"] == {"peers": 1, "sessions": 1}


def test_a_room_from_the_last_life_does_not_disturb_the_next(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    first, decode = start_prefill(), start_decode()
    lost = meet(first, decode, room=5)
    lost.work.wait_window(PATIENCE_S)
    first.plane.close()
    with pytest.raises(RoomFailed, match="prefill is shutting down"):
        lost.waiting.wait(PATIENCE_S)
    lost.give_back()
    again = start_prefill(bootstrap_port=first.rendezvous.port)
    meet(again, decode, room=5).serve()
    assert attrs.asdict(decode.plane._fence.snapshot())["open_rooms"] == 0


def test_an_address_that_never_answers_holds_up_nobody(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(**QUICK), start_decode(**QUICK)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts into its backlog, and says nothing
        session = SessionId(f"127.0.0.1:{silent.getsockname()[1]}")
        with thief(prefill) as raw:
            raw.send(*wire.encode_notice(Hello("1", new_life())))
            raw.send(*wire.encode_registration(registration(decode, session)))
            until(lambda: prefill.plane.statistics()["sessions"]["checking"] == 1)
            meet(prefill, decode).serve()
        until(lambda: prefill.plane.statistics()["sessions"]["checking"] == 0, "the loss of the silent peer")
        meet(prefill, decode).serve()


def cut(decode: DecodeSide) -> None:
    """End every data connection, as a network would."""
    for connection in list(decode.plane._receiver._connections):  # type: ignore[attr-defined]
        connection.stop("cut by the test")
    until(lambda: decode.plane.statistics()["receiver"]["connections"] == 0)


def test_a_cut_data_connection_costs_no_later_room(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode, other = start_decode(), start_decode()
    for seed in range(3):
        meet(prefill, decode).serve(seed)
        cut(decode)
        meet(prefill, other).serve(seed)
    meet(prefill, decode).serve()


def test_a_room_outlives_a_cut_between_its_pushes(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    meeting = meet(prefill, decode)
    meeting.work.wait_window(PATIENCE_S)
    source = prefill.fill(10)
    meeting.work.push(source, range(2))
    until(lambda: prefill.plane.statistics()["pushes"] == 0, "the acknowledgement")
    cut(decode)
    meeting.work.push(source, range(2, 3))
    meeting.work.finish(first_token=3)
    assert meeting.waiting.wait(PATIENCE_S).first_token == 3


def test_two_names_of_one_rendezvous_are_one_prefill(prefill: PrefillSide, start_decode: StartDecode) -> None:
    decode = start_decode()
    for host in ("127.0.0.1", "localhost", "127.0.0.1"):
        target, manifest = decode.lend(10)
        named = Endpoint(host, prefill.rendezvous.port)
        waiting = decode.plane.open(1, prefill=named, manifest=manifest)
        Meeting(prefill, decode, prefill.plane.open(1), waiting, target, 10).serve()
    assert decode.plane.statistics()["sessions"] == {"peers": 1, "sessions": 1}
    assert prefill.plane.statistics()["sessions"]["peers"] == 1
