"""A model split over ranks: the messages between rank 0 and the other ranks, and their nodes."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs

from pdplane.api import DecodeRequest, Finished, FirstToken, PrefillRequest, Sampling, Token, Tokenizer
from pdplane.control.ranks import Message, RankLink
from pdplane.errors import Cause, ConfigError, LocalProtocolError, PdplaneError, RoomFailed, Why
from pdplane.ids import Endpoint, Room
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.rooms import open_future

Request: TypeAlias = PrefillRequest | DecodeRequest
Tell: TypeAlias = Callable[[str, int, str], None]
OnBroken: TypeAlias = Callable[[str], None]


class SharedThread(Protocol):
    """What a node needs of the engine's thread on a rank; see `pdplane.engine.ranks.RankThread`."""

    def connect(self, tell: Tell, broken: OnBroken) -> None: ...

    def expect(self, key: int) -> Future[None]: ...

    def forget(self, key: int) -> None: ...

    def arrived(self, rank: int, key: int, mark: str) -> None: ...

    def abandon(self, key: int) -> None: ...

    def turn(self, key: int) -> None: ...

    def end(self, key: int) -> None: ...


def write_why(error: BaseException) -> str:
    """Return why a leg failed as one text, without the room and its story, of which every rank has its own."""
    why = error.why if isinstance(error, PdplaneError) else Why(Cause.INTERNAL, str(error))
    return f"{why.cause.value} {why.text}"


def read_why(text: str) -> Why:
    """Return why a leg failed on another rank."""
    word, _, rest = text.partition(" ")
    return Why(Cause.read(word, Cause.INTERNAL), rest)


def write_request(request: Request) -> str:
    """Return the request as JSON."""
    if isinstance(request, PrefillRequest):
        return json.dumps({"tokens": request.tokens, "sampling": attrs.asdict(request.sampling)})
    return json.dumps(
        {
            "tokens": request.tokens,
            "prefill": str(request.prefill),
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "stop_ids": sorted(request.stop_ids),
            "sampling": attrs.asdict(request.sampling),
        }
    )


def read_request(room: int, text: str) -> Request:
    """Return the request. Raises ValueError, KeyError or TypeError for what rank 0 would not write."""
    found = json.loads(text)
    tokens = tuple(map(int, found["tokens"]))
    asked = found["sampling"]
    sampling = Sampling(**(asked | {"logit_bias": tuple((token, bias) for token, bias in asked["logit_bias"])}))
    if "prefill" not in found:
        return PrefillRequest(Room(room), tokens, sampling)
    return DecodeRequest(
        Room(room),
        tokens,
        Endpoint.parse(found["prefill"]),
        int(found["max_tokens"]),
        bool(found["ignore_eos"]),
        frozenset(map(int, found["stop_ids"])),
        sampling,
    )


# ---- Rank 0: it passes each request on to all ranks and counts their answers
#
# One thread takes all events, of this rank and the others, in one order. So all ranks stand in line for blocks in the
# same order, and no two rooms hold blocks on one rank each while they wait for the other's.


logger = logging.getLogger(__name__)

T = TypeVar("T")

_PARTING_S = 10.0


class Handle(Protocol[T]):
    """A leg on this rank."""

    done: Future[T]
    timings: dict[str, float]
    cached_tokens: int

    def cancel(self, text: str, cause: Cause = Cause.CANCELLED) -> None: ...


@attrs.define(eq=False)
class SharedLeg(Generic[T]):
    """One request on all ranks; `done` ends when each of them has ended its part."""

    room: Room
    here: Handle[T]
    waits_for: set[int]
    done: Future[T] = attrs.field(factory=open_future)
    offered: set[int] = attrs.field(factory=set)
    go_on: Callable[[], None] | None = None
    failure: RoomFailed | None = None

    @property
    def timings(self) -> Mapping[str, float]:
        return self.here.timings

    @property
    def cached_tokens(self) -> int:
        return self.here.cached_tokens

    def cancel(self, text: str, cause: Cause = Cause.CANCELLED) -> None:
        """End the leg on every rank; return at once."""
        self.here.cancel(text, cause)


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
        """Set when a rank was asked to stop; running requests may finish."""

    def start(self, links: Sequence[RankLink], on_lost: Callable[[str], None]) -> None:
        """Take messages of the other ranks.

        `on_lost` is called once, with the reason why they cannot go on together.
        """

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
        """Send a message to every other rank."""
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
                raise LocalProtocolError(f"room {request.room} is live", Cause.LIVE)
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
        """Note that this rank has its offer; `go_on` is called when all have."""

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
        """Leave the other ranks, which end too, and fail what is left; idempotent."""
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
        why = Why(Cause.PEER_LOST, self.trouble) if self.trouble else Why(Cause.CLOSING, "the ranks part")
        for leg in list(self._legs.values()):
            self._finish(leg, RoomFailed(leg.room, why.cause, why.text))

    # ---- what happens, in one order

    def _post(self, rank: int, message: Message) -> None:
        self._events.put(lambda: self._heard(rank, message))

    def _work(self, lost: Callable[[str], None]) -> None:
        event: Callable[[], None] | None = None
        try:
            while (event := self._events.get()) is not None:
                event()
        finally:
            if event is not None:  # a bug of ours, whose traceback follows: without this thread the ranks must end
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
            why = read_why(text)
            leg.failure = leg.failure or RoomFailed(leg.room, why.cause, f"rank {rank}: {why.text}")
            leg.cancel(why.text, why.cause)
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
            self.tell("cancel", leg.room, write_why(error))
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


# ---- The node of rank 0, which stands for all ranks towards HTTP


