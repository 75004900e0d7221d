"""The sending half of a connection, whatever moves its bytes: one thread, one line at a time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import attrs
import numpy as np

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import Generation, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.messages import Push, PushKey
from pdplane.transport.fence import Refusal
from pdplane.transport.framing import MAX_PUSH, FrameKind, Header, are_inside, checksum_of, segment_number, segments
from pdplane.transport.greeting import PULL, Accepted
from pdplane.transport.reports import (
    Connected,
    ConnectFailed,
    Disconnected,
    OnReport,
    Pushed,
    PushFailed,
    Resumed,
    TransportOptions,
)


@attrs.define(eq=False)
class PendingPush:
    """A submitted push and how far it got.

    `refusal` is set when it may not be sent, `cancelled` when it is to end. `sent` counts the segments of `parts` that
    were sent over this connection, `resumed` the connections that were cut under it.
    """

    push: Push
    nbytes: int
    refusal: str | None = None
    cancelled: bool = False
    parts: list[Copies] = attrs.field(factory=list)
    sent: int = 0
    resumed: int = 0

    def is_over(self, tries: int) -> bool:
        """Return whether this push must fail, rather than be sent again, after a disconnect."""
        return self.cancelled or self.refusal is not None or self.resumed >= tries


class Outbox:
    """Pushes that are not over. Rooms take turns, a room's own pushes keep their order.

    Every method may be called from any thread.
    """

    def __init__(self, max_queued: int) -> None:
        self._lock = threading.RLock()  # of `_changed`, whose own `with` is Python and slower
        self._changed = threading.Condition(self._lock)
        self._max_queued = max_queued
        self._queued: dict[Room, deque[PendingPush]] = {}  # the next room in turn first
        self._count = 0
        self._pending: dict[PushKey, PendingPush] = {}
        self._closed = self._retired = False

    def submit(self, push: Push) -> bool:
        """Queue a push, one beyond the bound as refused; return False when the outbox takes no more."""
        job = PendingPush(push, push.copies.nbytes)
        with self._lock:
            if self._closed or self._retired:
                return False
            if push.key in self._pending:
                raise LocalProtocolError(f"push {push.push} of room {push.room} is under way already")
            if self._count >= self._max_queued:
                job = PendingPush(_without_bytes(push), job.nbytes, refusal="too many pushes are queued")
            self._pending[push.key] = job
            self._enqueue(job)
        return True

    def cancel(self, room: Room, generation: Generation) -> None:
        """Mark a room's pushes that are queued or being sent; those sent whole wait for their acknowledgement."""
        with self._lock:
            for job in self._pending.values():
                if job.push.room == room and job.push.generation == generation:
                    job.cancelled = True

    def turn(self) -> PendingPush | None:
        """Return the push whose next segment is due; its room's next turn comes after all others'."""
        with self._lock:
            for room in self._queued:
                jobs = self._queued[room] = self._queued.pop(room)
                return jobs[0]
            return None

    def sent(self, job: PendingPush) -> None:
        """Go on with the next push of the room, since all of this one is sent or it is over."""
        with self._lock:
            jobs = self._queued.get(job.push.room)
            if jobs and jobs[0] is job:
                jobs.popleft()
                self._count -= 1
                if not jobs:
                    del self._queued[job.push.room]

    def take_cancelled(self) -> list[PendingPush]:
        """Take the cancelled pushes out of the queue and return them."""
        with self._lock:
            cancelled = [job for jobs in self._queued.values() for job in jobs if job.cancelled]
            if cancelled:
                self._requeue([job for jobs in self._queued.values() for job in jobs if not job.cancelled])
            return cancelled

    def resume(self, tries: int) -> list[PendingPush]:
        """Queue again, after a cut, what may be resent, in the order of submission; return the rest."""
        with self._lock:
            jobs = list(self._pending.values())
            over = [job for job in jobs if job.is_over(tries)]
            again = [job for job in jobs if not job.is_over(tries)]
            for job in again:
                job.sent = 0
                job.resumed += 1
            self._requeue(again)
            return over

    def finish(self, key: PushKey) -> PendingPush | None:
        """End a push; return its job the first time, None afterwards."""
        with self._lock:
            return self._pending.pop(key, None)

    def finish_all(self) -> list[PendingPush]:
        """End every push and take no more; return their jobs in the order of submission."""
        with self._lock:
            self._retired = True
            jobs = list(self._pending.values())
            self._pending.clear()
            self._requeue([])
            return jobs

    def wait_closed(self, timeout_s: float | None = None) -> bool:
        """Wait for `close`; return False when the time is over first."""
        with self._lock:
            return self._changed.wait_for(lambda: self._closed, timeout_s)

    def retire(self) -> bool:
        """Take no more pushes if none is pending; return whether that was so."""
        with self._lock:
            self._retired = self._retired or not self._pending
            return self._retired

    def close(self) -> None:
        """Take no more pushes; ends every `wait`."""
        with self._lock:
            self._closed = True
            self._changed.notify()

    def __len__(self) -> int:
        """Return how many pushes are not over."""
        with self._lock:
            return len(self._pending)

    def _enqueue(self, job: PendingPush) -> None:
        self._queued.setdefault(job.push.room, deque()).append(job)
        self._count += 1

    def _requeue(self, jobs: list[PendingPush]) -> None:
        self._queued, self._count = {}, 0
        for job in jobs:
            self._enqueue(job)


