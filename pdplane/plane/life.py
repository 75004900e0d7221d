"""What both planes do between their one start and their one close."""

from __future__ import annotations

import abc
import atexit
import os
import threading
from collections import Counter
from typing import Any, Generic, Self

import attrs

from pdplane.control.http_thread import HttpThread
from pdplane.control.reactor import Action, Event, Reactor
from pdplane.errors import Cause, ConfigError, InternalError, LocalProtocolError
from pdplane.ids import Endpoint, new_life
from pdplane.kv.arena import Arena, ArenaMemory
from pdplane.kv.layout import Layout
from pdplane.machine.decode import DecodeCounts, DecodeMachine
from pdplane.machine.prefill import PrefillCounts, PrefillMachine
from pdplane.plane.config import PlaneConfig
from pdplane.plane.rooms import Handle, Handles, PlaneEvent
from pdplane.transport.registry import is_one_sided

_STATES = {"new": "has not started", "closed": "is closed"}


class PlaneLife(abc.ABC, Generic[Event, Action, Handle]):
    """A plane: started once, closed once, by the process that started it; the constructor opens nothing."""

    role: str

    def __init__(
        self, config: PlaneConfig, layout: Layout, arena: Arena | ArenaMemory, http: HttpThread | None
    ) -> None:
        self.layout = layout
        self.arena = arena if isinstance(arena, Arena) else Arena(arena)
        self.arena.check(layout)
        for scheme in (config.transport, config.legacy_transport):
            if len(self.arena.parts) > 1 and scheme and is_one_sided(scheme):
                raise ConfigError(f"transport {scheme} needs an arena of one allocation, this one spans several")
        self.life = new_life()
        self._http, self._owns_http = http or HttpThread("pdplane-http"), http is None
        self._rejected: Counter[str] = Counter()
        self._handles: Handles[Handle] = Handles(record=config.record_events, max_rooms=config.max_rooms)
        self._reactor: Reactor[Event, Action] | None = None
        self._machine: PrefillMachine | DecodeMachine | None = None
        self._state, self._owner = "new", 0
        self._turnstile = threading.Lock()  # one start, one close

    # ---- for the two planes

    @abc.abstractmethod
    def _open(self) -> None:
        """Open every socket and thread. Raises ConfigError; `_shut` then closes what was opened."""

    @abc.abstractmethod
    def _shut(self, text: str) -> None:
        """Tell the peers, fail what is live, close every socket and thread that was opened."""

    @abc.abstractmethod
    def _more_counts(self) -> dict[str, Any]:
        """Return what this role counts beside its machine."""

    @abc.abstractmethod
    def _more_trouble(self) -> str | None:
        """Return what does not go on of this role's own threads."""

    def _post(self, event: Event, *, wake: bool = True) -> None:
        if self._reactor is not None:
            self._reactor.post(event, wake=wake)

    def _check_open(self) -> None:
        """Raise LocalProtocolError unless the plane runs, in this process."""
        if self._state != "open" or self._reactor is None:
            text = f"the {self.role} plane {_STATES.get(self._state, 'starts')}"
            raise LocalProtocolError(text, Cause.CLOSING)
        if os.getpid() != self._owner:
            raise LocalProtocolError("the plane belongs to another process; after a fork, start one of your own")

    def _bound(self, endpoint: Endpoint | None) -> Endpoint:
        if endpoint is None:
            raise LocalProtocolError(f"the {self.role} plane has no address before it has started")
        return endpoint

    # ---- life

    def start(self) -> None:
        """Open every socket and thread, once in the plane's life.

        Raises ConfigError, with nothing left open, and LocalProtocolError, with nothing changed, for a second start.
        """
        with self._turnstile:
            if self._state != "new":
                raise LocalProtocolError(f"this {self.role} plane was started before: one start, one close")
            self._state, self._owner = "open", os.getpid()
        atexit.register(self.close)  # the peers are told even if the owner forgets to close
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, text: str | None = None) -> None:
        """Fail what is live, tell the peers, join every thread; harmless before `start` and when repeated.

        Raises LocalProtocolError in a callback of one of the plane's futures, and does nothing then.
        """
        if self._reactor is not None and self._reactor.is_current:  # it would wait for itself
            raise LocalProtocolError("a callback of the plane cannot close it: close it on another thread")
        if os.getpid() != self._owner:
            return  # never started, or in a forked child: the sockets belong to its parent
        with self._turnstile:
            if self._state != "open":
                return
            self._state = "closed"
        atexit.unregister(self.close)
        self._shut(text or f"{self.role} is shutting down")

    # ---- state

    @property
    def alive(self) -> bool:
        """Whether the plane is open and its reactor runs."""
        return self._state == "open" and self._reactor is not None and self._reactor.alive

    def trouble(self) -> str | None:
        """Return what does not go on, which names the thread; None while all do, and before `start`."""
        if self._state == "new" or self._reactor is None:
            return None
        if self._state != "open":
            return f"the {self.role} plane is closed"
        return self._reactor.trouble() or self._http.trouble() or self._more_trouble()

    @property
    def ready(self) -> bool:
        """Peers can find and reach this rank."""
        return self.alive

    def poll(self) -> list[PlaneEvent]:
        """Return the events since the last call, for a scheduler's step loop.

        Raises LocalProtocolError without `record_events` in the config. Events that nobody takes for eight times
        `max_rooms` are dropped, the oldest first; an EventsLost then stands before the others.
        """
        return self._handles.poll()

    def statistics(self) -> dict[str, Any]:
        """Return every count, JSON-able; what only grows stands under `totals` and `rejected`.

        Raises LocalProtocolError unless the plane runs.
        """
        self._check_open()
        assert self._reactor is not None
        try:
            found, rejected = self._reactor.ask(self._count)
        except InternalError:
            self._check_open()  # it was closed meanwhile
            raise
        counts = attrs.asdict(found)
        counts["rejected"] = dict(Counter(counts["rejected"]) + rejected)
        counts["handles"] = len(self._handles)
        return counts | self._more_counts()

    def _count(self) -> tuple[PrefillCounts | DecodeCounts, Counter[str]]:
        assert self._machine is not None
        return self._machine.counts(), self._rejected.copy()
