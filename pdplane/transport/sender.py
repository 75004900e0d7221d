"""The sending half of a connection, whatever moves its bytes: one thread, one line at a time.

Each submitted push ends in exactly one `Pushed` or `PushFailed`: acknowledged, refused, cancelled at a
segment border, or failed with the connection. Rooms take turns by segments, so a large one starves nobody;
the pushes of one room go in order. A cut under pushes that nobody cancelled is followed by a new line, over
which they are sent again under the same numbers (`Resumed`), a bounded number of times. A line that is over
reports the failures of its pushes first, then `Disconnected` (or `ConnectFailed`); from then on each push
fails at once until `close`. After the owner's own `close` only pushes are reported.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import attrs

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Generation, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.transport.checksum import checksum_of
from pdplane.transport.fence import Refusal
from pdplane.transport.framing import Header, Kind, segment_number, segments
from pdplane.transport.greeting import Accepted
from pdplane.transport.options import TransportOptions
from pdplane.transport.pushes import Job, Key, Outbox, Push, check_push
from pdplane.transport.reports import Connected, ConnectFailed, Disconnected, OnReport, Pushed, PushFailed, Resumed
from pdplane.transport.shortcut import PULL

_REFUSED = {
    Refusal.CLOSED: "the room's window is closed",
    Refusal.GENERATION: "the room's window has another generation",
    Refusal.WRITER: "this prefill rank and life may not write into the room",
    Refusal.BOUNDS: "the bytes lie outside the room's window",
    Refusal.CHECKSUM: "the bytes were damaged, or their checksum is missing or cannot be checked there",
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
    """A `Sender` over any line; the constructor opens nothing.

    `make_line` is called for the first connection and for each one after a cut. `first_segment` is the number of a
    push's first segment: what several senders send of one push must not share numbers.
    """

    def __init__(
        self,
        make_line: Callable[[], Line],
        session: SessionId,
        arena: Arena,
        report: OnReport,
        options: TransportOptions,
        *,
        first_segment: int = 0,
    ) -> None:
        self._make_line, self._session, self._arena = make_line, session, arena
        self._report, self._options, self._first_segment = report, options, first_segment
        self._outbox = Outbox(options.max_queued)
        self._line = make_line()
        self._accepted: Accepted | None = None
        self._unacknowledged: set[Key] = set()
        self._abandoned: set[Key] = set()
        self._outstanding = 0  # segments that the receiver has yet to read from our memory
        self._progress_s = 0.0
        self._attempts = 0
        self._resumable = True
        self._over = "the connection is over"
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
        if not self.offer(push):
            cause = _CLOSED if self._closing else self._over
            self._report(PushFailed(self._session, push.room, push.generation, push.push, cause))

    def offer(self, push: Push) -> bool:
        """As `submit`, but a push that comes too late is not taken (False) and nothing is reported of it."""
        check_push(push, self._arena.nbytes)
        taken = self._outbox.submit(push)
        if taken:
            self._current().wake()
        return taken

    def cancel(self, room: Room, generation: Generation) -> None:
        """End the room's queued pushes, and the one being sent at its next segment border."""
        self._outbox.cancel(room, generation)
        self._current().wake()

    def stop(self) -> None:
        """Begin to end, without waiting: pushes that are not acknowledged fail, the connection goes down."""
        with self._lock:
            self._closing = True
            line = self._line
        self._outbox.close()
        line.shutdown()
        line.wake()

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

    def _current(self) -> Line:
        with self._lock:
            return self._line

    # ---- the thread

    def _run(self) -> None:
        end: ConnectFailed | Disconnected = Disconnected(self._session, "the sender's thread died")
        died = True
        try:
            end = self._converse()
            while self._resumes(end):
                end = self._resume(end)
            died = False
        finally:  # whatever happened: no push is left without its end, and none comes to a dead thread
            if died:
                self._outbox.close()
            self._end(end)
        self._outbox.wait_closed()

    def _end(self, end: ConnectFailed | Disconnected) -> None:
        self._over = end.cause
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
        self._report(Connected(self._session, accepted.decode_life, accepted.way))
        before, self._accepted = self._accepted, accepted
        if before is not None and before.decode_life != accepted.decode_life:
            self._resumable = False
            return Disconnected(self._session, "another decode answers at the address now")
        try:
            self._pump()
        except OSError as error:
            return Disconnected(self._session, cause_of(error))
        except WireError as error:
            self._resumable = False
            return Disconnected(self._session, cause_of(error))
        return Disconnected(self._session, _CLOSED)

    def _resumes(self, end: ConnectFailed | Disconnected) -> bool:
        """After a cut: whether pushes are left that may be sent again; those that may not have failed."""
        if self._closing or self._accepted is None or not self._resumable:
            return False
        for job in self._outbox.resume(self._options.resume_tries):
            self._fail(job.push, "cancelled" if job.cancelled else end.cause)
        self._over = end.cause
        return not self._outbox.retire() and not self._outbox.wait_closed(self._options.resume_pause_s * self._attempts)

    def _resume(self, cut: ConnectFailed | Disconnected) -> Disconnected:
        """Connect again and send what is left: whole segments that landed before count once."""
        self._line.close()
        self._attempts += 1
        self._unacknowledged.clear()
        self._abandoned.clear()
        self._outstanding = 0
        line = self._make_line()
        with self._lock:
            self._line = line
            closing = self._closing
        if closing:
            line.shutdown()
        self._report(Resumed(self._session, len(self._outbox), cut.cause))
        end = self._converse()
        if isinstance(end, Disconnected):
            return end
        return Disconnected(self._session, f"{cut.cause}, and then: {end.cause}")

    def _pump(self) -> None:
        while not self._closing:
            self._drop_cancelled()
            job = self._outbox.turn() if self._may_send else None
            if job is None:
                self._settle(self._line.receive(self._patience()))
            elif job.refusal is not None:
                self._outbox.sent(job)
                self._fail(job.push, job.refusal)
            else:
                self._transmit(job)

    @property
    def _pulled(self) -> bool:
        """The receiver reads our memory: what it has not read yet must stay as it is."""
        return self._accepted is not None and self._accepted.way == PULL

    @property
    def _may_send(self) -> bool:
        few = len(self._unacknowledged) < self._options.max_unacknowledged
        return few and self._outstanding < self._options.pull_window

    def _patience(self) -> float | None:
        """How long to wait for the next answer; raises TimeoutError when it is overdue."""
        if not self._unacknowledged and not self._abandoned and not self._outstanding:
            return None
        left = self._progress_s + self._options.ack_timeout_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("no acknowledgement came in time")
        return left

    def _transmit(self, job: Job) -> None:
        """Send the push's next segment."""
        push, index = job.push, job.sent
        if not job.parts:
            job.parts = list(segments(push.copies, self._options.segment_bytes, self._options.segment_runs))
        part, last = job.parts[index], index == len(job.parts) - 1
        header = self._header(Kind.SEGMENT, push, index, last=last)
        header = attrs.evolve(header, count=len(part.length), nbytes=part.nbytes, checksum=self._checksum(part))
        job.sent += 1
        if last:
            self._outbox.sent(job)
            self._unacknowledged.add(push.key)
        self._outstanding += self._pulled
        self._line.send_segment(header, part)
        self._progress_s = time.monotonic()
        self._settle(self._line.receive(0))

    def _checksum(self, part: Copies) -> int | None:
        return checksum_of(self._arena, part.source, part.length) if self._options.checksum else None

    def _header(self, kind: Kind, push: Push, index: int, *, last: bool) -> Header:
        number = segment_number(push.push, self._first_segment + index)
        session_number = self._accepted.session_number if self._accepted else 0
        return Header(kind, session_number, push.room, push.generation, number, last=last)

    def _settle(self, answers: list[Header]) -> None:
        for answer in answers:
            self._settle_one(answer, (answer.room, answer.generation, answer.push))
            self._progress_s = time.monotonic()

    def _settle_one(self, answer: Header, key: Key) -> None:
        if answer.kind is Kind.TAKEN and self._outstanding:
            self._outstanding -= 1
        elif answer.kind is Kind.ACK and key in self._abandoned:
            self._abandoned.remove(key)
            if job := self._outbox.finish(key):
                self._report_failure(job.push, "cancelled")
        elif answer.kind is Kind.ACK and key in self._unacknowledged:
            self._unacknowledged.remove(key)
            self._outstanding -= self._pulled
            self._attempts = 0
            if job := self._outbox.finish(key):
                self._conclude(job, answer)
        else:
            raise WireError(
                "ack", f"the receiver acknowledged push {answer.push} of room {answer.room}, not sent to it"
            )

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
            if job.sent:
                self._abandon(job)
            else:
                self._fail(job.push, "cancelled")

    def _abandon(self, job: Job) -> None:
        """The receiver knows of the push, and would count it as unfinished; it may be reading our memory for it."""
        self._line.send_header(self._header(Kind.ABANDON, job.push, job.sent, last=self._pulled))
        if self._pulled:
            self._abandoned.add(job.push.key)
            self._progress_s = time.monotonic()
        else:
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