def _without_bytes(push: Push) -> Push:
    nothing = np.empty(0, np.uint64)
    return attrs.evolve(push, copies=Copies(nothing, nothing, nothing))


def check_push(push: Push, arena_nbytes: int) -> None:
    """Raise LocalProtocolError unless every run has a length and lies whole inside the source arena."""
    if not 0 <= push.push <= MAX_PUSH:
        raise LocalProtocolError(f"push number {push.push} is not a u32")
    copies = push.copies
    if not len(copies.source) == len(copies.destination) == len(copies.length):
        raise LocalProtocolError("the arrays of copies differ in length")
    if not copies.length.all() or not are_inside(copies.source, copies.length, arena_nbytes):
        raise LocalProtocolError(f"a run of push {push.push} is empty or leaves the arena of {arena_nbytes} bytes")


# ---- The sender
#
# Each submitted push ends in exactly one `Pushed` or `PushFailed`: acknowledged, refused, cancelled at a segment
# border, or failed with the connection. Rooms take turns by segments, so a large one holds up no other; the pushes of
# one room go in order. When a connection is cut under pushes that are not cancelled, a new line sends them again
# under the same numbers (`Resumed`), a bounded number of times. A line that is over reports the failures of its
# pushes first, then `Disconnected` (or `ConnectFailed`); from then on each push fails at once until `close`. After
# the owner's own `close` only pushes are reported.


_REFUSED = {
    Refusal.CLOSED: "the room's window is closed",
    Refusal.GENERATION: "the room's window has another generation",
    Refusal.WRITER: "this prefill rank and life may not write into the room",
    Refusal.BOUNDS: "the bytes lie outside the room's window",
    Refusal.CHECKSUM: "the bytes were damaged, or their checksum is missing or cannot be checked there",
}
_CLOSED = "the sender was closed"


class Line(Protocol):
    """A connection that carries frames to one receiver. Only `wake` and `shutdown` may be called from other threads.

    Every other method raises OSError or WireError once the connection has failed.
    """

    def open(self) -> Accepted:
        """Connect and greet, in bounded time."""

    def send_segment(self, header: Header, part: Copies) -> None:
        """Send one segment whole; bounded by the time without progress."""

    def send_header(self, header: Header) -> None:
        """Send a frame that is only a header."""

    def receive(self, timeout_s: float | None) -> list[Header]:
        """Wait for acknowledgements, a wake-up or the time (None: without limit); return what came."""

    def wake(self) -> None:
        """End the wait of `receive`, now or the next time."""

    def shutdown(self) -> None:
        """Make every other method end at once."""

    def close(self) -> None:
        """Close what the line has open."""


