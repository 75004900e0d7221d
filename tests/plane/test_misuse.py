"""What an embedder can do wrong: an error of its own that says so, and no harm to what runs."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest

from pdplane.errors import ConfigError, LocalProtocolError, PdplaneError, RoomFailed, WaitTimeout
from pdplane.ids import Endpoint
from pdplane.kv.arena import Pool
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.plane.rooms import EventsLost
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import DecodeSide, Meeting, PrefillSide, meet
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S, until

Plane = DecodePlane | PrefillPlane
LAYOUT = two_group_layout(num_lcm_blocks=16)


@pytest.fixture
def pair(start_prefill: StartPrefill, start_decode: StartDecode) -> tuple[PrefillSide, DecodeSide]:
    return start_prefill(), start_decode()


def make(role: str, arena: Any = None, **config: object) -> Plane:  # noqa: ANN401  (wrong ones are tried too)
    arena = np.zeros(LAYOUT.arena_bytes, np.uint8) if arena is None else arena
    if role == "decode":
        return DecodePlane(attrs.evolve(DecodeConfig(), **config), layout=LAYOUT, arena=arena)
    return PrefillPlane(attrs.evolve(PrefillConfig(bootstrap_port=0), **config), layout=LAYOUT, arena=arena)


roles = pytest.mark.parametrize("role", ["decode", "prefill"])


def test_a_wait_that_times_out_ends_nothing_and_no_other_room_gets_its_blocks(
    pair: tuple[PrefillSide, DecodeSide],
) -> None:
    prefill, decode = pair

    def wait_and_clean_up(meeting: Meeting, timeout_s: float) -> None:
        """As an embedder writes it: a failed room's blocks go back."""
        try:
            meeting.waiting.wait(timeout_s)
        except RoomFailed:
            meeting.give_back()

    first = meet(prefill, decode)
    with pytest.raises(WaitTimeout, match=f"room {first.work.room}: the cache did not come within 0.01 s"):
        wait_and_clean_up(first, 0.01)
    assert not first.waiting.done.done()
    assert not first.waiting.released.done()
    second = meet(prefill, decode)
    assert not {*second.target["kv"]} & {*first.target["kv"]}
    second.serve(seed=1)
    first.serve(seed=2)


def test_the_wait_for_an_offer_times_out_in_the_same_way(start_prefill: StartPrefill) -> None:
    work = start_prefill().plane.open(7)
    with pytest.raises(WaitTimeout, match=r"room 7: decode's offer did not come within 0.01 s; the room is still live"):
        work.wait_window(0.01)
    assert not work.window.done()


def test_a_timeout_is_caught_as_any_other() -> None:
    assert issubclass(WaitTimeout, TimeoutError)
    assert issubclass(WaitTimeout, PdplaneError)
    assert not issubclass(WaitTimeout, RoomFailed)


@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
def test_a_second_start_is_refused_and_harms_nothing(pair: tuple[PrefillSide, DecodeSide], side: int) -> None:
    plane = pair[side].plane
    meeting = meet(*pair)
    for again in (plane.start, plane.__enter__):
        with pytest.raises(LocalProtocolError, match="was started before"):
            again()
    assert plane.alive
    meeting.serve()
    plane.close()
    with pytest.raises(LocalProtocolError, match="was started before"):
        plane.start()
    assert not plane.alive


@roles
def test_a_plane_that_does_not_run_says_so(role: str) -> None:
    plane = make(role)
    plane.close()  # nothing to close yet
    for word in ("has not started", "is closed"):
        asks: list[Callable[[], object]] = [plane.statistics]
        asks.append((lambda: plane.open(1)) if isinstance(plane, PrefillPlane) else (lambda: _open(plane)))
        for ask in asks:
            with pytest.raises(LocalProtocolError, match=f"the {role} plane {word}"):
                ask()
        if word == "has not started":
            with plane:
                assert plane.alive


