"""Rank 0's view of all ranks of a split model: it passes each request on and counts what the others say.

One thread takes what happens, here and there, in one order; so that all ranks line up for blocks in the same order,
and no two rooms hold blocks on one rank each while they wait for the other's.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import attrs

from pdplane.control.rank_link import Message, RankLink
from pdplane.errors import LocalProtocolError, PdplaneError, RoomFailed
from pdplane.ids import Room
from pdplane.node.legs import open_future
from pdplane.node.rank_words import Request, SharedThread, cause_of, write_request

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PARTING_S = 10.0


class Handle(Protocol[T]):
    """A leg on this rank."""

    done: Future[T]

    def cancel(self, cause: str) -> None: ...


@attrs.define(eq=False)
class SharedLeg(Generic[T]):
    """One request on all ranks; `done` ends when none of them has anything left of it."""

    room: Room
    here: Handle[T]
    waits_for: set[int]
    done: Future[T] = attrs.field(factory=open_future)
    offered: set[int] = attrs.field(factory=set)
    go_on: Callable[[], None] | None = None
    failure: RoomFailed | None = None

    def cancel(self, cause: str) -> None:
        """End the leg on every rank; returns at once."""
        self.here.cancel(cause)


class Ranks:
    """Rank 0's view of all ranks. `start` when they are connected; `close` parts from them."""

    def __init__(self, thread: SharedThread, size: int) -> None:
        self._thread, self._size = thread, size
        self._links: list[RankLink] = []
        self._order = threading.Lock()
        self._idle = threading.Condition(self._order)
        self._legs: dict[Room, SharedLeg[Any]] = {}
        self._up: set[int] = set()
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._worker: threading.Thread | None = None
        self.trouble: str | None = None
        """Why the ranks cannot go on together."""
        self.parting = False
        """A rank was asked to stop: what runs may finish."""

    def start(self, links: Sequence[RankLink], on_lost: Callable[[str], None]) -> None:
        """Listen to the other ranks. `on_lost` is told once why they cannot go on together."""

        def lost(reason: str) -> None:
            if self.trouble is None:
                self.trouble = reason
                on_lost(reason)

        self._links = list(links)
        self._thread.connect(self.tell, lost)
        self._worker = threading.Thread(target=lambda: self._work(lost), name="pdplane-ranks")
        self._worker.start()
        for rank, link in enumerate(self._links, start=1):
            link.start(partial(self._post, rank), lost)

    def tell(self, kind: str, number: int = 0, text: str = "") -> None:
        """Say it to every other rank."""
        for link in self._links:
            link.send(kind, number, text)

    def __len__(self) -> int:
        return len(self._legs)

    @property
    def all_up(self) -> bool:
        return len(self._up) == self._size - 1

    def begin(self, request: Request, begin_here: Callable[[], Handle[T]]) -> SharedLeg[T]:
        """Begin a leg on all ranks. Raises LocalProtocolError for a live room, and what `begin_here` raises."""
        with self._order:
            if request.room in self._legs:
                raise LocalProtocolError(f"room {request.room} is live")
            over = self._thread.expect(request.room)
            try:
                leg = SharedLeg(request.room, begin_here(), set(range(self._size)))
            except PdplaneError:
                self._thread.forget(request.room)
                raise
            self._legs[request.room] = leg
            self.tell("request", request.room, write_request(request))
        leg.here.done.add_done_callback(lambda _: self._events.put(lambda: self._ended_here(leg, over)))
        return leg

    def gate(self, room: Room, go_on: Callable[[], None]) -> None:
        """This rank has its offer."""

        def offered() -> None:
            with self._order:
                leg = self._legs.get(room)
            if leg is not None:
                leg.go_on = go_on
                self._offered(leg, 0)

        self._events.put(offered)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until no leg is left on any rank."""
        with self._idle:
            self._idle.wait_for(lambda: not self._legs or self.trouble is not None, timeout_s)

    def close(self) -> None:
        """Part from the others, which end too, and fail what is left; idempotent."""
        deadline = time.monotonic() + _PARTING_S
        for link in self._links:
            link.part("bye")
        for link in self._links:
            link.wait_end(max(0.0, deadline - time.monotonic()))
        for link in self._links:
            link.close()
        if self._worker is not None:
            self._events.put(None)
            self._worker.join()
        for leg in list(self._legs.values()):
            self._finish(leg, RoomFailed(leg.room, self.trouble or "the ranks part"))

    # ---- what happens, in one order

    def _post(self, rank: int, message: Message) -> None:
        self._events.put(lambda: self._heard(rank, message))

    def _work(self, lost: Callable[[str], None]) -> None:
        event: Callable[[], None] | None = None
        try:
            while (event := self._events.get()) is not None:
                event()
        finally:
            if event is not None:  # a bug of ours: its traceback follows, and nobody goes on without this thread
                lost("the thread that counts the ranks has died")

    def _heard(self, rank: int, message: Message) -> None:
        kind, number, text = message
        if kind == "up":
            self._up.add(rank)
        elif kind == "leave":
            self.parting = True
            logger.warning("rank %s was asked to stop, so all ranks stop", rank)
        elif kind == "ready":
            self._thread.arrived(rank, number, text)
        else:
            with self._order:
                leg = self._legs.get(Room(number))
            if leg is not None:
                self._heard_of(leg, rank, kind, text)

    def _heard_of(self, leg: SharedLeg[Any], rank: int, kind: str, text: str) -> None:
        if kind == "offered":
            self._offered(leg, rank)
        elif kind == "failed":
            leg.failure = leg.failure or RoomFailed(leg.room, f"rank {rank}: {text}")
            leg.cancel(text)
        elif kind == "done":
            self._done(leg, rank)

    def _offered(self, leg: SharedLeg[Any], rank: int) -> None:
        leg.offered.add(rank)
        if len(leg.offered) == self._size and leg.go_on is not None:
            self.tell("start", leg.room)
            leg.go_on()

    def _ended_here(self, leg: SharedLeg[Any], over: Future[None]) -> None:
        error = leg.here.done.exception()
        if error is not None:
            self.tell("cancel", leg.room, cause_of(error))
            self._thread.abandon(leg.room)
        over.add_done_callback(lambda _: self._events.put(lambda: self._done(leg, 0)))

    def _done(self, leg: SharedLeg[Any], rank: int) -> None:
        leg.waits_for.discard(rank)
        if not leg.waits_for:
            self._finish(leg, leg.failure)

    def _finish(self, leg: SharedLeg[Any], failure: PdplaneError | None) -> None:
        self._thread.forget(leg.room)
        with self._idle:
            del self._legs[leg.room]
            self._idle.notify_all()
        here = leg.here.done.exception() if leg.here.done.done() else None
        if (error := here or failure) is not None:
            leg.done.set_exception(error)
        else:
            leg.done.set_result(leg.here.done.result())
