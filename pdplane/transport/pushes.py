"""Pushes on their way: the queue of one sender, which forgets no push and ends each of them once."""

from __future__ import annotations

import threading
from collections import deque
from typing import TypeAlias

import attrs
import numpy as np

from pdplane.errors import LocalProtocolError
from pdplane.ids import Generation, Room
from pdplane.kv.copies import Copies
from pdplane.transport.framing import MAX_PUSH

Key: TypeAlias = tuple[Room, Generation, int]


@attrs.frozen(eq=False)
class Push:
    """Bytes of a room to write into the receiver's arena.

    `push` numbers the pushes of a room, 0 to 2**32-1. To repeat one after a cut, submit it again under the
    same number with the same copies: what had landed of it counts once.
    """

    room: Room
    generation: Generation
    push: int
    copies: Copies

    @property
    def key(self) -> Key:
        return self.room, self.generation, self.push


@attrs.define(eq=False)
class Job:
    """A submitted push and how far it got.

    `refusal` is set when it may not be sent, `cancelled` when it shall end. `sent` counts the segments that are on
    their way over this connection, of all in `parts`; `resumed` the connections that were cut under it.
    """

    push: Push
    nbytes: int
    refusal: str | None = None
    cancelled: bool = False
    parts: list[Copies] = attrs.field(factory=list)
    sent: int = 0
    resumed: int = 0

    def is_over(self, tries: int) -> bool:
        """Whether a cut is its end."""
        return self.cancelled or self.refusal is not None or self.resumed >= tries


class Outbox:
    """Pushes that are not over. Rooms take turns, a room's own pushes keep their order.

    Every method may be called from any thread.
    """

    def __init__(self, max_queued: int) -> None:
        self._changed = threading.Condition()
        self._max_queued = max_queued
        self._queued: dict[Room, deque[Job]] = {}  # the next room in turn first
        self._count = 0
        self._pending: dict[Key, Job] = {}
        self._closed = self._retired = False

    def submit(self, push: Push) -> bool:
        """Queue a push; False when the outbox takes no more. A push beyond the bound is queued as refused."""
        job = Job(push, push.copies.nbytes)
        with self._changed:
            if self._closed or self._retired:
                return False
            if push.key in self._pending:
                raise LocalProtocolError(f"push {push.push} of room {push.room} is under way already")
            if self._count >= self._max_queued:
                job = Job(_without_bytes(push), job.nbytes, refusal="too many pushes are queued")
            self._pending[push.key] = job
            self._enqueue(job)
        return True

    def cancel(self, room: Room, generation: Generation) -> None:
        """Mark a room's pushes that are queued or being sent; those sent whole wait for their acknowledgement."""
        with self._changed:
            for job in self._pending.values():
                if job.push.room == room and job.push.generation == generation:
                    job.cancelled = True

    def turn(self) -> Job | None:
        """The push whose next segment is due; its room's next turn comes after all others'."""
        with self._changed:
            for room in self._queued:
                jobs = self._queued[room] = self._queued.pop(room)
                return jobs[0]
            return None

    def sent(self, job: Job) -> None:
        """The whole push is on its way, or over: its room goes on with the next."""
        with self._changed:
            jobs = self._queued.get(job.push.room)
            if jobs and jobs[0] is job:
                jobs.popleft()
                self._count -= 1
                if not jobs:
                    del self._queued[job.push.room]

    def take_cancelled(self) -> list[Job]:
        """Queued pushes that were cancelled, out of the queue."""
        with self._changed:
            cancelled = [job for jobs in self._queued.values() for job in jobs if job.cancelled]
            if cancelled:
                self._requeue([job for jobs in self._queued.values() for job in jobs if not job.cancelled])
            return cancelled

    def resume(self, tries: int) -> list[Job]:
        """After a cut: queue what may be sent again from its start, in the order of submission; gives the rest."""
        with self._changed:
            jobs = list(self._pending.values())
            over = [job for job in jobs if job.is_over(tries)]
            again = [job for job in jobs if not job.is_over(tries)]
            for job in again:
                job.sent = 0
                job.resumed += 1
            self._requeue(again)
            return over

    def finish(self, key: Key) -> Job | None:
        """End a push: the job the first time, None ever after."""
        with self._changed:
            return self._pending.pop(key, None)

    def finish_all(self) -> list[Job]:
        """End every push, in the order of submission, and take no more."""
        with self._changed:
            self._retired = True
            jobs = list(self._pending.values())
            self._pending.clear()
            self._requeue([])
            return jobs

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Wait for `close`; False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed, timeout_s)

    def retire(self) -> bool:
        """Take no more pushes if none is pending: whether that is so."""
        with self._changed:
            self._retired = self._retired or not self._pending
            return self._retired

    def close(self) -> None:
        """Take no more pushes; ends every `wait`."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def __len__(self) -> int:
        """Pushes that are not over."""
        with self._changed:
            return len(self._pending)

    def _enqueue(self, job: Job) -> None:
        self._queued.setdefault(job.push.room, deque()).append(job)
        self._count += 1

    def _requeue(self, jobs: list[Job]) -> None:
        self._queued, self._count = {}, 0
        for job in jobs:
            self._enqueue(job)


def _without_bytes(push: Push) -> Push:
    nothing = np.empty(0, np.uint64)
    return attrs.evolve(push, copies=Copies(nothing, nothing, nothing))


def check_push(push: Push, arena_nbytes: int) -> None:
    """Raise LocalProtocolError unless every run has a length and lies whole inside the source arena."""
    if not 0 <= push.push <= MAX_PUSH:
        raise LocalProtocolError(f"push number {push.push} is not a u32")
    copies, size = push.copies, np.uint64(arena_nbytes)
    if not len(copies.source) == len(copies.destination) == len(copies.length):
        raise LocalProtocolError("the arrays of copies differ in length")
    if not copies.length.all() or (copies.length > size).any() or (copies.source > size - copies.length).any():
        raise LocalProtocolError(f"a run of push {push.push} is empty or leaves the arena of {arena_nbytes} bytes")
