"""Deadlines and tombstones: what is due, what is forgotten, and that neither grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdplane.ids import Generation, Life, Room, SessionId
from pdplane.machine.actions import Timers
from pdplane.machine.uses import Graveyard, RankUse, Tombstone, merge

PEER = SessionId("decode:9"), Life("d" * 32)
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 4), st.integers(0, 20)),
        st.tuples(st.just("drop"), st.integers(0, 4), st.just(0)),
        st.tuples(st.just("due"), st.just(0), st.integers(0, 20)),
    )
)


@given(MOVES)
def test_timers_do_what_a_dict_of_times_does(moves: list[tuple[str, int, int]]) -> None:
    timers: Timers[int] = Timers()
    model: dict[int, int] = {}
    for what, key, time in moves:
        if what == "set":
            timers.set(key, time)
            model[key] = time
        elif what == "drop":
            timers.drop(key)
            model.pop(key, None)
        else:
            due = {key for key, at in model.items() if at <= time}
            assert set(timers.due(time)) == due
            model = {key: at for key, at in model.items() if key not in due}
        assert len(timers) == len(model)
        assert timers.earliest() == min(model.values(), default=None)


def test_the_oldest_tombstones_go_first() -> None:
    graveyard = Graveyard(capacity=3)
    for number in range(5):
        graveyard.bury(Room(number), Tombstone("gone", until=10.0 + number))
    assert [graveyard.find(Room(number), 0.0) is not None for number in range(5)] == [False, False, True, True, True]
    assert graveyard.find(Room(2), 12.0) is None
    assert (len(graveyard), graveyard.earliest()) == (2, 13.0)


def test_a_new_use_keeps_what_is_over_of_those_who_count() -> None:
    raw = SessionId("raw:1"), Life("")
    graveyard = Graveyard()
    ended = merge({}, RankUse(PEER, Generation(4)), RankUse(PEER, Generation(3)), RankUse(raw, Generation(0)))
    stone = Tombstone(None, until=10.0, ended=ended)
    assert stone.is_raw
    assert [stone.covers(RankUse(PEER, Generation(n))) for n in (3, 4, 5)] == [True, True, False]
    graveyard.bury(Room(7), stone)
    assert graveyard.take(Room(7), 0.0) == {PEER: 4}
    assert len(graveyard) == 0


def test_the_uses_of_a_room_are_bounded() -> None:
    uses = [RankUse((SessionId(f"d:{n}"), Life("")), Generation(1)) for n in range(1000)]
    assert len(merge({}, *uses)) == 64
