"""What the legs of both roles share: lines for blocks and for a place to run, and the set of a node's legs."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import attrs

from pdplane.api import Engine
from pdplane.control.http_thread import HttpThread
from pdplane.errors import Cause, ConfigError, InternalError, LocalProtocolError, PdplaneError, PoolExhausted, Why
from pdplane.ids import GroupId, Room
from pdplane.kv.arena import Pool
from pdplane.kv.layout import Layout

Blocks: TypeAlias = Mapping[GroupId, tuple[int, ...]]


Wanted = TypeVar("Wanted")
Wanted_contra = TypeVar("Wanted_contra", contravariant=True)
Lent = TypeVar("Lent")


class Lender(Protocol[Wanted_contra, Lent]):
    """What a line stands at; used by one thread at a time."""

    def allocate(self, wanted: Wanted_contra) -> Lent:
        """Lend what is wanted. Raises PoolExhausted."""

    def release(self, lent: Lent) -> None:
        """Take it back."""

    def exhausted(self, wanted: Wanted_contra) -> PoolExhausted:
        """Return how much is wanted and how much is free, as an error."""


@attrs.define(eq=False)
class Place(Generic[Wanted, Lent]):
    """One place in a line."""

    wanted: Wanted
    then: Callable[[Lent | PoolExhausted], None]
    expiry: Future[None] | None = None


_PACE_PLACES = 16


class WaitingLine(Generic[Wanted, Lent]):
    """First come, first served over one lender.

    A large request at the head waits until enough is free, and those behind it wait too, so that each is served
    in the end. The thread that takes a place out of the line, under the lock, decides how it ends.
    """

    def __init__(
        self, pool: Lender[Wanted, Lent], http: HttpThread, *, timeout_s: float, max_waiting: int | None = None
    ) -> None:
        self._lender, self._http = pool, http
        self._timeout_s, self._max_waiting = timeout_s, max_waiting
        self._lock = threading.Lock()
        self._line: deque[Place[Wanted, Lent]] = deque()
        self._grants: deque[float] = deque(maxlen=_PACE_PLACES)  # when places were served since the line began

    def acquire(
        self,
        wanted: Wanted,
        then: Callable[[Lent | PoolExhausted], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Place[Wanted, Lent]:
        """Call `then` once, here or later on another thread, with what was lent or PoolExhausted (waited too long).

        `on_wait` is called before, unless it is there at once. Raises PoolExhausted when the line is full, or so slow
        that the time would be over before its turn.
        """
        place: Place[Wanted, Lent] = Place(wanted, then)
        with self._lock:
            lent = None if self._line else self._allocate(place)
            if lent is None and not self._has_room():
                raise self._lender.exhausted(wanted)
        if lent is not None:
            then(lent)
            return place
        on_wait()
        with self._lock:
            if not self._line:
                self._grants.clear()
                self._grants.append(time.monotonic())
            self._line.append(place)
        self._serve()
        if self._has(place):
            place.expiry = self._http.run(self._expire(place))
            if not self._has(place):  # served meanwhile by another thread, which found no timer to cancel
                place.expiry.cancel()
        return place

    def leave(self, place: Place[Wanted, Lent]) -> bool:
        """Leave the line, so that `then` is not called; return False when the place has ended already."""
        left = self._take_out(place)
        if left:
            self._serve()  # it may have been the head, for which the others waited
        return left

    def release(self, lent: Lent) -> None:
        """Give back what was lent, and serve the head of the line on this thread."""
        with self._lock:
            self._lender.release(lent)
        self._serve()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def _allocate(self, place: Place[Wanted, Lent]) -> Lent | None:
        try:
            return self._lender.allocate(place.wanted)
        except PoolExhausted:
            return None

    def _has_room(self) -> bool:
        """Return whether a newcomer may wait: by the pace of the last places its turn comes in time."""
        if self._max_waiting is not None and len(self._line) >= self._max_waiting:
            return False
        served = len(self._grants) - 1  # the first is when the line began, or an older place's
        if served < _PACE_PLACES // 4:
            return True
        each_s = (time.monotonic() - self._grants[0]) / served
        return each_s * (len(self._line) + 1) <= self._timeout_s

    def _has(self, place: Place[Wanted, Lent]) -> bool:
        with self._lock:
            return place in self._line

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    return
                place = self._line[0]
                if (lent := self._allocate(place)) is None:
                    return
                self._line.popleft()
                self._grants.append(time.monotonic())
            if place.expiry is not None:
                place.expiry.cancel()
            place.then(lent)

    async def _expire(self, place: Place[Wanted, Lent]) -> None:
        await asyncio.sleep(self._timeout_s)
        if self._take_out(place):
            place.then(self._lender.exhausted(place.wanted))
            self._serve()

    def _take_out(self, place: Place[Wanted, Lent]) -> bool:
        with self._lock:
            if place not in self._line:
                return False
            self._line.remove(place)
        if place.expiry is not None:
            place.expiry.cancel()
        return True


class _BlockPool(Pool):
    def exhausted(self, wanted: Mapping[GroupId, int]) -> PoolExhausted:
        return PoolExhausted(sum(wanted.values()), self.free_parents)


class BlockQueue(WaitingLine[Mapping[GroupId, int], Blocks]):
    """The line for blocks of the arena."""

    def __init__(self, layout: Layout, http: HttpThread, *, timeout_s: float, max_waiting: int) -> None:
        self._pool = _BlockPool(layout)
        super().__init__(self._pool, http, timeout_s=timeout_s, max_waiting=max_waiting)

    def check(self, counts: Mapping[GroupId, int]) -> None:
        """Raise ConfigError for what an empty pool could not serve."""
        if not self._pool.fits(counts):
            raise ConfigError(f"the prompt needs {sum(counts.values())} blocks, more than the arena can hold")

    def acquire(
        self,
        wanted: Mapping[GroupId, int],
        then: Callable[[Blocks | PoolExhausted], None],
        on_wait: Callable[[], None] = lambda: None,
    ) -> Place[Mapping[GroupId, int], Blocks]:
        """Stand in line. Raises ConfigError for what can never fit, beside what `WaitingLine.acquire` raises."""
        self.check(wanted)
        return super().acquire(wanted, then, on_wait)

    def counts(self) -> dict[str, int]:
        return {
            "free_parents": self._pool.free_parents,
            "used_blocks": sum(self._pool.used_blocks().values()),
            "waiting": self.waiting,
        }


# ---- The sequences that run


class _Seats:
    """Lends places to run: so many at once, and so many bytes of caches."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._count, self._nbytes = count, nbytes
        self.taken = self.used = 0

    def allocate(self, wanted: int) -> int:
        """Lend a place for a cache of so many bytes."""
        if self.taken >= self._count or self.used + wanted > self._nbytes:
            raise self.exhausted(wanted)
        self.taken, self.used = self.taken + 1, self.used + wanted
        return wanted

    def release(self, lent: int) -> None:
        """Take a place back."""
        self.taken, self.used = self.taken - 1, self.used - lent

    def exhausted(self, wanted: int) -> PoolExhausted:
        return PoolExhausted(wanted, self._nbytes - self.used)


