"""The requests that a node has under way."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from pdplane.errors import InternalError, LocalProtocolError
from pdplane.ids import Room
from pdplane.node.blocks import Blocks
from pdplane.node.protocols import Engine

logger = logging.getLogger(__name__)

T = TypeVar("T")


def open_future() -> Future[T]:
    """A future that only the node ends: cancelling an asyncio wrapper must not reach it."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


class Holding(Protocol):
    """A leg that may hold blocks; `gone` names who touches them no more."""

    @property
    def number(self) -> Room: ...

    blocks: Blocks | None
    gone: set[str]

    def cancel(self, cause: str) -> None: ...


_USERS = {"room", "engine"}


Leg = TypeVar("Leg", bound=Holding)
AnyLeg = TypeVar("AnyLeg")
Leg_contra = TypeVar("Leg_contra", contravariant=True)
Node = TypeVar("Node", bound="Ending[Any]")
Rest = ParamSpec("Rest")


class Legs(Generic[Leg]):
    """A set of legs. A leg's blocks go back once both its room and the engine have let them go, in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: dict[Room, Leg] = {}
        self._idle = threading.Condition(self._lock)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, leg: Leg) -> None:
        """Raises LocalProtocolError when the room is live: one use at a time."""
        with self._lock:
            if leg.number in self._live:
                raise LocalProtocolError(f"room {leg.number} is live")
            self._live[leg.number] = leg

    def remove(self, leg: Leg) -> None:
        with self._lock:
            if self._live.get(leg.number) is leg:
                del self._live[leg.number]
            self._idle.notify_all()

    def hold(self, leg: Leg, blocks: Blocks) -> None:
        with self._lock:
            leg.blocks = blocks

    def let_go(self, leg: Leg, user: str) -> Blocks | None:
        """`user` touches the blocks no more; gives them when nobody does."""
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

    def cancel_all(self, cause: str) -> None:
        with self._lock:
            live = list(self._live.values())
        for leg in live:
            leg.cancel(cause)


class Ending(Protocol[Leg_contra]):
    """A node that can end a leg whose step broke."""

    def crashed(self, leg: Leg_contra, error: InternalError) -> None: ...


def arrow(step: Callable[Concatenate[Node, AnyLeg, Rest], None]) -> Callable[Concatenate[Node, AnyLeg, Rest], None]:
    """A step of a leg that runs as a callback.

    Futures swallow what a callback raises, and the line for blocks must not hand one leg's bug to another: without
    this the client would wait for ever.
    """

    @functools.wraps(step)
    def run(node: Node, leg: AnyLeg, /, *args: Rest.args, **named: Rest.kwargs) -> None:
        try:
            step(node, leg, *args, **named)
        except Exception as bug:
            logger.critical("a request ends by a bug in %s", step.__name__, exc_info=bug)
            node.crashed(leg, InternalError(f"a bug of ours ended the request: {bug!r}"))

    return run


def check_prompt(engine: Engine, tokens: Sequence[int]) -> None:
    """Raise ConfigError for a prompt that this engine can never serve."""
    engine.check_prompt_len(len(tokens))
    for token in (min(tokens), max(tokens)):
        engine.check_token(token)