def _open(plane: Plane) -> object:
    assert isinstance(plane, DecodePlane)
    _, manifest = DecodeSide(plane, _pool()).lend(10)
    return plane.open(1, prefill="127.0.0.1:1", manifest=manifest)


def _pool() -> Pool:
    return Pool(LAYOUT)


@roles
def test_a_start_that_fails_leaves_nothing_open(role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        plane = make(role, **({"data_port": port} if role == "decode" else {"bootstrap_port": port}))
        with pytest.raises(ConfigError, match=str(port)):
            plane.start()
    assert not plane.alive


def test_poll_without_record_events_says_so(pair: tuple[PrefillSide, DecodeSide]) -> None:
    for side in pair:
        with pytest.raises(LocalProtocolError, match="record_events=True"):
            side.plane.poll()


def test_events_that_nobody_takes_are_bounded_and_the_loss_is_told(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(record_events=True, max_rooms=1), start_decode()
    rooms = 5
    for seed in range(rooms):
        meet(prefill, decode).serve(seed)
    found = prefill.plane.poll()
    assert found[0] == EventsLost(3 * rooms - 8)  # a good room's three events, eight are kept
    assert len(found) == 9
    assert prefill.plane.poll() == []


@roles
def test_more_rooms_than_max_rooms_fail_and_the_others_do_not(
    start_prefill: StartPrefill, start_decode: StartDecode, role: str
) -> None:
    bound = {"max_rooms": 1}
    prefill = start_prefill(**(bound if role == "prefill" else {}))
    decode = start_decode(**(bound if role == "decode" else {}))
    first, second = meet(prefill, decode), meet(prefill, decode)
    done = second.work.done if role == "prefill" else second.waiting.done
    with pytest.raises(RoomFailed, match="too many live rooms"):
        done.result(PATIENCE_S)
    first.serve()
    with pytest.raises(ConfigError, match="max_rooms"):
        make(role, max_rooms=0)


def test_an_address_may_be_written_as_text(pair: tuple[PrefillSide, DecodeSide]) -> None:
    prefill, decode = pair
    target, manifest = decode.lend(10)
    waiting = decode.plane.open(3, prefill=str(prefill.rendezvous), manifest=manifest)
    work = prefill.plane.open(3)
    Meeting(prefill, decode, work, waiting, target, 10).serve()
    assert PrefillConfig(rendezvous="[::1]:8998").rendezvous == Endpoint("::1", 8998)


@pytest.mark.parametrize("address", ["127.0.0.1", "host:port", "", 8998, ("127.0.0.1", 8998), None])
def test_what_is_no_address_is_refused_by_name(pair: tuple[PrefillSide, DecodeSide], address: Any) -> None:  # noqa: ANN401
    _, decode = pair
    _, manifest = decode.lend(10)
    with pytest.raises(ConfigError, match=r"prefill is .*: give an Endpoint or 'host:port'"):
        decode.plane.open(3, prefill=address, manifest=manifest)
    if address is not None:
        with pytest.raises(ConfigError, match="rendezvous is "):
            PrefillConfig(rendezvous=address)


@roles
def test_an_arena_that_is_none_is_refused_before_anything_starts(role: str) -> None:
    for wrong, text in ((np.zeros(10, np.uint8), "the layout needs"), (7, "needs a buffer"), (b"x", "read-only")):
        with pytest.raises(ConfigError, match=text):
            make(role, wrong)


def test_numpy_arrays_of_any_dtype_are_arenas(opened: contextlib.ExitStack) -> None:
    memory = [np.zeros(LAYOUT.arena_bytes // 4, np.float32) for _ in range(2)]
    prefill = PrefillPlane(PrefillConfig(bootstrap_port=0), layout=LAYOUT, arena=memory[0])
    decode = DecodePlane(DecodeConfig(), layout=LAYOUT, arena=memory[1])
    for plane in (prefill, decode):
        opened.enter_context(plane)
    until(lambda: prefill.ready, "prefill's readiness")
    meet(PrefillSide(prefill, _pool()), DecodeSide(decode, _pool())).serve()
    assert memory[1].view(np.uint8).any()