class RunningLine(WaitingLine[int, int]):
    """The line for a place to run. Who stands in it keeps its blocks of the arena, so that the line is a short one."""

    def __init__(self, http: HttpThread, *, count: int, nbytes: int, timeout_s: float) -> None:
        self._seats = _Seats(count, nbytes)
        super().__init__(self._seats, http, timeout_s=timeout_s)

    def counts(self) -> dict[str, int]:
        """Return how many run, the bytes that their caches may grow to, and how many wait."""
        return {"sequences": self._seats.taken, "bytes": self._seats.used, "waiting": self.waiting}


# ---- The requests that a node has under way


logger = logging.getLogger(__name__)


class Holding(Protocol):
    """A leg that may hold blocks; `gone` names the users that touch them no more."""

    @property
    def number(self) -> Room: ...

    blocks: Blocks | None
    gone: set[str]

    def cancel(self, text: str, cause: Cause = Cause.CANCELLED) -> None: ...


_USERS = {"room", "engine"}


Leg = TypeVar("Leg", bound=Holding)
AnyLeg = TypeVar("AnyLeg")
Leg_contra = TypeVar("Leg_contra", contravariant=True)
Node = TypeVar("Node", bound="Ending[Any]")
Rest = ParamSpec("Rest")


class Legs(Generic[Leg]):
    """A set of legs. A leg's blocks are free once both its room and the engine have released them, in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[Room, Leg] = {}
        self._idle = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, leg: Leg) -> None:
        """Add a leg. Raises LocalProtocolError when its room is live."""
        with self._lock:
            if leg.number in self._live:
                raise LocalProtocolError(f"room {leg.number} is live", Cause.LIVE)
            self._live[leg.number] = leg

    def remove(self, leg: Leg) -> None:
        with self._lock:
            if self._live.get(leg.number) is leg:
                del self._live[leg.number]
            self._idle.notify_all()

    def hold(self, leg: Leg, blocks: Blocks) -> None:
        with self._lock:
            leg.blocks = blocks

    def release(self, leg: Leg, user: str) -> Blocks | None:
        """Note that `user` touches the blocks no more; return them when nobody does, else None."""
        with self._lock:
            leg.gone.add(user)
            if not leg.gone >= _USERS:
                return None
            blocks, leg.blocks = leg.blocks, None
            return blocks

    def drain(self, timeout_s: float) -> None:
        """Wait until none is left, or the time is over."""
        with self._lock:
            self._idle.wait_for(lambda: not self._live, timeout_s)

    def cancel_all(self, text: str, cause: Cause) -> None:
        with self._lock:
            live = list(self._live.values())
        for leg in live:
            leg.cancel(text, cause)


class Ending(Protocol[Leg_contra]):
    """A node that can end a leg after a bug in one of its steps."""

    def crashed(self, leg: Leg_contra, error: InternalError) -> None: ...


def arrow(step: Callable[Concatenate[Node, AnyLeg, Rest], None]) -> Callable[Concatenate[Node, AnyLeg, Rest], None]:
    """Return a step of a leg that runs as a callback.

    Futures swallow what a callback raises, and the line for blocks would raise it in another leg's thread: without this
    the client would wait for ever.
    """

    @functools.wraps(step)
    def run(node: Node, leg: AnyLeg, /, *args: Rest.args, **named: Rest.kwargs) -> None:
        try:
            step(node, leg, *args, **named)
        except Exception as bug:
            logger.critical("a request ends by a bug in %s", step.__name__, exc_info=bug)
            node.crashed(leg, InternalError(f"a bug of ours ended the request: {bug!r}"))

    return run


def why_ended(role: str, job: Future[Any]) -> Why:
    """Return why the engine's job gave no result; its own text is for people."""
    if job.cancelled():
        return Why(Cause.CANCELLED, f"{role} was cancelled")
    error = job.exception()
    cause = error.cause if isinstance(error, PdplaneError) else Cause.INTERNAL
    return Why(cause, f"{role} failed: {error}")


def check_prompt(engine: Engine, tokens: Sequence[int]) -> None:
    """Raise ConfigError for a prompt that this engine can never serve."""
    engine.check_prompt_len(len(tokens))
    for token in (min(tokens), max(tokens)):
        engine.check_token(token)