class PushSender:
    """A `Sender` over any line; the constructor opens nothing.

    `make_line` is called for the first connection and for each one after a cut. `first_segment` is the number of a
    push's first segment: several senders of one push must not use the same numbers.
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
        self._unacknowledged: set[PushKey] = set()
        self._abandoned: set[PushKey] = set()
        self._outstanding = 0  # segments that the receiver has still to read from our memory
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
        """Queue a push as `submit` does; return False, without a report, when the connection is over."""
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
        """End the connection without waiting; pushes that are not acknowledged fail."""
        with self._lock:
            self._closing = True
            line = self._line
        self._outbox.close()
        line.shutdown()
        line.wake()

    @property
    def ended(self) -> bool:
        """Whether the thread is over, so that `close` does not wait."""
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
        finally:  # after a bug too: every push must end, and none may be queued for a dead thread
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
        """Fail the pushes that may not be resent after a cut; return whether others are left."""
        if self._closing or self._accepted is None or not self._resumable:
            return False
        for job in self._outbox.resume(self._options.resume_tries):
            self._fail(job.push, "cancelled" if job.cancelled else end.cause)
        self._over = end.cause
        return not self._outbox.retire() and not self._outbox.wait_closed(self._options.resume_pause_s * self._attempts)

    def _resume(self, cut: ConnectFailed | Disconnected) -> Disconnected:
        """Connect again and send what is left; return how that connection ended.

        Segments that landed before count once.
        """
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
        """Whether the receiver reads our memory, so that what it has not read yet must stay as it is."""
        return self._accepted is not None and self._accepted.way == PULL

    @property
    def _may_send(self) -> bool:
        few = len(self._unacknowledged) < self._options.max_unacknowledged
        return few and self._outstanding < self._options.pull_window

    def _patience(self) -> float | None:
        """Return how long to wait for the next answer. Raises TimeoutError when it is overdue."""
        if not self._unacknowledged and not self._abandoned and not self._outstanding:
            return None
        left = self._progress_s + self._options.ack_timeout_s - time.monotonic()
        if left <= 0:
            raise TimeoutError("no acknowledgement came in time")
        return left

    def _transmit(self, job: PendingPush) -> None:
        """Send the push's next segment."""
        push, index = job.push, job.sent
        if not job.parts:
            job.parts = list(segments(push.copies, self._options.segment_bytes, self._options.segment_runs))
        part, last = job.parts[index], index == len(job.parts) - 1
        header = self._header(FrameKind.SEGMENT, push, index, part, last=last)
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

    def _header(self, kind: FrameKind, push: Push, index: int, part: Copies | None = None, *, last: bool) -> Header:
        number = segment_number(push.push, self._first_segment + index)
        session_number = self._accepted.session_number if self._accepted else 0
        if part is None:
            return Header(kind, session_number, push.room, push.generation, number, last=last)
        counts = len(part.length), part.nbytes
        return Header(kind, session_number, push.room, push.generation, number, *counts, last, self._checksum(part))

    def _settle(self, answers: list[Header]) -> None:
        for answer in answers:
            self._settle_one(answer, answer.key)
            self._progress_s = time.monotonic()

    def _settle_one(self, answer: Header, key: PushKey) -> None:
        if answer.kind is FrameKind.TAKEN and self._outstanding:
            self._outstanding -= 1
        elif answer.kind is FrameKind.ACK and key in self._abandoned:
            self._abandoned.remove(key)
            if job := self._outbox.finish(key):
                self._report_failure(job.push, "cancelled")
        elif answer.kind is FrameKind.ACK and key in self._unacknowledged:
            self._unacknowledged.remove(key)
            self._outstanding -= self._pulled
            self._attempts = 0
            if job := self._outbox.finish(key):
                self._conclude(job, answer)
        else:
            raise WireError(
                "ack", f"the receiver acknowledged push {answer.push} of room {answer.room}, not sent to it"
            )

    def _conclude(self, job: PendingPush, ack: Header) -> None:
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

    def _abandon(self, job: PendingPush) -> None:
        """Tell the receiver to forget a push that it has part of; it may be reading our memory for it."""
        self._line.send_header(self._header(FrameKind.ABANDON, job.push, job.sent, last=self._pulled))
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
    """Return the error's text without its errno."""
    return error.strerror or str(error) if isinstance(error, OSError) else error.reason
