"""What every receiver is made of, whatever moves its bytes: identity, fence, writers and counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

import attrs

from pdplane.errors import LocalProtocolError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.security import Secret
from pdplane.transport.fence import Fence, Writer
from pdplane.transport.greeting import ReceiverGreeting
from pdplane.transport.landing import Landing, Writers
from pdplane.transport.options import TransportOptions
from pdplane.transport.reports import OnReport, WriterCut


@attrs.frozen
class ReceiverSnapshot:
    """Open connections now, and what was turned away since the start."""

    connections: int
    half_open: int
    refused_connections: int
    refused_greetings: int
    malformed_frames: int
    out_of_descriptors: int = 0
    """Times that a connection had to wait because the process has no free file descriptor."""
    ways: dict[str, int] = attrs.field(factory=dict)
    """Open connections by what carries their bytes: tcp, unix, pull, loopback."""


class Reception:
    """One receiver's identity and counts, shared by its connections."""

    def __init__(
        self,
        session: SessionId | None,
        decode_life: Life,
        fence: Fence,
        secret: Secret | None,
        report: OnReport,
        options: TransportOptions,
    ) -> None:
        self._session, self._decode_life, self._secret = session, decode_life, secret
        self.fence, self.report, self.options = fence, report, options
        self.writers = Writers()
        self.closing = False
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def session(self) -> SessionId:
        if self._session is None:
            raise LocalProtocolError("a receiver has no session before it starts")
        return self._session

    def name_session(self, advertised: Endpoint) -> SessionId:
        """Take the advertised address for the session unless one was given."""
        if self._session is None:
            self._session = SessionId(str(advertised))
        return self._session

    def greeting(self) -> ReceiverGreeting:
        """A fresh greeting for one connection."""
        return ReceiverGreeting(self.session, self._decode_life, self._secret)

    def landing(self, writer: Writer) -> Landing:
        """Fresh books for one connection."""
        return Landing(self.fence, writer, self.report, checksums=bool(self.options.checksum))

    def cut(self, writer: Writer, cause: str) -> None:
        """Report a writer's end, unless it is our own close."""
        if not self.closing:
            self.report(WriterCut(writer.prefill_rank, writer.life, cause))

    def count(self, kind: str) -> None:
        """Count one refusal; `kind` is a field of the snapshot."""
        with self._lock:
            self._counts[kind] += 1

    def snapshot(self, connections: int, half_open: int, ways: Mapping[str, int]) -> ReceiverSnapshot:
        with self._lock:
            return ReceiverSnapshot(
                connections=connections,
                half_open=half_open,
                refused_connections=self._counts["refused_connections"],
                refused_greetings=self._counts["refused_greetings"],
                malformed_frames=self._counts["malformed_frames"],
                out_of_descriptors=self._counts["out_of_descriptors"],
                ways={way: ways[way] for way in sorted(ways) if way and ways[way]},
            )
