"""A rank of a split model that is not rank 0: it does what rank 0 says, and tells how it went."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from pdplane.control.rank_link import Message, RankLink
from pdplane.errors import ConfigError, PdplaneError
from pdplane.ids import Endpoint, Room
from pdplane.node.legs import open_future
from pdplane.node.rank_words import Request, SharedThread, cause_of, read_request
from pdplane.node.ranks import Handle

BeginLeg = Callable[[Request], Handle[Any]]
"""Begins a leg on this rank; raises PdplaneError."""

_MEETING_S = 600.0  # rank 0 reads its part of a large model as we do


@attrs.define(eq=False)
class FollowedLeg:
    """One request on this rank: `done` counts its own end and that of its shared job."""

    room: Room
    ends_left: int = 2
    here: Handle[Any] | None = None
    go_on: Callable[[], None] | None = None


class Follower:
    """Listens to rank 0. `bye` ends when rank 0 parts from us; `on_lost` says why we cannot go on with it."""

    def __init__(self, link: RankLink, thread: SharedThread, on_lost: Callable[[str], None]) -> None:
        self._link, self._thread = link, thread
        self._lock = threading.Lock()
        self._legs: dict[Room, FollowedLeg] = {}
        self._begin: BeginLeg | None = None
        self._rendezvous: Future[Endpoint] = open_future()
        self._on_lost = on_lost
        self.bye = threading.Event()
        self.trouble: str | None = None

    def start(self) -> None:
        """Listen. Requests come only after `up`."""
        self._thread.connect(self._link.send, self._lost)
        self._link.start(self._heard, self._lost)

    def rendezvous(self) -> Endpoint:
        """Rank 0's, once it is open. Raises ConfigError when rank 0 goes first."""
        try:
            return self._rendezvous.result(_MEETING_S)
        except TimeoutError as error:
            raise ConfigError(f"rank 0 did not open its rendezvous within {_MEETING_S:g} s") from error

    def up(self, begin: BeginLeg) -> None:
        """This rank can serve."""
        self._begin = begin
        self._link.send("up")

    def leave(self) -> None:
        """This rank was asked to stop: rank 0 ends what runs and says `bye`."""
        self._link.send("leave")

    def close(self) -> None:
        """Part from rank 0; idempotent."""
        self._link.close()

    def gate(self, room: Room, go_on: Callable[[], None]) -> None:
        """This rank has its offer: rank 0 says when to go on."""
        with self._lock:
            leg = self._legs.get(room)
        if leg is not None:
            leg.go_on = go_on
            self._link.send("offered", room)

    def _lost(self, reason: str) -> None:
        if self.trouble is None and not self.bye.is_set():
            self.trouble = reason
            if not self._rendezvous.done():
                self._rendezvous.set_exception(ConfigError(reason))
            self._on_lost(reason)

    def _heard(self, message: Message) -> None:
        kind, number, text = message
        if kind == "turn":
            self._thread.turn(number)
        elif kind == "end":
            self._thread.end(number)
        elif kind == "request":
            self._request(Room(number), text)
        elif kind == "rendezvous":
            self._rendezvous.set_result(Endpoint(text, number))
        elif kind == "bye":
            self.bye.set()
        else:
            self._heard_of(kind, Room(number), text)

    def _heard_of(self, kind: str, room: Room, text: str) -> None:
        with self._lock:
            leg = self._legs.get(room)
        if leg is None:
            return
        if kind == "start" and leg.go_on is not None:
            leg.go_on()
        elif kind == "cancel" and leg.here is not None:
            leg.here.cancel(text)

    def _request(self, room: Room, text: str) -> None:
        leg = FollowedLeg(room)
        with self._lock:
            self._legs[room] = leg
        self._thread.expect(room).add_done_callback(lambda _: self._one_end(leg))
        try:
            if self._begin is None:
                raise ConfigError("this rank is not up")
            leg.here = self._begin(read_request(room, text))
        except PdplaneError as error:
            self._link.send("failed", room, cause_of(error))
            self._one_end(leg)
            return
        leg.here.done.add_done_callback(lambda done: self._ended(leg, done))

    def _ended(self, leg: FollowedLeg, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._link.send("failed", leg.room, cause_of(error))
        self._one_end(leg)

    def _one_end(self, leg: FollowedLeg) -> None:
        with self._lock:
            leg.ends_left -= 1
            if leg.ends_left:
                return
            del self._legs[leg.room]
        self._thread.forget(leg.room)
        self._link.send("done", leg.room)
