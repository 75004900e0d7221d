"""A client that leaves, at each arrow of the flow and in bursts: every count returns to its start."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
from collections.abc import Callable

import pytest

from pdplane.errors import ConfigError, LocalProtocolError, PoolExhausted, RoomFailed
from pdplane.ids import Endpoint, new_room
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import PrefillConfig
from pdplane.toy.engine import ToyPrefillEngine
from pdplane.toy.model import ToyOptions
from tests.node.conftest import SHORT, Call, Daemons, Prefill, call, idle, prompt
from tests.waiting import PATIENCE_S, until

TIGHT = ToyOptions(num_lcm_blocks=4)  # eight blocks of four tokens
LARGE, SMALL = 32, 4


def test_decode_leaves_during_its_look_up(daemons: Daemons) -> None:
    decode = daemons.decode(bootstrap_timeout_s=60)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        running = call(None, decode, prompt(1), at=Endpoint(*silent.getsockname()))
        assert decode.node.statistics()["blocks"]["used_blocks"] > 0
        running.cancel()
        assert running.causes() == {"the client left"}
        assert decode.node.statistics()["blocks"]["used_blocks"] == 0


def test_decode_leaves_while_it_stands_in_line(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(TIGHT)
    prefill.hold.clear()
    first = call(prefill, decode, prompt(1, LARGE))
    second, third = call(prefill, decode, prompt(2, LARGE)), call(prefill, decode, prompt(3, SMALL))
    assert decode.node.statistics()["blocks"]["waiting"] == 2
    second.cancel()
    assert second.causes() == {"the client left"}
    assert decode.node.statistics()["blocks"]["waiting"] == 1
    prefill.hold.set()
    assert first.is_right(TIGHT)
    assert third.is_right(TIGHT)
    until(lambda: idle(prefill, decode))


def test_decode_leaves_while_its_offer_waits(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    room = new_room()
    running = call(None, decode, prompt(1), at=prefill.rendezvous, room=room)
    until(lambda: prefill.node.statistics()["rooms"] == {"early": 1})
    running.cancel()
    assert running.causes() == {"the client left"}
    until(lambda: idle(prefill, decode))


@pytest.mark.parametrize("side", ["decode", "prefill"])
def test_one_leg_leaves_while_prefill_computes(daemons: Daemons, side: str) -> None:
    prefill, decode = daemons.pair()
    prefill.hold.clear()
    running = call(prefill, decode, prompt(1, 40))
    until(lambda: prefill.node.statistics()["blocks"]["used_blocks"] > 0)
    leg = running.decode if side == "decode" else running.prefill
    assert leg is not None
    leg.cancel("the client left")
    assert all("the client left" in cause for cause in running.causes())
    until(lambda: idle(prefill, decode))  # with the engine still held: a waiting job ends at once
    prefill.hold.set()
    assert call(prefill, decode, prompt(2)).is_right(daemons.options)


def test_decode_leaves_while_it_generates(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    decode.hold.clear()
    running = call(prefill, decode, prompt(1), max_tokens=1000)
    assert running.prefill is not None
    running.prefill.done.result(PATIENCE_S)
    until(lambda: decode.node.statistics()["totals"] == {"ready": 1})
    assert running.decode is not None
    running.decode.cancel("the client left")
    with pytest.raises(RoomFailed, match="the client left"):
        running.decode.done.result(PATIENCE_S)
    until(lambda: idle(prefill, decode))


def test_decode_leaves_while_prefill_stands_in_line(daemons: Daemons) -> None:
    prefill, decode = daemons.prefill(TIGHT), daemons.decode()
    prefill.hold.clear()
    first, second = call(prefill, decode, prompt(1, LARGE)), call(prefill, decode, prompt(2, LARGE))
    until(lambda: prefill.node.statistics()["blocks"]["waiting"] == 1)
    assert second.decode is not None
    second.decode.cancel("the client left")
    assert all("the client left" in cause for cause in second.causes())
    until(lambda: prefill.node.statistics()["blocks"]["waiting"] == 0)
    prefill.hold.set()
    assert first.is_right(daemons.options)
    until(lambda: idle(prefill, decode))


def test_a_leg_that_ends_while_other_ranks_have_no_offer_takes_no_place_in_line(daemons: Daemons) -> None:
    engine_holds = threading.Event()
    go_on: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    node = PrefillNode(
        ToyPrefillEngine(TIGHT, hold=engine_holds),
        PrefillConfig(**SHORT | {"bootstrap_port": 0}),
        gate=lambda _room, told: go_on.put(told),
    )
    daemons.stack.callback(node.close)
    node.start()
    until(lambda: node.ready)
    parents = node.statistics()["blocks"]["free_parents"]
    prefill, decode = Prefill(node, engine_holds, parents, node.info()["bootstrap_port"]), daemons.decode()
    first = call(prefill, decode, prompt(1, LARGE))
    go_on.get(timeout=PATIENCE_S)()  # it has the blocks
    second = call(prefill, decode, prompt(2, LARGE))
    late = go_on.get(timeout=PATIENCE_S)
    second.cancel()
    second.causes()
    late()
    assert node.statistics()["blocks"]["waiting"] == 0
    engine_holds.set()
    assert first.is_right(daemons.options)
    until(lambda: idle(prefill, decode))


def test_prefill_leaves_before_decode_came(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(tombstone_s=60)  # however late decode comes, it is remembered
    room = new_room()
    call(prefill, None, prompt(1), room=room).cancel()
    late = call(None, decode, prompt(1), at=prefill.rendezvous, room=room)
    assert late.causes() == {"prefill: the client left"}
    until(lambda: idle(prefill, decode, but="tombstones"))


@pytest.mark.parametrize("first", ["decode", "prefill"])
def test_decode_hears_why_prefill_refuses_its_prompt(daemons: Daemons, first: str) -> None:
    prefill, decode, room = daemons.prefill(TIGHT), daemons.decode(), new_room()
    refused = pytest.raises(ConfigError, match="do not fit in the arena")
    if first == "prefill":
        with refused:
            call(prefill, None, prompt(1, 50), room=room)
    waiting = call(None, decode, prompt(1, 50), at=prefill.rendezvous, room=room)
    if first == "decode":
        until(lambda: prefill.node.statistics()["rooms"] == {"early": 1})
        with refused:
            call(prefill, None, prompt(1, 50), room=room)
    assert waiting.causes() == {"prefill: the prompt's 50 tokens do not fit in the arena"}
    until(lambda: idle(prefill, decode))


@pytest.mark.parametrize("first", ["decode", "prefill"])
@pytest.mark.parametrize("why", ["too long", "line full", "left the line", "draining"])
def test_prefill_hears_why_decode_takes_no_part(daemons: Daemons, why: str, first: str) -> None:
    """Its leg would else wait for an offer until its own deadline, here far away."""
    prefill = daemons.prefill(bootstrap_timeout_s=300, tombstone_s=60)
    decode = daemons.decode(TIGHT, bootstrap_timeout_s=60)
    prefill.hold.clear()
    busy = call(prefill, decode, prompt(2, LARGE))
    crowd = [call(None, decode, prompt(3, SMALL), at=prefill.rendezvous) for _ in range(256 * (why == "line full"))]
    tokens, room, legs = prompt(4, LARGE + (why == "too long")), new_room(), list[Call]()

    def ask_prefill() -> None:
        legs.append(call(prefill, None, tokens, room=room))

    def ask_decode() -> None:
        if why == "draining":
            decode.node.drain()
        with contextlib.suppress(ConfigError, PoolExhausted, LocalProtocolError):
            waiting = call(None, decode, tokens, room=room, at=prefill.rendezvous)
            if why == "left the line":
                waiting.cancel()
            assert waiting.decode is not None
            assert waiting.decode.done.exception(PATIENCE_S) is not None

    for ask in (ask_prefill, ask_decode) if first == "prefill" else (ask_decode, ask_prefill):
        ask()
    (cause,) = legs[0].causes()
    assert cause.startswith("cancelled by decode: ")
    for waiting in crowd:
        waiting.cancel()
    prefill.hold.set()
    assert busy.is_right(TIGHT)
    until(lambda: idle(prefill, decode, but="tombstones"))


def test_a_leg_whose_other_half_never_comes_holds_no_blocks_and_expires(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(bootstrap_timeout_s=1)
    alone = call(prefill, None, prompt(1))
    waiting = call(None, decode, prompt(2), at=prefill.rendezvous)
    until(lambda: len(prefill.node.statistics()["rooms"]) == 2)
    assert prefill.node.statistics()["blocks"]["used_blocks"] == 0
    assert "no decode rank offered" in alone.causes().pop()
    assert "no request came" in waiting.causes().pop()
    until(lambda: idle(prefill, decode))


def test_cancelling_after_the_end_is_harmless(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    running = call(prefill, decode, prompt(1))
    assert running.is_right(daemons.options)
    running.cancel()
    running.cancel()
    assert call(prefill, decode, prompt(2)).is_right(daemons.options)


def test_bursts_of_cancels_leave_nothing_behind(daemons: Daemons) -> None:
    options = ToyOptions(num_lcm_blocks=40)
    prefill, decode = daemons.pair(options, bootstrap_timeout_s=1, waiting_timeout_s=60)
    threads = threading.active_count()
    source = random.Random(2)
    for _burst in range(2):
        calls = [call(prefill, decode, prompt(seed), max_tokens=50) for seed in range(100)]
        calls[0].finish()
        source.shuffle(calls)
        for number, running in enumerate(calls):
            leg = (running.decode, running.prefill)[number % 2]
            assert leg is not None
            if number % 3:
                leg.cancel("the client left")
            else:
                running.cancel()
        for running in calls:
            for done in (running.decode, running.prefill):
                assert done is not None
                # Who stands in line for too long is told so.
                assert isinstance(done.done.exception(PATIENCE_S), RoomFailed | PoolExhausted | None)
    assert call(prefill, decode, prompt(1)).is_right(options)
    until(lambda: idle(prefill, decode), "every count's start value")
    assert threading.active_count() <= threads + 2  # the data connection's two ends


# ---- blocks that are wanted by too many


def test_opposite_orders_on_the_two_sides_do_not_lock_up(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(TIGHT)
    for seed in range(20):
        rooms = [new_room(), new_room()]
        tokens = [prompt(2 * seed, LARGE), prompt(2 * seed + 1, LARGE)]
        work = [call(prefill, None, tokens[n], room=rooms[n]) for n in (0, 1)]
        waiting = [call(None, decode, tokens[n], room=rooms[n], at=prefill.rendezvous) for n in (1, 0)]
        for running in (*waiting, *work):
            for leg in (running.decode, running.prefill):
                if leg is not None:
                    leg.done.result(PATIENCE_S)
        assert all(running.is_right(TIGHT) for running in waiting)


def test_a_prompt_of_the_whole_pool_is_served_among_small_ones(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(TIGHT)
    for side in ({"prefill": prefill, "decode": None}, {"prefill": None, "decode": decode}):
        with pytest.raises(ConfigError):
            call(**side, tokens=prompt(1, LARGE + 1), at=prefill.rendezvous)
    calls = [call(prefill, decode, prompt(seed, LARGE if seed % 5 == 2 else SMALL)) for seed in range(30)]
    assert all(running.is_right(TIGHT) for running in calls)
    until(lambda: idle(prefill, decode))


def test_who_stands_in_line_outlives_the_wait_for_a_silent_half(daemons: Daemons) -> None:
    """Both halves are there, so neither fails by the time that one alone would have."""
    prefill, decode = daemons.pair(TIGHT, bootstrap_timeout_s=1, waiting_timeout_s=60)
    prefill.hold.clear()
    calls = [call(prefill, decode, prompt(seed, LARGE)) for seed in range(5)]
    until(lambda: decode.node.statistics()["rooms"] == {"waiting": 1, "queued": 4})
    assert "no decode rank offered" in call(prefill, None, prompt(9)).causes().pop()
    prefill.hold.set()
    assert all(running.is_right(TIGHT) for running in calls)
    until(lambda: idle(prefill, decode))


def test_who_stands_in_line_for_a_prefill_that_dies_ends_with_it(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(TIGHT)
    prefill.hold.clear()
    calls = [call(prefill, decode, prompt(seed, LARGE)) for seed in range(3)]
    until(lambda: decode.node.statistics()["rooms"] == {"waiting": 1, "queued": 2})
    prefill.node.close()
    assert all("shutting down" in cause for running in calls for cause in running.causes())
    until(lambda: idle(decode))


def test_a_prefill_that_drains_lets_its_rooms_go_on_and_refuses_others_at_once(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(TIGHT, bootstrap_timeout_s=60, waiting_timeout_s=60)
    prefill.hold.clear()
    begun = [call(prefill, decode, prompt(seed, LARGE)) for seed in range(2)]
    until(lambda: decode.node.statistics()["rooms"] == {"waiting": 1, "queued": 1})
    early = call(None, decode, prompt(3, SMALL), at=prefill.rendezvous)
    until(lambda: prefill.node.statistics()["rooms"].get("early") == 1)
    prefill.node.drain()
    assert early.causes() == {"prefill: prefill is draining"}
    assert call(None, decode, prompt(4, SMALL), at=prefill.rendezvous).causes() == {"prefill is draining"}
    with pytest.raises(LocalProtocolError, match="takes no requests"):
        call(prefill, None, prompt(5, SMALL))
    prefill.hold.set()
    assert all(running.is_right(TIGHT) for running in begun)


def test_a_line_that_is_full_takes_no_more(daemons: Daemons) -> None:
    prefill, decode = daemons.pair(TIGHT)
    prefill.hold.clear()
    first = call(prefill, decode, prompt(1, LARGE))
    waiting = [call(None, decode, prompt(2, SMALL), at=prefill.rendezvous) for _ in range(256)]
    with pytest.raises(PoolExhausted):
        call(None, decode, prompt(2, SMALL), at=prefill.rendezvous)
    for running in waiting:
        running.cancel()
    prefill.hold.set()
    assert first.is_right(TIGHT)
    until(lambda: idle(prefill, decode))
