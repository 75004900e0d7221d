"""The end of a plane, in the middle of everything: told to the peer, bounded, nothing left."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from pdplane.errors import InternalError, LocalProtocolError, RoomFailed
from pdplane.ids import Endpoint
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import DecodeSide, Meeting, PrefillSide, meet
from tests.waiting import ALERT, PATIENCE_S, until


@pytest.fixture
def pair(start_prefill: StartPrefill, start_decode: StartDecode) -> tuple[PrefillSide, DecodeSide]:
    return start_prefill(), start_decode()


def begun(prefill: PrefillSide, decode: DecodeSide, step: str) -> Meeting:
    meeting = meet(prefill, decode)
    meeting.work.wait_window(PATIENCE_S)
    if step != "offered":
        meeting.work.push(prefill.fill(10), range(1))
        until(lambda: prefill.plane.statistics()["pushes"] == 0, "the acknowledgement")
    return meeting


@pytest.mark.parametrize("step", ["offered", "half pushed"])
def test_prefill_closing_tells_decode(pair: tuple[PrefillSide, DecodeSide], step: str) -> None:
    prefill, decode = pair
    meeting = begun(prefill, decode, step)
    prefill.plane.close()
    with pytest.raises(RoomFailed, match="prefill is shutting down"):
        meeting.waiting.wait(PATIENCE_S)
    with pytest.raises(RoomFailed, match="prefill is shutting down"):
        meeting.work.done.result(0)
    assert meeting.work.released.done()
    assert decode.plane.statistics()["fence"]["open_rooms"] == 0


@pytest.mark.parametrize("step", ["offered", "half pushed"])
def test_decode_closing_tells_prefill(pair: tuple[PrefillSide, DecodeSide], step: str) -> None:
    prefill, decode = pair
    meeting = begun(prefill, decode, step)
    decode.plane.close()
    with pytest.raises(RoomFailed, match="decode is shutting down"):
        meeting.waiting.done.result(0)
    with pytest.raises(RoomFailed, match="cancelled by decode: decode is shutting down"):
        meeting.work.done.result(PATIENCE_S)
    meeting.work.released.result(PATIENCE_S)
    assert prefill.plane.statistics()["rooms"] == {}


def test_a_look_up_under_way_ends_with_the_plane(start_decode: StartDecode) -> None:
    decode = start_decode(bootstrap_timeout_s=60)
    _, manifest = decode.lend(10)
    waiting = decode.plane.open(1, prefill=Endpoint("127.0.0.1", 1), manifest=manifest)
    decode.plane.close()
    with pytest.raises(RoomFailed, match="decode is shutting down"):
        waiting.done.result(0)


def test_rooms_opened_while_the_plane_closes_end(pair: tuple[PrefillSide, DecodeSide]) -> None:
    prefill, decode = pair
    _, manifest = decode.lend(10)
    opened: list[Future[Any]] = []
    ready = threading.Barrier(3)

    def open_rooms(open_room: Callable[[int], Future[Any]]) -> None:
        ready.wait()
        with contextlib.suppress(LocalProtocolError):  # it is closed
            opened.extend(open_room(number) for number in range(1000))

    def open_prefill(number: int) -> Future[Any]:
        return prefill.plane.open(number).done

    def open_decode(number: int) -> Future[Any]:
        return decode.plane.open(number, prefill=prefill.rendezvous, manifest=manifest).done

    threads = [threading.Thread(target=open_rooms, args=(what,)) for what in (open_prefill, open_decode)]
    for thread in threads:
        thread.start()
    ready.wait()
    prefill.plane.close()
    decode.plane.close()
    for thread in threads:
        thread.join()
    assert opened
    for done in opened:
        with pytest.raises((RoomFailed, LocalProtocolError)):
            done.result(PATIENCE_S)


def test_closing_twice_from_many_threads(pair: tuple[PrefillSide, DecodeSide]) -> None:
    prefill, decode = pair
    meeting = begun(prefill, decode, "offered")
    threads = [threading.Thread(target=side.plane.close) for side in (*pair, *pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meeting.work.released.done()
    assert meeting.waiting.done.done()


def test_a_callback_may_ask_for_the_counts(pair: tuple[PrefillSide, DecodeSide]) -> None:
    prefill, decode = pair
    meeting = meet(prefill, decode)
    counted = []
    meeting.work.done.add_done_callback(lambda _: counted.append(prefill.plane.statistics()))
    meeting.waiting.done.add_done_callback(lambda _: counted.append(decode.plane.statistics()))
    meeting.serve()
    until(lambda: len(counted) == 2)


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_a_callback_that_closes_its_plane_is_told_so_and_closes_nothing(
    pair: tuple[PrefillSide, DecodeSide], side: int
) -> None:
    meeting = meet(*pair)
    refused: list[str] = []

    def close(_done: Future[Any]) -> None:
        with pytest.raises(LocalProtocolError) as error:
            pair[side].plane.close()
        refused.append(str(error.value))

    done: Future[Any] = (meeting.work.done, meeting.waiting.done)[side]
    done.add_done_callback(close)
    meeting.serve()
    until(lambda: bool(refused))
    assert refused == ["a callback of the plane cannot close it: close it on another thread"]
    meet(*pair).serve()


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_a_bug_of_ours_ends_every_wait_and_leaves_nothing_open(
    start_prefill: StartPrefill, start_decode: StartDecode, side: int, caplog: pytest.LogCaptureFixture
) -> None:
    pair = prefill, decode = start_prefill(**ALERT), start_decode(**ALERT)
    meeting = begun(prefill, decode, "half pushed")
    reactor: Any = pair[side].plane._reactor
    reactor.post("no event")
    broken = (meeting.work, meeting.waiting)[side]
    with pytest.raises(InternalError, match="ended by a bug"):
        broken.done.result(PATIENCE_S)
    assert not pair[side].plane.alive
    assert "ended by a bug" in caplog.text
    assert not (sends(), accepts(decode))[side], "the caller has its blocks back, nothing may touch them"
    pair[side].plane.close()
    survivor = (meeting.waiting, meeting.work)[side]
    with pytest.raises(RoomFailed):
        survivor.done.result(PATIENCE_S)


def sends() -> bool:
    """Whether a thread of this process may read source blocks."""
    return any(thread.name.startswith("push ") for thread in threading.enumerate())


def accepts(decode: DecodeSide) -> bool:
    """Whether anybody may still connect and write."""
    data = decode.plane.data
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection((data.host, data.port)):
        return True
    return False
