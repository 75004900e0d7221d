"""The sending half of a connection, whatever moves its bytes: one thread, one line, pushes in order.

Each submitted push ends in exactly one `Pushed` or `PushFailed`: acknowledged, refused, cancelled at a
segment border, or failed with the connection. A line that is over reports the failures of its pushes
first, then `Disconnected` (or `ConnectFailed`); from then on each push fails at once until `close`. After
the owner's own `close` only pushes are reported.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Generation, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.transport.fence import Refusal
from pdplane.transport.framing import Header, Kind, segment_number, segments
from pdplane.transport.greeting import Accepted
from pdplane.transport.options import TransportOptions
from pdplane.transport.pushes import Job, Key, Outbox, Push, check_push
from pdplane.transport.reports import Connected, ConnectFailed, Disconnected, OnReport, Pushed, PushFailed

_REFUSED = {
    Refusal.CLOSED: "the room's window is closed",
    Refusal.GENERATION: "the room's window has another generation",
    Refusal.WRITER: "this prefill rank and life may not write into the room",
    Refusal.BOUNDS: "the bytes lie outside the room's window",
}
_CLOSED = "the sender was closed"


class Line(Protocol):
    """What carries frames to one receiver. Only `wake` and `shutdown` may be called from other threads.

    Everything else raises OSError or WireError once the connection is of no more use.
    """

    def open(self) -> Accepted:
        """Connect and greet, in bounded time."""

    def send_segment(self, header: Header, part: Copies) -> None:
        """Send one segment whole; bounded by the time without progress."""

    def send_header(self, header: Header) -> None:
        """Send a frame that is only a header."""

    def receive(self, timeout_s: float | None) -> list[Header]:
        """Acknowledgements; waits for one, a wake or the time (None: as long as it takes)."""

    def wake(self) -> None:
        """End the wait of `receive`, now or the next time."""

    def shutdown(self) -> None:
        """Make every other method end at once."""

    def close(self) -> None:
        """Give back what the line holds."""


class PushSender:
    """A `Sender` over any line; the constructor opens nothing."""

    def __init__(
        self, line: Line, session: SessionId, arena: Arena, report: OnReport, options: TransportOptions
    ) -> None:
        self._line, self._session, self._arena = line, session, arena
        self._report, self._options = report, options
        self._outbox = Outbox(options.max_queued)
        self._unacknowledged: set[Key] = set()
        self._session_number = 0
        self._progress_s = 0.0
        self._closing = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the one thread, which connects, greets and sends."""
        with self._lock:
            if self._thread or self._closing:
                raise LocalProtocolError("a sender starts once")
            # A daemon thread: an owner that forgets `close` does not hang the interpreter's exit.
            self._thread = threading.Thread(target=self._run, name=f"push {self._session}", daemon=True)
            self._thread.start()

    def submit(self, push: Push) -> None:
        """Queue a push; never blocks. Raises LocalProtocolError for copies outside the arena or a live number."""
        check_push(push, self._arena.nbytes)
        if self._outbox.submit(push):
            self._line.wake()
        else:
            self._report(PushFailed(self._session, push.room, push.generation, push.push, _CLOSED))

    def cancel(self, room: Room, generation: Generation) -> None:
        """End the room's queued pushes, and the one being sent at its next segment border."""
        self._outbox.cancel(room, generation)
        self._line.wake()

    def stop(self) -> None:
        """Begin to end, without waiting: pushes that are not acknowledged fail, the connection goes down."""
        self._closing = True
        self._outbox.close()
        self._line.shutdown()
        self._line.wake()

    @property
    def ended(self) -> bool:
        """The thread is over: `close` will not wait."""
        return self._thread is None or not self._thread.is_alive()

    def close(self) -> None:
        """Fail every push that is not acknowledged, end the connection and join the thread; idempotent."""
        self.stop()
        with self._lock:
            thread = self._thread
        if thread is None:
            self._fail_all(_CLOSED)
        elif thread is not threading.current_thread():
            thread.join(self._options.close_timeout_s)

    def _run(self) -> None:
        end: ConnectFailed | Disconnected = Disconnected(self._session, "the sender's thread died")
        died = True
        try:
            end = self._converse()
            died = False
        finally:  # whatever happened: no push is left without its end, and none comes to a dead thread
            if died:
                self._outbox.close()
            self._end(end)
        while self._outbox.wait():
            self._fail_all(end.cause)
        self._fail_all(_CLOSED)

    def _end(self, end: ConnectFailed | Disconnected) -> None:
        self._line.close()
        self._fail_all(_CLOSED if self._closing else end.cause)
        if not self._closing:
            self._report(end)

    def _converse(self) -> ConnectFailed | Disconnected:
        try:
            accepted = self._line.open()
        except (OSError, WireError) as error:
            return ConnectFailed(self._session, cause_of(error))
        if self._closing:
            return ConnectFailed(self._session, _CLOSED)
        self._session_number = accepted.session_number
        self._report(Connected(self._session, accepted.decode_life))
        try:
            self._pump()
        except (OSError, WireError) as error:
            return Disconnected(self._session, cause_of(error))
        return Disconnected(self._session, _CLOSED)

    def _pump(self) -> None:
        while not self._closing:
            self._drop_cancelled()
            may_send = len(self._unacknowledged) < self._options.max_unacknowledged
            job = self._outbox.take() if may_send else None
            if job is None:
                self._settle(self._line.receive(self._patience()))
            else:
                self._transmit(job)

    def _patience(self) -> float | None:
        """How long to wait for the next acknowledgement; raises TimeoutError when it is overdue."""
        if not self._unacknowledged:
            return None
        left = self._progress_s + self._options.ack_timeout_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("no acknowledgement came in time")
        return left

    def _transmit(self, job: Job) -> None:
        if job.refusal is not None:
            self._fail(job.push, job.refusal)
            return
        push = job.push
        parts = list(segments(push.copies, self._options.segment_bytes, self._options.segment_runs))
        for index, part in enumerate(parts):
            if job.cancelled or self._closing:
                self._abandon(push, index)
                return
            last = index == len(parts) - 1
            if last:
                self._unacknowledged.add(push.key)
            header = self._header(Kind.SEGMENT, push, index, count=len(part.length), nbytes=part.nbytes, last=last)
            self._line.send_segment(header, part)
            self._progress_s = time.monotonic()
            self._settle(self._line.receive(0))
            self._drop_cancelled()

    def _abandon(self, push: Push, index: int) -> None:
        if index:  # the receiver knows of the push and would count it as unfinished
            self._line.send_header(self._header(Kind.ABANDON, push, index))
        self._fail(push, _CLOSED if self._closing else "cancelled")

    def _header(
        self, kind: Kind, push: Push, index: int, *, count: int = 0, nbytes: int = 0, last: bool = False
    ) -> Header:
        number = segment_number(push.push, index)
        return Header(kind, self._session_number, push.room, push.generation, number, count, nbytes, last)

    def _settle(self, acks: list[Header]) -> None:
        for ack in acks:
            key = (ack.room, ack.generation, ack.push)
            if key not in self._unacknowledged:
                raise WireError("ack", f"the receiver acknowledged push {ack.push} of room {ack.room}, not sent to it")
            self._unacknowledged.remove(key)
            self._progress_s = time.monotonic()
            if job := self._outbox.finish(key):
                self._conclude(job, ack)

    def _conclude(self, job: Job, ack: Header) -> None:
        push = job.push
        if ack.count:
            self._report_failure(push, f"refused: {_REFUSED[Refusal(ack.count)]}")
        elif ack.nbytes != job.nbytes:
            self._report_failure(push, f"{ack.nbytes} of {job.nbytes} bytes landed")
        else:
            self._report(Pushed(self._session, push.room, push.generation, push.push, job.nbytes))

    def _drop_cancelled(self) -> None:
        for job in self._outbox.take_cancelled():
            self._fail(job.push, "cancelled")

    def _fail(self, push: Push, cause: str) -> None:
        if self._outbox.finish(push.key):
            self._report_failure(push, cause)

    def _fail_all(self, cause: str) -> None:
        for job in self._outbox.finish_all():
            self._report_failure(job.push, cause)

    def _report_failure(self, push: Push, cause: str) -> None:
        self._report(PushFailed(self._session, push.room, push.generation, push.push, cause))


def cause_of(error: OSError | WireError) -> str:
    """The error's own words, without an errno."""
    return error.strerror or str(error) if isinstance(error, OSError) else error.reason
