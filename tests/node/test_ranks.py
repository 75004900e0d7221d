"""Tensor-parallel ranks: one node a rank, every rank of both sides gets the request under one room number."""

from __future__ import annotations

import attrs
import pytest

from pdplane.api import DecodeRequest, PrefillRequest
from pdplane.errors import ConfigError, RoomFailed
from pdplane.ids import Room, new_room
from pdplane.node.decode import DecodeLeg
from pdplane.node.prefill import PrefillLeg
from pdplane.toy.model import ToyOptions, toy_answer
from tests.node.conftest import Daemons, Decode, Prefill, call, idle, prompt
from tests.waiting import PATIENCE_S, until

OPTIONS = ToyOptions(heads=4)
SIZES = [(2, 1), (1, 2), (4, 2), (2, 2), (1, 4), (4, 1)]


@attrs.define
class Group:
    """All ranks of both sides."""

    prefills: list[Prefill]
    decodes: list[Decode]

    def prefill(self, tokens: tuple[int, ...], room: int) -> list[PrefillLeg]:
        return [rank.node.prefill(PrefillRequest(Room(room), tokens)) for rank in self.prefills]

    def decode(self, tokens: tuple[int, ...], room: int) -> list[tuple[DecodeLeg, list[int]]]:
        """Each decode rank's leg, and the tokens that it gives."""
        legs = []
        for rank in self.decodes:
            got = list[int]()
            request = DecodeRequest(Room(room), tokens, self.prefills[0].rendezvous, 5)
            legs.append((rank.node.decode(request, lambda token, got=got: got.append(token.id)), got))
        return legs

    @property
    def idle(self) -> bool:
        return idle(*self.prefills, *self.decodes)


def start(daemons: Daemons, prefill_tp: int, decode_tp: int) -> Group:
    """Rank 0 of prefill serves the rendezvous, the others announce themselves there."""
    options = attrs.evolve(OPTIONS, tp_size=prefill_tp)
    first = daemons.prefill(options, tp_size=prefill_tp)
    others = [
        daemons.prefill(
            attrs.evolve(options, tp_rank=rank), tp_size=prefill_tp, tp_rank=rank, rendezvous=first.rendezvous
        )
        for rank in range(1, prefill_tp)
    ]
    decodes = [
        daemons.decode(attrs.evolve(OPTIONS, tp_size=decode_tp, tp_rank=rank), tp_size=decode_tp, tp_rank=rank)
        for rank in range(decode_tp)
    ]
    return Group([first, *others], decodes)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SIZES)
def test_every_rank_holds_its_heads(daemons: Daemons, prefill_tp: int, decode_tp: int) -> None:
    group = start(daemons, prefill_tp, decode_tp)
    for seed in range(4):
        tokens, room = prompt(seed), new_room()
        waiting = group.decode(tokens, room)
        work = group.prefill(tokens, room)
        expected = [token for token, _ in toy_answer(OPTIONS, tokens, 5)]
        for leg, got in waiting:
            leg.done.result(PATIENCE_S)
            assert got == expected
        for leg in work:
            leg.done.result(PATIENCE_S)
    until(lambda: group.idle, "every count's start value")


def test_each_room_is_served_by_its_data_parallel_group(daemons: Daemons) -> None:
    first = daemons.prefill(OPTIONS, dp_size=3)
    groups = [first, *(daemons.prefill(OPTIONS, dp_size=3, dp_rank=n, rendezvous=first.rendezvous) for n in (2, 1))]
    groups[1:] = reversed(groups[1:])
    decode = daemons.decode(OPTIONS)
    for room in (*range(6), 2**63 - 1):
        tokens = prompt(room % 97)
        waiting = call(None, decode, tokens, at=first.rendezvous, room=room)
        for number, group in enumerate(groups):
            if number == room % 3:
                work = call(group, None, tokens, room=room)
            else:
                with pytest.raises(ConfigError, match=f"belongs to data-parallel group {room % 3}"):
                    call(group, None, tokens, room=room)
        assert waiting.is_right(OPTIONS)
        assert work.prefill is not None
        work.prefill.done.result(PATIENCE_S)
    assert decode.node.statistics()["sessions"] == {"peers": 3, "sessions": 3}


def test_no_rank_starts_before_every_decode_rank_offered(daemons: Daemons) -> None:
    group = start(daemons, 1, 2)  # the one prefill rank feeds both
    tokens, room = prompt(1), new_room()
    work = group.prefill(tokens, room)
    one = Group(group.prefills, group.decodes[:1]).decode(tokens, room)
    until(lambda: group.decodes[0].node.statistics()["rooms"] == {"waiting": 1})
    assert group.prefills[0].node.statistics()["rooms"] == {"opened": 1}
    assert not any(leg.done.done() for leg in work)
    other = Group(group.prefills, group.decodes[1:]).decode(tokens, room)
    for leg, _ in (*one, *other):
        leg.done.result(PATIENCE_S)


@pytest.mark.parametrize("silent", [0, 1])
def test_a_prefill_rank_that_fails_fails_the_room_on_every_decode_rank(daemons: Daemons, silent: int) -> None:
    group = start(daemons, 2, 1)
    tokens, room = prompt(1), new_room()
    group.prefills[silent].hold.clear()
    waiting = group.decode(tokens, room)
    work = group.prefill(tokens, room)
    work[1 - silent].done.result(PATIENCE_S)
    work[silent].cancel("this rank is broken")
    for leg, got in waiting:
        with pytest.raises(RoomFailed, match="this rank is broken"):
            leg.done.result(PATIENCE_S)
        assert got == []
    until(lambda: group.idle, "every count's start value")


@pytest.mark.slow  # the lease of the rank that went without a word has to lapse
def test_a_prefill_rank_that_restarts_is_found_again(daemons: Daemons) -> None:
    group = start(daemons, 2, 1)
    first, second = group.prefills
    second.node.close()
    options = attrs.evolve(OPTIONS, tp_size=2, tp_rank=1)
    again = daemons.prefill(options, tp_size=2, tp_rank=1, rendezvous=first.rendezvous)
    until(lambda: again.node.ready, "the new rank's registration", within_s=25)
    group.prefills[1] = again
    tokens, room = prompt(1), new_room()
    waiting = group.decode(tokens, room)
    group.prefill(tokens, room)
    for leg, got in waiting:
        leg.done.result(PATIENCE_S)
        assert got == [token for token, _ in toy_answer(OPTIONS, tokens, 5)]
