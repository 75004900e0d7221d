"""Several connections to one receiver: large pushes are striped over them, small ones go over one.

Each stream is a sender of its own, with its thread and its place in the bundle. Its part of a push has segment numbers
of its own, so the receiver counts the parts together, and the same push is always cut the same way. A push has ended
when its last part has; the first stream that is over ends all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import attrs
import numpy as np

from pdplane.errors import LocalProtocolError
from pdplane.ids import Generation, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.messages import Push, PushKey
from pdplane.transport.framing import segments
from pdplane.transport.greeting import Bundle
from pdplane.transport.reports import (
    Connected,
    ConnectFailed,
    Disconnected,
    OnReport,
    Pushed,
    PushFailed,
    Report,
    Resumed,
    TransportOptions,
)
from pdplane.transport.sender import Line, PushSender, check_push

STRIPE_BYTES = 1 << 20
"""A part of a push is not made smaller than this."""
_SEGMENTS = 1 << 24  # segment numbers of one stream


@attrs.define
class _Parts:
    """A push of which parts are under way."""

    left: int
    nbytes: int
    cause: str | None = None


class StripedSender:
    """A `Sender` over `options.streams` connections."""

    def __init__(
        self,
        make_line: Callable[[Bundle], Line],
        session: SessionId,
        arena: Arena,
        report: OnReport,
        options: TransportOptions,
    ) -> None:
        self._session, self._arena, self._report = session, arena, report
        bundle = Bundle()
        self._streams = [
            PushSender(
                partial(make_line, attrs.evolve(bundle, stream=stream)),
                session,
                arena,
                self._hear,
                options,
                first_segment=stream * _SEGMENTS,
            )
            for stream in range(options.streams)
        ]
        self._lock = threading.Lock()
        self._pushes: dict[PushKey, _Parts] = {}
        self._connected = 0
        self._end: ConnectFailed | Disconnected | None = None
        self._told = False
        self._closing = False

    def start(self) -> None:
        for stream in self._streams:
            stream.start()

    def submit(self, push: Push) -> None:
        check_push(push, self._arena.nbytes)
        parts = self._cut(push)
        with self._lock:
            if push.key in self._pushes:
                raise LocalProtocolError(f"push {push.push} of room {push.room} is under way already")
            self._pushes[push.key] = _Parts(len(parts), push.copies.nbytes)
        for stream, copies in parts:
            self._streams[stream].submit(attrs.evolve(push, copies=copies))

    def offer(self, push: Push) -> bool:
        """Queue a push as `submit` does; return False, without a report, when a stream is known to be over."""
        if self._end is not None or self._closing:
            return False
        self.submit(push)
        return True

    def cancel(self, room: Room, generation: Generation) -> None:
        for stream in self._streams:
            stream.cancel(room, generation)

    def stop(self) -> None:
        self._closing = True
        for stream in self._streams:
            stream.stop()

    @property
    def ended(self) -> bool:
        return all(stream.ended for stream in self._streams)

    def close(self) -> None:
        self.stop()
        for stream in self._streams:
            stream.close()

    def _cut(self, push: Push) -> list[tuple[int, Copies]]:
        """Return the push's parts with their streams, always the same for the same push."""
        count, nbytes = len(self._streams), push.copies.nbytes
        if nbytes < 2 * STRIPE_BYTES:
            return [(push.push % count, push.copies)]
        stripe = max(-(-nbytes // count), STRIPE_BYTES)
        runs = max(len(push.copies.length), 1) + count
        found = list(segments(push.copies, stripe, runs))
        # Runs are not cut at a stripe's end, so there may be one stripe more than streams.
        return [(stream, _joined(found[stream::count])) for stream in range(min(count, len(found)))]

    def _hear(self, report: Report) -> None:
        match report:
            case Connected():
                with self._lock:
                    self._connected += 1
                    whole = self._connected == len(self._streams)
                if whole:
                    self._report(report)
            case Pushed() | PushFailed():
                self._part_ended(report)
            case ConnectFailed() | Disconnected():
                self._stream_ended(report)
            case Resumed():
                self._report(report)
            case _:
                return

    def _part_ended(self, report: Pushed | PushFailed) -> None:
        key = (report.room, report.generation, report.push)
        with self._lock:
            parts = self._pushes[key]
            parts.left -= 1
            if isinstance(report, PushFailed):
                over = None if self._closing else self._end
                parts.cause = parts.cause or (over.cause if over else report.cause)
            if parts.left:
                return
            del self._pushes[key]
        if parts.cause is None:
            self._report(Pushed(self._session, *key, parts.nbytes))
        else:
            self._report(PushFailed(self._session, *key, parts.cause))
        self._tell_end()

    def _stream_ended(self, report: ConnectFailed | Disconnected) -> None:
        """Stop all streams, since one is over."""
        with self._lock:
            first, self._end = self._end is None, self._end or report
        if first:
            for stream in self._streams:
                stream.stop()
        self._tell_end()

    def _tell_end(self) -> None:
        """Report the end of the connections, once, after that of the pushes."""
        with self._lock:
            end = self._end
            if end is None or self._pushes or self._told or self._closing:
                return
            self._told = True
        if isinstance(end, ConnectFailed) and self._connected >= len(self._streams):
            end = Disconnected(end.session, end.cause)
        self._report(end)


def _joined(parts: list[Copies]) -> Copies:
    columns = ((part.source, part.destination, part.length) for part in parts)
    return Copies(*(np.concatenate(column) for column in zip(*columns, strict=True)))
