"""A node that closes in the middle: bounded, told to the peer, nothing left."""

from __future__ import annotations

import threading

import pytest

from pdplane.errors import ConfigError, LocalProtocolError, PdplaneError
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.toy.engine import ToyDecodeEngine, ToyPrefillEngine
from pdplane.toy.model import ToyOptions
from tests.node.conftest import Daemons, call, idle, prompt
from tests.waiting import PATIENCE_S, until

TIGHT = ToyOptions(num_lcm_blocks=4)


@pytest.mark.parametrize("arrow", ["in line", "offered", "computing", "generating"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_node_closes_with_requests_at_every_arrow(daemons: Daemons, side: str, arrow: str) -> None:
    prefill, decode = daemons.pair(TIGHT)
    if arrow in ("in line", "computing"):
        prefill.hold.clear()
    if arrow == "generating":
        decode.hold.clear()
    calls = [call(None if arrow == "offered" else prefill, decode, prompt(1, 32), at=prefill.rendezvous)]
    if arrow == "in line":
        calls += [call(prefill, decode, prompt(seed, 32)) for seed in range(2)]
    reached = {
        "in line": lambda: prefill.node.statistics()["rooms"].get("opened") == 2,
        "offered": lambda: prefill.node.statistics()["rooms"] == {"early": 1},
        "computing": lambda: prefill.node.statistics()["rooms"] == {"offered": 1},
        "generating": lambda: decode.node.statistics()["totals"] == {"ready": 1},
    }[arrow]
    until(reached, arrow)
    (prefill if side == "prefill" else decode).node.close()
    decode.hold.set()
    ended = [running.decode.done.exception(PATIENCE_S) for running in calls if running.decode is not None]
    if (side, arrow) == ("prefill", "generating"):
        assert ended == [None]
        assert calls[0].is_right(TIGHT)
    else:
        assert all(isinstance(error, PdplaneError) for error in ended)
        assert any(word in str(ended[0]) for word in ("shutting down", "draining"))
    if side == "prefill":
        until(lambda: idle(decode))
    else:
        for running in calls:
            if running.prefill is not None:
                running.prefill.cancel("the gateway saw decode's failure")
        until(lambda: idle(prefill))


def test_draining_waits_for_what_runs_and_takes_no_more(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    prefill.hold.clear()
    running = call(prefill, decode, prompt(1))
    until(lambda: prefill.node.statistics()["rooms"] == {"offered": 1})
    closing = [threading.Thread(target=side.node.close, args=(PATIENCE_S,)) for side in (prefill, decode)]
    for thread in closing:
        thread.start()
    until(lambda: not prefill.node.ready and not decode.node.ready)
    with pytest.raises(LocalProtocolError, match="takes no requests"):
        call(prefill, None, prompt(2))
    with pytest.raises(LocalProtocolError, match="takes no requests"):
        call(None, decode, prompt(2), at=prefill.rendezvous)
    prefill.hold.set()
    assert running.is_right(daemons.options)
    for thread in closing:
        thread.join()


def test_requests_that_race_with_the_close_end(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    calls = []

    def keep_calling() -> None:
        for seed in range(10_000):
            try:
                calls.append(call(prefill, decode, prompt(seed)))
            except PdplaneError:
                return

    caller = threading.Thread(target=keep_calling)
    caller.start()
    until(lambda: len(calls) > 20)
    decode.node.close()
    prefill.node.close()
    caller.join()
    for running in calls:
        for leg in (running.decode, running.prefill):
            assert leg is not None
            assert isinstance(leg.done.exception(PATIENCE_S), PdplaneError | None)


def test_closing_twice_and_before_the_start(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    for _ in range(2):
        prefill.node.close()
        decode.node.close()
    for node in (
        PrefillNode(ToyPrefillEngine(), PrefillConfig(bootstrap_port=0)),
        DecodeNode(ToyDecodeEngine(), DecodeConfig()),
    ):
        assert not node.ready
        assert not node.alive
        node.close()


def test_a_start_that_fails_leaves_nothing_open(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    data_port = decode.node._plane.data.port if decode.node._plane else 0
    with pytest.raises(ConfigError, match=str(prefill.port)):
        PrefillNode(ToyPrefillEngine(), PrefillConfig(bootstrap_port=prefill.port)).start()
    with pytest.raises(ConfigError, match=str(data_port)):
        DecodeNode(ToyDecodeEngine(), DecodeConfig(data_port=data_port)).start()
    with pytest.raises(LocalProtocolError, match="has not started"):
        DecodeNode(ToyDecodeEngine(), DecodeConfig()).statistics()


def test_the_port_is_free_at_once(daemons: Daemons) -> None:
    decode = daemons.decode()
    prefill = daemons.prefill()
    for _ in range(5):
        assert call(prefill, decode, prompt(1)).is_right(daemons.options)
        prefill.node.close()
        prefill = daemons.prefill(bootstrap_port=prefill.port)
