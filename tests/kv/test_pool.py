"""The allocator of block ids: nothing lost, nothing twice, one group a parent."""

from __future__ import annotations

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdplane.errors import LocalProtocolError, PoolExhausted
from pdplane.ids import GroupId
from pdplane.kv.arena import Pool
from tests.samples import KV, SNAPSHOT, two_group_layout


def test_lowest_ids_first_and_all_or_nothing() -> None:
    pool = Pool(two_group_layout(num_lcm_blocks=4))
    first = pool.allocate({KV: 3, SNAPSHOT: 1})
    assert first == {KV: (1, 2, 3), SNAPSHOT: (3,)}
    assert (pool.free_parents, pool.total_parents) == (1, 4)
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate({SNAPSHOT: 1, KV: 2})
    assert (caught.value.wanted, caught.value.free) == (2, 1)
    assert pool.allocate({KV: 1}) == {KV: (4,)}
    pool.release(first)
    assert pool.free_parents == 3
    assert pool.used_blocks() == {KV: 1, SNAPSHOT: 0}


def test_whether_a_request_could_ever_be_served() -> None:
    pool = Pool(two_group_layout(num_lcm_blocks=4))
    pool.allocate({SNAPSHOT: 4})
    assert pool.fits({KV: 8})
    assert pool.fits({KV: 5, SNAPSHOT: 1})
    assert not pool.fits({KV: 9})
    assert not pool.fits({KV: 7, SNAPSHOT: 1})


@pytest.mark.parametrize("blocks", [{KV: (1, 1)}, {KV: (1, 3)}, {SNAPSHOT: (1,)}, {GroupId("x"): (1,)}, {KV: (0,)}])
def test_a_bad_release_changes_nothing(blocks: dict[GroupId, tuple[int, ...]]) -> None:
    pool = Pool(two_group_layout())
    taken = pool.allocate({KV: 2})
    with pytest.raises(LocalProtocolError, match="not in use"):
        pool.release(blocks)
    assert pool.used_blocks()[KV] == 2
    pool.release(taken)
    with pytest.raises(LocalProtocolError, match="not in use"):
        pool.release(taken)
    assert pool.free_parents == pool.total_parents


@pytest.mark.parametrize("counts", [{GroupId("x"): 1}, {KV: -1}])
def test_nonsense_is_our_own_mistake(counts: dict[GroupId, int]) -> None:
    pool = Pool(two_group_layout())
    for ask in (pool.allocate, pool.fits):
        with pytest.raises(LocalProtocolError):
            ask(counts)


def test_many_threads_get_different_blocks() -> None:
    pool = Pool(two_group_layout(num_lcm_blocks=64))
    taken: list[int] = []

    def work() -> None:
        for _ in range(50):
            blocks = pool.allocate({KV: 3})
            taken.extend(pool.allocate({KV: 1})[KV])
            pool.release(blocks)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(taken)) == len(taken) == 100
    assert pool.used_blocks()[KV] == 100


class PoolMachine(RuleBasedStateMachine):
    """Random allocations and releases against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool(two_group_layout(num_lcm_blocks=6))
        self.packs = {KV: 2, SNAPSHOT: 1}
        self.held: list[dict[GroupId, tuple[int, ...]]] = []

    def _parents(self) -> dict[int, set[GroupId]]:
        owners: dict[int, set[GroupId]] = {}
        for blocks in self.held:
            for group_id, ids in blocks.items():
                for block in ids:
                    owners.setdefault((block - 1) // self.packs[group_id], set()).add(group_id)
        return owners

    @rule(kv=st.integers(0, 7), snapshots=st.integers(0, 4))
    def allocate(self, kv: int, snapshots: int) -> None:
        before = self.pool.used_blocks()
        try:
            blocks = self.pool.allocate({KV: kv, SNAPSHOT: snapshots})
        except PoolExhausted:
            assert self.pool.used_blocks() == before
            return
        assert {group_id: len(ids) for group_id, ids in blocks.items()} == {KV: kv, SNAPSHOT: snapshots}
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def one_owner_each(self) -> None:
        for group_id in (KV, SNAPSHOT):
            ids = [block for blocks in self.held for block in blocks[group_id]]
            assert len(set(ids)) == len(ids)
            assert self.pool.used_blocks()[group_id] == len(ids)
        owners = self._parents()
        assert all(len(groups) == 1 for groups in owners.values())
        assert self.pool.free_parents == 6 - len(owners)


TestPool = PoolMachine.TestCase
