"""SIGKILL of either daemon at each arrow of the flow: the other one names it, frees its blocks, and serves on."""

from __future__ import annotations

import attrs
import pytest

from pdplane.ids import new_room
from tests.node.conftest import Daemons, Decode, Prefill, call, idle, prompt
from tests.node.victim import LENGTH, Victim
from tests.waiting import ALERT, until

SEED = 5


def rooms(side: Prefill | Decode) -> dict[str, int]:
    found: dict[str, int] = side.node.statistics()["rooms"]
    return found


@pytest.mark.parametrize("arrow", ["offered", "computing", "generating"])
def test_prefill_is_killed(daemons: Daemons, arrow: str) -> None:
    decode = daemons.decode(**ALERT)
    with Victim("prefill") as victim:
        room = new_room()
        running = call(None, decode, prompt(SEED, LENGTH), at=victim.rendezvous, room=room)
        if arrow == "offered":
            until(lambda: rooms(decode) == {"waiting": 1})
        elif arrow == "computing":
            victim.say("hold")
            victim.say("prefill", room, SEED)
            victim.hear("windowed")
        else:
            decode.hold.clear()
            victim.say("prefill", room, SEED)
            assert victim.hear("ended") == ["well"]
            until(lambda: decode.node.statistics()["totals"] == {"ready": 1})
        victim.kill()
        if arrow == "generating":  # decode needs it no more
            decode.hold.set()
            assert running.is_right(daemons.options)
        else:
            (cause,) = running.causes()
            assert "prefill" in cause
        until(lambda: idle(decode), "decode's start values")
        again = daemons.prefill(bootstrap_port=victim.port, **ALERT)
        assert call(again, decode, prompt(SEED)).is_right(daemons.options)


@pytest.mark.parametrize("arrow", ["offered", "computing", "generating"])
def test_decode_is_killed(daemons: Daemons, arrow: str) -> None:
    prefill = daemons.prefill(**ALERT)
    with Victim("decode") as victim:
        room = new_room()
        prefill.hold.clear()
        if arrow == "generating":
            victim.say("hold")
            prefill.hold.set()
        victim.say("decode", room, SEED, prefill.port)
        until(lambda: bool(rooms(prefill)) or arrow == "generating")
        running = None if arrow == "offered" else call(prefill, None, prompt(SEED, LENGTH), room=room)
        if arrow == "computing":
            until(lambda: rooms(prefill) == {"offered": 1})
        elif running is not None:
            assert running.prefill is not None
            running.prefill.done.result(10)
        victim.kill()
        if arrow == "computing":
            assert running is not None
            (cause,) = running.causes()
            assert "lost" in cause
        prefill.hold.set()
        until(lambda: idle(prefill), "prefill's start values")
        again = daemons.decode(data_port=victim.port, **ALERT)
        assert call(prefill, again, prompt(SEED)).is_right(daemons.options)
        until(lambda: prefill.node.statistics()["sessions"]["sessions"] == 1)


@pytest.mark.parametrize("arrow", ["offered", "computing"])
def test_prefill_is_stopped_and_goes_on(daemons: Daemons, arrow: str) -> None:
    decode = daemons.decode(**ALERT)
    with Victim("prefill") as victim:
        room = new_room()
        running = call(None, decode, prompt(SEED, LENGTH), at=victim.rendezvous, room=room)
        if arrow == "offered":
            until(lambda: rooms(decode) == {"waiting": 1})
        else:
            victim.say("hold")
            victim.say("prefill", room, SEED)
            victim.hear("windowed")
        victim.stop()
        (cause,) = running.causes()
        assert "prefill" in cause
        until(lambda: idle(decode), "decode's start values")
        victim.go_on()  # and what it still pushes into the blocks that it was lent lands nowhere
        if arrow == "computing":
            victim.say("go")
            assert victim.hear("ended") != ["well"]
        room = new_room()
        again = call(None, decode, prompt(SEED + 1, LENGTH), at=victim.rendezvous, room=room)
        victim.say("prefill", room, SEED + 1)
        assert again.is_right(daemons.options)


@pytest.mark.parametrize("arrow", ["offered", "computing"])
def test_decode_is_stopped_and_goes_on(daemons: Daemons, arrow: str) -> None:
    prefill = daemons.prefill(**ALERT)
    with Victim("decode") as victim:
        room = new_room()
        prefill.hold.clear()
        victim.say("decode", room, SEED, prefill.port)
        until(lambda: bool(rooms(prefill)))
        running = call(prefill, None, prompt(SEED, LENGTH), room=room) if arrow == "computing" else None
        if running is not None:
            until(lambda: rooms(prefill) == {"offered": 1})
        victim.stop()
        if running is not None:
            (cause,) = running.causes()
            assert "decode" in cause
        prefill.hold.set()
        until(lambda: idle(prefill), "prefill's start values")
        victim.go_on()
        assert victim.hear("ended") != ["well"]
        room = new_room()
        victim.say("decode", room, SEED + 1, prefill.port)
        again = call(prefill, None, prompt(SEED + 1, LENGTH), room=room)
        assert again.prefill is not None
        again.prefill.done.result(10)
        assert victim.hear("ended") == ["well"]


def test_decode_is_killed_while_bytes_are_on_their_way(daemons: Daemons) -> None:
    prefill = daemons.prefill(**ALERT)
    with Victim("decode") as victim:
        room = new_room()
        prefill.hold.clear()
        victim.say("decode", room, SEED, prefill.port)
        running = call(prefill, None, prompt(SEED, LENGTH), room=room)
        until(lambda: rooms(prefill) == {"offered": 1})
        victim.kill()
        prefill.hold.set()  # it pushes to a connection that the kernel has reset
        (cause,) = running.causes()
        assert "push" in cause or "lost" in cause
        until(lambda: idle(prefill), "prefill's start values")


@pytest.mark.parametrize("blocks", [64, 20], ids=["the same size", "another block count"])
def test_prefill_comes_back_at_once_behind_its_port(daemons: Daemons, blocks: int) -> None:
    decode = daemons.decode(**ALERT)
    first = daemons.prefill(**ALERT)
    assert call(first, decode, prompt(1)).is_right(daemons.options)
    first.node.close()
    options = attrs.evolve(daemons.options, num_lcm_blocks=blocks)
    second = daemons.prefill(options, bootstrap_port=first.port, **ALERT)
    for seed in range(5):
        assert call(second, decode, prompt(seed)).is_right(daemons.options)


def test_a_killed_prefill_that_comes_back_serves_the_first_request(daemons: Daemons) -> None:
    decode = daemons.decode(**ALERT)
    with Victim("prefill") as victim:
        room = new_room()
        running = call(None, decode, prompt(SEED, LENGTH), at=victim.rendezvous, room=room)
        victim.say("prefill", room, SEED)
        assert running.is_right(daemons.options)
        victim.kill()
        again = daemons.prefill(bootstrap_port=victim.port, **ALERT)
        for seed in range(5):
            assert call(again, decode, prompt(seed)).is_right(daemons.options)
        assert decode.node.statistics()["sessions"] == {"peers": 1, "sessions": 1}
