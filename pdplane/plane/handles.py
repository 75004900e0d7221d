"""The live handles of a plane by ticket, and what a step loop polls."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from typing import Generic, Protocol, TypeVar

from pdplane.errors import PdplaneError
from pdplane.plane.events import PlaneEvent


class Endable(Protocol):
    """A handle that the plane can fail."""

    @property
    def ticket(self) -> int: ...

    def end(self, error: PdplaneError) -> None: ...


Handle = TypeVar("Handle", bound=Endable)


class Handles(Generic[Handle]):
    """Callers add, the reactor's thread takes out; a handle that was failed as a whole is out as well."""

    def __init__(self, *, record: bool) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Handle] = {}
        self._tickets = itertools.count(1)
        self._record = record
        self._told: deque[PlaneEvent] = deque()
        self._over: PdplaneError | None = None

    def __len__(self) -> int:
        return len(self._live)

    def ticket(self) -> int:
        """The number of a new use of a room, from 1."""
        return next(self._tickets)

    def add(self, handle: Handle) -> None:
        """Keep a handle; one that comes after `fail_all` fails at once, for nobody would end it."""
        with self._lock:
            if self._over is None:
                self._live[handle.ticket] = handle
                return
        handle.end(self._over)

    def get(self, ticket: int) -> Handle | None:
        return self._live.get(ticket)

    def pop(self, ticket: int) -> Handle | None:
        with self._lock:
            return self._live.pop(ticket, None)

    def fail_all(self, error: PdplaneError) -> None:
        """The plane is over: fail every handle, those to come included."""
        with self._lock:
            self._over = self._over or error
            handles, self._live = list(self._live.values()), {}
        for handle in handles:
            handle.end(error)

    def record(self, event: PlaneEvent) -> None:
        if self._record:
            self._told.append(event)

    def poll(self) -> list[PlaneEvent]:
        return [self._told.popleft() for _ in range(len(self._told))]
