"""The one thread that owns a role's sockets and its machine; everybody else posts values to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

import attrs
import zmq

from pdplane.errors import InternalError
from pdplane.machine.actions import WakeAt
from pdplane.machine.events import Tick
from pdplane.net import HELD_UP_S, IDLE_TURN_S, STALLED_S, Pulse, Wakeup


class AwakeClock:
    """A clock that stands still while the thread that owns it cannot run.

    Messages of that time wait in the sockets, so deadlines that passed in it mean nothing. At each `lap` the owner says
    how long it may be busy or wait until the next one; whatever a lap takes beyond that is left out of the time.
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._missed = 0.0
        self._due: float | None = None

    def now(self) -> float:
        return self._read() - self._missed

    def lap(self, allowed_s: float = 0.0) -> float:
        """End the last lap, begin one of at most `allowed_s` and return the time; a longer delay counts as a pause."""
        read = self._read()
        if self._due is not None and (late := read - self._due) > HELD_UP_S:
            self._missed += late
        self._due = read + allowed_s
        return read - self._missed


# ---- The thread


logger = logging.getLogger(__name__)

T = TypeVar("T")
Event = TypeVar("Event")
Action = TypeVar("Action")
Event_co = TypeVar("Event_co", covariant=True)
Event_contra = TypeVar("Event_contra", contravariant=True)
Action_co = TypeVar("Action_co", covariant=True)

_TURN, _TURN_S = 256, 0.02  # messages taken from one socket, or the time, before the others get their turn


class Machine(Protocol[Event_contra, Action_co]):
    """Takes one event and returns the actions that it causes, a WakeAt last when time matters."""

    def handle(self, event: Event_contra, now: float) -> Sequence[Action_co | WakeAt]: ...


class Source(Protocol[Event_co]):
    """A socket that the reactor polls."""

    @property
    def socket(self) -> zmq.Socket[bytes]: ...

    def receive(self) -> Iterable[Event_co]:
        """Return the events of one message, none if it was dropped. Raises zmq.Again without a message.

        Never blocks.
        """


@attrs.frozen
class _Work:
    do: Callable[[], Iterable[Any]]


