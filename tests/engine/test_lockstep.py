"""Shared jobs: whatever the order in which the ranks get and cancel them, all ranks run the same turns in one order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from pdplane.engine.ranks import RankThread
from pdplane.engine.thread import Job, Turns
from pdplane.errors import InternalError

PATIENCE_S = 20


class Ranks:
    """Rank threads in one process; what they say to each other is a call. `story` lists the turns that a rank ran."""

    def __init__(self, size: int) -> None:
        self.threads = [RankThread(rank, size, f"rank-{rank}") for rank in range(size)]
        self.stories: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        self.broken: list[str] = []
        for rank, thread in enumerate(self.threads):
            thread.connect(self.tell_others if rank == 0 else self.tell_first(rank), self.broken.append)
            thread.start()

    def tell_others(self, kind: str, key: int, text: str) -> None:
        for thread in self.threads[1:]:
            (thread.turn if kind == "turn" else thread.end)(key)

    def tell_first(self, rank: int) -> Callable[[str, int, str], None]:
        return lambda _kind, key, text: self.threads[0].arrived(rank, key, text)

    def expect(self, key: int) -> list[Future[None]]:
        return [thread.expect(key) for thread in self.threads]

    def share(self, rank: int, key: int, turns: int, mark: str = "") -> Job[int]:
        return self.threads[rank].share(lambda: self._turns(rank, key, turns), key, mark)

    def _turns(self, rank: int, key: int, turns: int) -> Turns[int]:
        for number in range(turns):
            self.stories[rank].append((key, number))
            yield
        return turns

    def close(self) -> None:
        for thread in self.threads:
            thread.close()


@pytest.fixture(params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    found = Ranks(request.param)
    yield found
    found.close()


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_run_the_same_turns_in_the_same_order(ranks: Ranks, seed: int) -> None:
    chance, keys = random.Random(seed), range(12)
    overs = [over for key in keys for over in ranks.expect(key)]
    orders = [chance.sample(keys, len(keys)) for _ in ranks.threads]
    doomed = {key for key in keys if chance.random() < 0.4}
    jobs: list[list[Job[int]]] = [[] for _ in ranks.threads]

    def one_rank(rank: int) -> None:
        for key in orders[rank]:
            job = ranks.share(rank, key, 1 + key % 5)
            jobs[rank].append(job)
            if rank == 0 and key in doomed:
                job.cancel()

    with ThreadPoolExecutor(len(ranks.threads)) as workers:
        list(workers.map(one_rank, range(len(ranks.threads))))
    for over in overs:
        over.result(PATIENCE_S)
    assert ranks.broken == []
    assert all(story == ranks.stories[0] for story in ranks.stories)
    for rank, found in enumerate(jobs):
        for key, job in zip(orders[rank], found, strict=True):
            assert (job.future.exception() is None) == (jobs[0][orders[0].index(key)].future.exception() is None)
            assert key in doomed or job.result() == 1 + key % 5


def test_no_turn_runs_before_every_rank_has_the_job(ranks: Ranks) -> None:
    ranks.expect(7)
    early = [ranks.share(rank, 7, 2) for rank in range(len(ranks.threads) - 1)]
    for thread in ranks.threads:
        thread.call(lambda: None)  # whatever was queued has run
    assert not any(ranks.stories)
    last = ranks.share(len(ranks.threads) - 1, 7, 2)
    assert [job.result(PATIENCE_S) for job in (*early, last)] == [2] * len(ranks.threads)


def test_another_ranks_cancel_waits_for_the_first(ranks: Ranks) -> None:
    ranks.expect(7)
    jobs = [ranks.share(rank, 7, 10**9) for rank in range(1, len(ranks.threads))]
    jobs[0].cancel()
    ranks.threads[1].call(lambda: None)
    assert not jobs[0].future.done()
    first = ranks.share(0, 7, 10**9)
    first.cancel()
    for job in (first, *jobs):
        with pytest.raises(CancelledError):
            job.result(PATIENCE_S)
    assert all(story == ranks.stories[0] for story in ranks.stories)


def test_a_job_that_rank_0_never_has_ends_where_it_is_and_where_it_comes_late(ranks: Ranks) -> None:
    overs = ranks.expect(7)
    early = ranks.share(1, 7, 1)
    ranks.threads[0].abandon(7)
    with pytest.raises(CancelledError):
        early.result(PATIENCE_S)
    for over in overs:
        over.result(PATIENCE_S)
    for rank in {0, *range(2, len(ranks.threads))}:
        with pytest.raises(CancelledError):
            ranks.share(rank, 7, 1).result(PATIENCE_S)
    assert not any(ranks.stories)


def test_ranks_that_hold_different_requests_run_none(ranks: Ranks) -> None:
    ranks.expect(7)
    jobs = [ranks.share(rank, 7, 1, f"first token {min(rank, 1)}") for rank in range(len(ranks.threads))]
    with pytest.raises(InternalError, match="different requests"):
        jobs[0].result(PATIENCE_S)
    with pytest.raises(CancelledError):
        jobs[1].result(PATIENCE_S)
    assert not any(ranks.stories)


def test_a_turn_that_fails_on_one_rank_is_told(ranks: Ranks) -> None:
    def fails() -> Turns[int]:
        yield
        raise RuntimeError("the ring is cut")

    ranks.expect(7)
    job = ranks.threads[0].share(fails, 7, "")
    for rank in range(1, len(ranks.threads)):
        ranks.share(rank, 7, 3)
    with pytest.raises(RuntimeError, match="the ring is cut"):
        job.result(PATIENCE_S)
    ranks.threads[0].call(lambda: None)
    assert ranks.broken == ["a turn failed on this rank: RuntimeError: the ring is cut"]


def test_closing_rank_0_ends_the_jobs_of_all(ranks: Ranks) -> None:
    overs = [over for key in range(3) for over in ranks.expect(key)]
    jobs = [ranks.share(rank, key, 10**9) for key in (0, 1) for rank in range(len(ranks.threads))]
    waiting = ranks.share(0, 2, 1)
    ranks.threads[0].close()
    for job in (*jobs, waiting):
        with pytest.raises(CancelledError):
            job.result(PATIENCE_S)
    for over in overs:
        over.result(PATIENCE_S)
    assert all(story == ranks.stories[0] for story in ranks.stories)


def test_keys_are_used_once_at_a_time(ranks: Ranks) -> None:
    with pytest.raises(InternalError, match="no job can be shared"):
        ranks.share(0, 7, 1)
    ranks.threads[0].expect(7)
    with pytest.raises(InternalError, match="in use"):
        ranks.threads[0].expect(7)
    ranks.threads[0].forget(7)
    ranks.threads[0].expect(7)


def test_work_of_one_rank_alone_runs_when_it_likes(ranks: Ranks) -> None:
    ranks.expect(7)
    ranks.share(0, 7, 1)
    assert [thread.call(lambda: 5) for thread in ranks.threads] == [5] * len(ranks.threads)
