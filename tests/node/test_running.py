"""How many sequences run at once, and how much memory their caches may take: the others wait with their blocks."""

from __future__ import annotations

import attrs
import pytest

from pdplane.errors import Cause, ConfigError, RoomFailed
from pdplane.ids import new_room
from pdplane.toy.engine import ToyDecodeEngine
from pdplane.toy.model import ToyOptions
from tests.node.conftest import Call, Daemons, Decode, Prefill, call, idle, prompt
from tests.waiting import PATIENCE_S, until

LENGTH, TOKENS = 10, 5
CACHE = ToyDecodeEngine(ToyOptions()).cache_nbytes(LENGTH + TOKENS)
TWO = ToyOptions(concurrency=2)


def counts(decode: Decode) -> dict[str, int]:
    found: dict[str, int] = decode.node.statistics()["running"]
    return found


def crowd(
    daemons: Daemons, options: ToyOptions = TWO, cache_bytes: int | None = None, waiting_timeout_s: float = 60
) -> tuple[Prefill, Decode, list[Call]]:
    """Four calls of which two may run; no token but their first ones comes yet."""
    prefill, decode = daemons.prefill(), daemons.decode(options, cache_bytes, waiting_timeout_s=waiting_timeout_s)
    decode.hold.clear()
    calls = [call(prefill, decode, prompt(seed, LENGTH), max_tokens=TOKENS) for seed in range(4)]
    until(lambda: counts(decode) == {"sequences": 2, "bytes": 2 * CACHE, "waiting": 2})
    return prefill, decode, calls


@pytest.mark.parametrize(
    ("options", "cache_bytes"), [(TWO, None), (ToyOptions(), 2 * CACHE + 1)], ids=["by count", "by bytes"]
)
def test_the_excess_waits_with_its_blocks_and_runs_in_the_end(
    daemons: Daemons, options: ToyOptions, cache_bytes: int | None
) -> None:
    prefill, decode, calls = crowd(daemons, options, cache_bytes)
    assert decode.node.statistics()["blocks"]["used_blocks"] >= 2 * (LENGTH // options.block_tokens)
    decode.hold.set()
    assert all(running.is_right(options) for running in calls)
    until(lambda: idle(prefill, decode))
    assert counts(decode) == {"sequences": 0, "bytes": 0, "waiting": 0}


def test_who_leaves_while_it_waits_takes_no_place(daemons: Daemons) -> None:
    prefill, decode, calls = crowd(daemons)
    for running in calls[2:]:
        running.cancel()
    until(lambda: counts(decode)["waiting"] == 0)
    decode.hold.set()
    ended = [running.decode.done.exception(PATIENCE_S) for running in calls if running.decode is not None]
    assert ended.count(None) == 2
    until(lambda: idle(prefill, decode))
    assert call(prefill, decode, prompt(9)).is_right(daemons.options)


def test_who_waits_too_long_is_told(daemons: Daemons) -> None:
    prefill, decode, calls = crowd(daemons, waiting_timeout_s=2)
    ended = [
        running.decode.done.exception(PATIENCE_S)
        for running in calls
        if running.decode is not None and running.decode.seat is None
    ]
    assert len(ended) == 2
    for error in ended:
        assert isinstance(error, RoomFailed)
        assert error.cause is Cause.FULL
        assert "no other sequence ended in 2 s" in error.text
    decode.hold.set()
    until(lambda: idle(prefill, decode))


def test_a_sequence_that_could_never_run_is_refused_on_both_sides(daemons: Daemons) -> None:
    prefill, decode = daemons.prefill(bootstrap_timeout_s=60), daemons.decode(cache_bytes=CACHE)
    room = new_room()
    waiting = call(prefill, None, prompt(1, LENGTH), room=room)
    with pytest.raises(ConfigError, match=f"may need {CACHE + 96} bytes of cache, more than the {CACHE}"):
        call(None, decode, prompt(1, LENGTH), at=prefill.rendezvous, room=room, max_tokens=TOKENS + 1)
    assert "ask for fewer tokens" in waiting.causes().pop()
    assert call(prefill, decode, prompt(1, LENGTH), max_tokens=TOKENS).is_right(daemons.options)


def test_one_token_needs_no_place(daemons: Daemons) -> None:
    prefill, decode = daemons.prefill(), daemons.decode(cache_bytes=1)
    assert call(prefill, decode, prompt(7), max_tokens=1).is_right(daemons.options)


def test_the_limits_are_published(daemons: Daemons) -> None:
    info = daemons.decode(attrs.evolve(daemons.options, concurrency=3), 1 << 20).node.info()
    assert (info["max_running_requests"], info["decode_cache_bytes"]) == (3, 1 << 20)
    assert daemons.decode().node.info()["decode_cache_bytes"] > 1 << 20