Meet = Callable[[], Sequence[RankLink]]
"""Meets the other ranks; blocks until all are there and raises ConfigError."""


class Lead:
    """What both roles' rank 0 has in common.

    `on_lost` is called once, with the reason why the ranks cannot go on together.
    """

    def __init__(
        self, node: PrefillNode | DecodeNode, ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]
    ) -> None:
        self._inner, self._ranks, self._meet, self._on_lost = node, ranks, meet, on_lost
        self._draining = False

    def start(self) -> None:
        """Meet the other ranks, load this one's part, open the plane. Raises ConfigError with nothing left open."""
        self._ranks.start(self._meet(), self._on_lost)
        self._inner.start()
        found = self._inner.info()
        if "bootstrap_port" in found:
            self._ranks.tell("rendezvous", int(found["bootstrap_port"]), str(found["bootstrap_host"]))

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more, wait up to `drain_s` for what runs, end the rest on every rank; idempotent."""
        self._draining = True
        self._inner.drain()
        self._ranks.wait_idle(drain_s)
        self._inner.close()
        self._ranks.close()

    @property
    def ready(self) -> bool:
        """Whether all ranks are ready."""
        return not self._draining and self.alive and self._inner.ready and self._ranks.all_up

    @property
    def alive(self) -> bool:
        return self._inner.alive and self._ranks.trouble is None and not self._ranks.parting

    def trouble(self) -> str | None:
        """Return what does not go on, here or on another rank."""
        return self._ranks.trouble or self._inner.trouble()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._inner.tokenizer

    def info(self) -> dict[str, Any]:
        return self._inner.info()

    def statistics(self) -> dict[str, Any]:
        """Return the counts of this rank, and the number of legs that any rank has."""
        return {**self._inner.statistics(), "shared_legs": len(self._ranks)}

    def _check(self) -> None:
        if self._draining or not self._ranks.all_up:
            raise LocalProtocolError("the ranks take no requests now", Cause.CLOSING)


class LeadPrefill(Lead):
    """Rank 0 of prefill."""

    def __init__(self, node: PrefillNode, ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]) -> None:
        super().__init__(node, ranks, meet, on_lost)
        self._node = node

    def prefill(self, request: PrefillRequest) -> SharedLeg[FirstToken]:
        """Begin a prefill leg on every rank; errors as for `PrefillNode.prefill`."""
        self._check()
        return self._ranks.begin(request, lambda: self._node.prefill(request))

    def refuse(self, request: PrefillRequest, why: Why) -> None:
        """Tell decode that this half will not be served; a room that ends here ends for decode."""
        self._node.refuse(request, why)


class LeadDecode(Lead):
    """Rank 0 of decode."""

    def __init__(self, node: DecodeNode, ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]) -> None:
        super().__init__(node, ranks, meet, on_lost)
        self._node = node

    def decode(self, request: DecodeRequest, on_token: Callable[[Token], None]) -> SharedLeg[Finished]:
        """Begin a decode leg on every rank; errors as for `DecodeNode.decode`."""
        self._check()
        return self._ranks.begin(request, lambda: self._node.decode(request, on_token))

    def refuse(self, request: DecodeRequest, why: Why) -> None:
        """Tell prefill that this half will not be served; a room that ends on one rank ends on all."""
        self._node.refuse(request, why)


# ---- A rank that is not rank 0: it does what rank 0 says and reports the result


BeginLeg = Callable[[Request], Handle[Any]]
"""Begins a leg on this rank; raises PdplaneError."""

_MEETING_S = 600.0  # rank 0 reads its part of a large model as we do


@attrs.define(eq=False)
class FollowedLeg:
    """One request on this rank; it ends when both its leg and its shared job have."""

    room: Room
    ends_left: int = 2
    here: Handle[Any] | None = None
    go_on: Callable[[], None] | None = None


class Follower:
    """Takes rank 0's messages. `bye` ends when rank 0 leaves; `on_lost` is called with why we cannot go on with it."""

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
        """Take messages; requests come only after `up`."""
        self._thread.connect(self._link.send, self._lost)
        self._link.start(self._heard, self._lost)

    def rendezvous(self) -> Endpoint:
        """Return the address of rank 0's rendezvous, once that is open. Raises ConfigError when rank 0 ends before."""
        try:
            return self._rendezvous.result(_MEETING_S)
        except TimeoutError as error:
            raise ConfigError(f"rank 0 did not open its rendezvous within {_MEETING_S:g} s") from error

    def up(self, begin: BeginLeg) -> None:
        """Report that this rank can serve."""
        self._begin = begin
        self._link.send("up")

    def leave(self) -> None:
        """Report that this rank was asked to stop, so that rank 0 ends what runs and sends `bye`."""
        self._link.send("leave")

    def close(self) -> None:
        """Leave rank 0; idempotent."""
        self._link.close()

    def gate(self, room: Room, go_on: Callable[[], None]) -> None:
        """Report that this rank has its offer; `go_on` is called when rank 0 says that all have."""
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
            why = read_why(text)
            leg.here.cancel(why.text, why.cause)

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
            self._link.send("failed", room, write_why(error))
            self._one_end(leg)
            return
        leg.here.done.add_done_callback(lambda done: self._ended(leg, done))

    def _ended(self, leg: FollowedLeg, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            self._link.send("failed", leg.room, write_why(error))
        self._one_end(leg)

    def _one_end(self, leg: FollowedLeg) -> None:
        with self._lock:
            leg.ends_left -= 1
            if leg.ends_left:
                return
            del self._legs[leg.room]
        self._thread.forget(leg.room)
        self._link.send("done", leg.room)
