"""One loop over the rooms of one rank: poll, agree with the other ranks, act on what was agreed."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from pdplane.errors import PdplaneError, RoomFailed
from pdplane.ids import GroupId, Room
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import logical_slots
from pdplane.messages import StatusCode
from pdplane.testing.interop_events import Events
from pdplane.testing.interop_reduce import Reduce

FAILED: int = StatusCode.FAILED.value
BOOTSTRAPPING: int = StatusCode.BOOTSTRAPPING.value
BOOTSTRAPPED: int = StatusCode.BOOTSTRAPPED.value
SUCCESS: int = StatusCode.SUCCESS.value
NAMES = {code.value: "".join(word.title() for word in code.name.split("_")) for code in StatusCode}

_POLL_S = 0.001  # what no future tells, such as an offer, is noticed so late


class Run(Protocol):
    """One room on this rank."""

    room: Room
    outcome: str | None
    """`success` or `failed` once it has ended on every rank that agrees."""

    @property
    @abstractmethod
    def state(self) -> int:
        """What this rank knows, as a status code."""

    @abstractmethod
    def advance(self, agreed: int) -> None:
        """Act on the state that all ranks have reached; called at every poll until the outcome is known."""


class Alarm:
    """Wakes the loop before its next poll is due."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def watch(self, *futures: Future[Any]) -> None:
        for future in futures:
            future.add_done_callback(lambda _done: self._rung.set())

    def wait(self) -> None:
        self._rung.wait(_POLL_S)
        self._rung.clear()


def drive(
    runs: Sequence[Run], reduce: Reduce, alarm: Alarm, timeout_s: float, poll: Callable[[], None] = lambda: None
) -> None:
    """Until every room has ended or the time is over, then its outcome is `timeout`. `poll` runs before each round."""
    deadline = time.monotonic() + timeout_s
    while any(run.outcome is None for run in runs) and time.monotonic() < deadline:
        poll()
        for run, agreed in zip(runs, reduce.minimum([run.state for run in runs]), strict=True):
            if run.outcome is None:
                run.advance(agreed)
        alarm.wait()
    for run in runs:
        run.outcome = run.outcome or "timeout"


def finish(events: Events, role: str, runs: Sequence[Run], expect: str, **more: object) -> bool:
    """Print the last event; whether every room ended as expected."""
    events("done", role=role, rooms={str(run.room): run.outcome for run in runs}, **more)
    return all(run.outcome == expect for run in runs)


def reason_of(future: Future[Any], default: str = "another rank failed it") -> str:
    """Why a room's future failed."""
    error = future.exception() if future.done() else None
    if isinstance(error, RoomFailed):
        return error.cause
    return str(error) if isinstance(error, PdplaneError) else default


def tables(layout: Layout, blocks: Mapping[GroupId, Sequence[int]], prefix_len: int, prompt_len: int) -> dict[str, Any]:
    """Block ids by slot for each group; -1 where the room has none."""
    found = {}
    for group_id, ids in blocks.items():
        slots = logical_slots(layout.spec(group_id), prefix_len, prompt_len)
        found[str(group_id)] = [-1] * slots.start + list(ids)
    return found
