"""Rank 0 and the others of a split node: requests are passed on, failures and cancels reach every rank, order holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import attrs
import pytest

from pdplane.api import DecodeRequest, Finished, FirstToken, PrefillRequest
from pdplane.errors import LocalProtocolError, PdplaneError, RoomFailed
from pdplane.ids import Endpoint, Room, new_room
from pdplane.node.ranks import SharedLeg
from pdplane.toy.model import ToyOptions, toy_answer
from tests.node.conftest import prompt
from tests.node.rank_nodes import Split, split_decode, split_prefill
from tests.waiting import PATIENCE_S, until

OPTIONS = ToyOptions(heads=4)
COUNT = 5


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


def options(size: int, **changes: int) -> list[ToyOptions]:
    return [attrs.evolve(OPTIONS, tp_size=size, tp_rank=rank, **changes) for rank in range(size)]


@attrs.define
class Request:
    """One room at both sides' rank 0."""

    tokens: tuple[int, ...]
    work: SharedLeg[FirstToken]
    waiting: SharedLeg[Finished]
    got: list[int]

    def check(self) -> None:
        self.waiting.done.result(PATIENCE_S)
        self.work.done.result(PATIENCE_S)
        assert self.got == [token for token, _ in toy_answer(OPTIONS, self.tokens, COUNT)]


def send(prefill: Split, decode: Split, tokens: tuple[int, ...], room: int | None = None) -> Request:
    number, got = Room(new_room() if room is None else room), list[int]()
    request = DecodeRequest(number, tokens, prefill.rendezvous, COUNT)
    waiting = decode.lead.decode(request, lambda token: got.append(token.id))
    return Request(tokens, prefill.lead.prefill(PrefillRequest(number, tokens)), waiting, got)


def all_idle(*sides: Split) -> None:
    until(lambda: all(side.idle for side in sides), "every count's start value")
    assert not any(side.lost for side in sides)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_a_request_to_rank_0_is_served_by_all(stack: contextlib.ExitStack, prefill_tp: int, decode_tp: int) -> None:
    prefill, decode = split_prefill(stack, options(prefill_tp)), split_decode(stack, options(decode_tp))
    for request in [send(prefill, decode, prompt(seed)) for seed in range(12)]:
        request.check()
    all_idle(prefill, decode)


def test_rooms_in_line_do_not_wait_for_each_others_ranks(stack: contextlib.ExitStack) -> None:
    tight = options(2, num_lcm_blocks=4)  # room for one prompt or two
    prefill, decode = split_prefill(stack, tight), split_decode(stack, tight)
    requests = [send(prefill, decode, prompt(seed, 9 + seed % 20)) for seed in range(24)]
    for request in requests:
        request.check()
    all_idle(prefill, decode)


def test_a_rank_that_cannot_serve_fails_the_request_on_all(stack: contextlib.ExitStack) -> None:
    small = options(2)
    small[1] = attrs.evolve(small[1], num_lcm_blocks=2)
    prefill, decode = split_prefill(stack, options(2)), split_decode(stack, small)
    send(prefill, decode, prompt(2, 8)).check()
    request = send(prefill, decode, prompt(1, 40))
    with pytest.raises(RoomFailed, match="arena"):
        request.waiting.done.result(PATIENCE_S)
    with pytest.raises(RoomFailed):
        request.work.done.result(PATIENCE_S)
    all_idle(prefill, decode)
    send(prefill, decode, prompt(2, 8)).check()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("held", [0, 1])
def test_a_cancel_reaches_every_rank(stack: contextlib.ExitStack, side: str, held: int) -> None:
    prefill, decode = split_prefill(stack, options(2)), split_decode(stack, options(2))
    send(prefill, decode, prompt(2)).check()  # they have met, so that every word arrives at once
    where = {"prefill": prefill, "decode": decode}[side]
    where.holds[held].clear()  # one rank is behind the other
    request = send(prefill, decode, prompt(3, 50))
    leg = {"prefill": request.work, "decode": request.waiting}[side]
    leg.cancel("the client left")
    with pytest.raises(RoomFailed, match="the client left"):
        leg.done.result(PATIENCE_S)
    where.holds[held].set()
    with contextlib.suppress(PdplaneError):
        (request.waiting if side == "prefill" else request.work).done.result(PATIENCE_S)
    all_idle(prefill, decode)
    send(prefill, decode, prompt(4)).check()


def test_a_room_is_used_again_once_every_rank_is_done_with_it(stack: contextlib.ExitStack) -> None:
    prefill, decode = split_prefill(stack, options(2)), split_decode(stack, options(2))
    decode.holds[1].clear()
    first = send(prefill, decode, prompt(5), room=77)
    until(lambda: len(first.got) == COUNT, "rank 0's answer")
    assert not first.waiting.done.done()
    with pytest.raises(LocalProtocolError, match="room 77 is live"):
        decode.lead.decode(DecodeRequest(Room(77), prompt(6), prefill.rendezvous, COUNT), lambda _token: None)
    decode.holds[1].set()
    first.check()
    for seed in range(7, 12):
        send(prefill, decode, prompt(seed), room=77).check()
    all_idle(prefill, decode)


def test_a_rank_that_goes_ends_rank_0_and_what_it_runs(stack: contextlib.ExitStack) -> None:
    prefill, decode = split_prefill(stack, options(1)), split_decode(stack, options(2))
    send(prefill, decode, prompt(2)).check()
    decode.holds[0].clear()
    request = send(prefill, decode, prompt(8))
    decode.followers[0].close()
    until(lambda: not decode.lead.alive, "the loss")
    assert decode.lost == ["rank 1 is gone"]
    assert not decode.lead.ready
    decode.holds[0].set()
    decode.followers[0].bye.set()
    decode.lead.close(PATIENCE_S)  # waits for nobody
    with pytest.raises(RoomFailed):
        request.waiting.done.result(PATIENCE_S)
    with contextlib.suppress(PdplaneError):
        request.work.done.result(PATIENCE_S)


def test_a_rank_that_is_asked_to_stop_asks_rank_0(stack: contextlib.ExitStack) -> None:
    decode = split_decode(stack, options(2))
    decode.followers[0].leave()
    until(lambda: not decode.lead.alive, "the word")
    assert decode.lost == []
    decode.close()
    request = DecodeRequest(Room(1), (5,), Endpoint("127.0.0.1", 1), 1)
    with pytest.raises(LocalProtocolError, match="take no requests"):
        decode.lead.decode(request, lambda _token: None)
