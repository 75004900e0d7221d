"""A bug of ours in one step of a request ends that request, with its blocks back, and no other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

import pytest

from pdplane.errors import InternalError
from pdplane.ids import new_room
from pdplane.node.prefill import PrefillLeg
from pdplane.plane.rooms import DecodeRoom
from tests.node.conftest import PATIENCE_S, Daemons, call, idle, prompt
from tests.waiting import until


def _break_once(owner: object, name: str) -> None:
    """Make the next call of a method raise what nobody expects there."""
    whole: Callable[..., object] = getattr(owner, name)

    def broken(*_args: object, **_named: object) -> Never:
        setattr(owner, name, whole)
        raise ZeroDivisionError("planted")

    setattr(owner, name, broken)


def test_a_bug_in_prefill_ends_both_legs(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    assert call(prefill, decode, prompt(1)).is_right(daemons.options)
    _break_once(prefill.node._engine, "prefill")
    broken = call(prefill, decode, prompt(2))
    assert isinstance(broken.prefill, PrefillLeg)
    with pytest.raises(InternalError, match="planted"):
        broken.prefill.done.result(PATIENCE_S)
    assert broken.decode is not None
    assert "planted" in str(broken.decode.done.exception(PATIENCE_S))
    assert call(prefill, decode, prompt(3)).is_right(daemons.options)
    until(lambda: idle(prefill, decode), "every count's start value")


def test_a_bug_while_the_room_is_live_cancels_it(daemons: Daemons) -> None:
    prefill, decode = daemons.pair()
    prefill.hold.clear()  # so that it has not ended before
    plane, room_number = decode.node._plane, new_room()
    assert plane is not None
    open_room = plane.open
    waiting = call(prefill, None, prompt(1), room=room_number)

    def opened(*args: Any, **named: Any) -> DecodeRoom:  # noqa: ANN401  (whatever the node says)
        room = open_room(*args, **named)
        until(lambda: prefill.node.statistics()["blocks"]["used_blocks"] > 0, "the offer")
        _break_once(room.done, "add_done_callback")
        return room

    plane.open = opened  # type: ignore[method-assign]
    broken = call(None, decode, prompt(1), room=room_number, at=prefill.rendezvous)
    assert broken.decode is not None
    with pytest.raises(InternalError, match="planted"):
        broken.decode.done.result(PATIENCE_S)
    assert "planted" in waiting.causes().pop()
    until(lambda: idle(prefill, decode), "every count's start value")


@pytest.mark.parametrize("method", ["assemble", "decode"])
def test_a_bug_in_decode_ends_its_leg(daemons: Daemons, method: str) -> None:
    prefill, decode = daemons.pair()
    assert call(prefill, decode, prompt(1)).is_right(daemons.options)
    _break_once(decode.engine, method)
    broken = call(prefill, decode, prompt(2))
    assert broken.decode is not None
    with pytest.raises(InternalError, match="planted"):
        broken.decode.done.result(PATIENCE_S)
    broken.cancel()
    assert call(prefill, decode, prompt(3)).is_right(daemons.options)
    until(lambda: idle(prefill, decode), "every count's start value")