class Reactor(Generic[Event, Action]):
    """Polls sockets, feeds the machine, hands its actions to `perform`.

    `perform` runs on this thread, must not block, and may return events that its own failures cause.
    `broken` is called once, on this thread, if a bug ends the loop: the owner must then fail everything that waits. One
    event that takes longer than `stalled_s` shows in `trouble`. `tend` looks after the sockets: it is called with the
    time, monotonic and with pauses, and returns when it is due again. The constructor opens nothing; `close` is
    idempotent, bounded and joins.
    """

    def __init__(
        self,
        name: str,
        machine: Machine[Event | Tick, Action],
        perform: Callable[[Action], Iterable[Event]],
        broken: Callable[[Exception], None],
        tend: Callable[[float], float] | None = None,
        *,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._name, self._machine, self._perform, self._broken = name, machine, perform, broken
        self._posted: deque[Event | _Work | None] = deque()
        self._sources: dict[zmq.Socket[bytes], Source[Event]] = {}
        self._poller = zmq.Poller()
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None
        self._wake: float | None = None
        self._clock = AwakeClock()
        self._pulse = Pulse(name, stalled_s)
        self._tend, self._tend_due = tend, 0.0

    # ---- any thread

    def start(self) -> None:
        self._wakeup = Wakeup()
        self._poller.register(self._wakeup.descriptor, zmq.POLLIN)
        # A daemon thread: an owner that forgets `close` does not hang the interpreter's exit.
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def post(self, event: Event, *, wake: bool = True) -> None:
        """Hand an event over; never blocks. After the end it is dropped, since whatever waited has failed by then.

        Without `wake` it is handled with the next event or message, after an idle turn at the latest: for one that
        means nothing before another comes.
        """
        self._posted.append(event)
        if wake:
            self._wake_up()

    def do(self, work: Callable[[], Iterable[Event]]) -> None:
        """Do something on the reactor's thread, and feed the events that it causes; never blocks."""
        self._posted.append(_Work(work))
        self._wake_up()

    def ask(self, question: Callable[[], T], timeout_s: float = 5.0) -> T:
        """Return the answer to a question that is asked on the reactor's thread, where the machine may be read.

        Raises InternalError when the reactor does not answer in time.
        """
        if self.is_current:  # a callback asks, and waiting for itself would never end
            return question()
        answer: Future[T] = Future()

        def put() -> Iterable[Event]:
            answer.set_result(question())
            return ()

        self.do(put)
        try:
            return answer.result(timeout_s if self.alive else 0)
        except TimeoutError:
            raise InternalError(f"{self._name} does not answer") from None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def trouble(self) -> str | None:
        """Return why nothing is handled any more, None while the thread goes on."""
        return self._pulse.trouble(runs=self.alive)

    @property
    def is_current(self) -> bool:
        """The caller runs on the reactor's thread, as callbacks do."""
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float = 5.0) -> None:
        """End after everything that was posted before. Raises InternalError when the thread does not end."""
        if self._thread is None:
            return
        self._posted.append(None)
        self._wake_up()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError(f"{self._name} did not end within {timeout_s:g} s")
        if self._wakeup is not None:
            self._wakeup.close()

    # ---- the reactor's own thread, or before `start`

    def watch(self, source: Source[Event]) -> None:
        self._sources[source.socket] = source
        self._poller.register(source.socket, zmq.POLLIN)

    def unwatch(self, source: Source[Event]) -> None:
        if self._sources.pop(source.socket, None) is not None:
            self._poller.unregister(source.socket)

    # ---- the loop

    def _wake_up(self) -> None:
        if self._wakeup is not None:
            self._wakeup.wake()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:  # a bug must end every wait, not leave it hanging
            logger.critical("%s ended by a bug", self._name, exc_info=error)
            self._broken(error)

    def _turn(self) -> bool:
        self._pulse.beat()
        timeout = self._timeout()
        self._clock.lap(timeout)
        ready = dict(self._poller.poll(int(timeout * 1000) + 1 if timeout else 0))
        self._clock.lap()
        if self._wakeup is not None and self._wakeup.descriptor in ready:
            self._wakeup.clear()
        if not self._take_posted():
            return False
        for ready_socket in ready:
            source = self._sources.get(ready_socket)
            if source is not None:
                self._take_messages(source)
        if self._wake is not None and self._clock.now() >= self._wake:
            self._feed(Tick())
        if self._tend is not None and (now := time.monotonic()) >= self._tend_due:
            self._tend_due = self._tend(now)
        return True

    def _timeout(self) -> float:
        if self._posted:  # without a wake-up, while messages were taken that may need it
            return 0.0
        # No longer than a peer's silence, since of a pause in a wait that much counts as time.
        timeout = IDLE_TURN_S if self._wake is None else min(IDLE_TURN_S, max(0.0, self._wake - self._clock.now()))
        return timeout if self._tend is None else min(timeout, max(0.0, self._tend_due - time.monotonic()))

    def _take_posted(self) -> bool:
        for _ in range(len(self._posted)):
            event = self._posted.popleft()
            if event is None:
                return False
            if isinstance(event, _Work):
                for caused in event.do():
                    self._feed(caused)
            else:
                self._feed(event)
        return True

    def _take_messages(self, source: Source[Event]) -> None:
        until = time.monotonic() + _TURN_S
        for _ in range(_TURN):
            try:
                events = source.receive()
            except zmq.Again:
                return
            for event in events:
                self._feed(event)
            if source.socket.closed or time.monotonic() > until:
                return

    def _feed(self, event: Event | Tick) -> None:
        pending: list[Event | Tick] = [event]
        for each in pending:  # which grows
            self._wake = None
            for action in self._machine.handle(each, self._clock.lap()):
                if isinstance(action, WakeAt):
                    self._wake = action.time
                else:
                    pending.extend(self._perform(action))
