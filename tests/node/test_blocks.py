"""The line for blocks, by itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from pdplane.control.http_thread import HttpThread
from pdplane.errors import PoolExhausted
from pdplane.kv.layout import Layout
from pdplane.node.legs import BlockQueue, Blocks
from tests.samples import KV, two_group_layout
from tests.waiting import PATIENCE_S, until

T = TypeVar("T")


class Interrupted(HttpThread):
    """Something else happens just before work begins on it."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        self.before()
        return super().run(coroutine)


@pytest.fixture
def http() -> Iterator[Interrupted]:
    thread = Interrupted("pdplane-http-test")
    thread.start()
    yield thread
    thread.close()


@pytest.fixture
def layout() -> Layout:
    return two_group_layout(num_lcm_blocks=2)


def test_who_is_served_while_its_deadline_is_set_has_none(http: Interrupted, layout: Layout) -> None:
    queue = BlockQueue(layout, http, timeout_s=300, max_waiting=8)
    got: list[Blocks | PoolExhausted] = []
    queue.acquire({KV: 4}, got.append)
    (held,) = got
    assert not isinstance(held, PoolExhausted)
    http.before = lambda: queue.release(held)
    place = queue.acquire({KV: 4}, got.append)
    assert got == [held, held]
    assert place.expiry is not None
    assert place.expiry.cancelled()
    assert not queue.leave(place)


def test_who_stands_behind_a_head_that_leaves_is_served_at_once(http: Interrupted, layout: Layout) -> None:
    queue = BlockQueue(layout, http, timeout_s=300, max_waiting=8)
    got: dict[str, Blocks | PoolExhausted] = {}
    queue.acquire({KV: 2}, lambda blocks: got.update(held=blocks))
    large = queue.acquire({KV: 4}, lambda blocks: got.update(large=blocks))
    queue.acquire({KV: 2}, lambda blocks: got.update(small=blocks))
    assert list(got) == ["held"]
    assert queue.leave(large)
    assert list(got) == ["held", "small"]
    assert queue.counts()["waiting"] == 0


def test_who_waits_too_long_is_told_and_those_behind_are_served(http: Interrupted, layout: Layout) -> None:
    queue = BlockQueue(layout, http, timeout_s=0.2, max_waiting=8)
    got: dict[str, Blocks | PoolExhausted] = {}
    queue.acquire({KV: 2}, lambda blocks: got.update(held=blocks))
    queue.acquire({KV: 4}, lambda blocks: got.update(large=blocks))
    queue.acquire({KV: 2}, lambda blocks: got.update(small=blocks))
    until(lambda: len(got) == 3, within_s=PATIENCE_S)
    assert isinstance(got["large"], PoolExhausted)
    assert not isinstance(got["small"], PoolExhausted)
    assert queue.counts()["waiting"] == 0
