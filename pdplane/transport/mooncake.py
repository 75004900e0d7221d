"""One-sided writes with Mooncake's TransferEngine, as legacy peers use it.

The session is `host:port` of an engine, found by a handshake with that engine; the destination is the
address that the registration named. Writes need no consent at the receiver: no fence holds, nothing is
known to have landed until the writer says so on the control plane, and nothing authenticates. So a receiver here
reports nothing, and the owner of the arena must keep a failed room's blocks out of use for a while.

Needs the extra `mooncake` and Debian's libibverbs1, librdmacm1 and libnuma1; imported only when the scheme
is asked for. Over TCP the engine refuses about a thousand runs in flight, hence small segments: a batch has
no more runs than one, and a segment's border is where a cancelled push ends.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import attrs

from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Endpoint, Life, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.messages import PushKey
from pdplane.net import Wakeup
from pdplane.security import Secret
from pdplane.transport.fence import Fence
from pdplane.transport.framing import FrameKind, Header
from pdplane.transport.greeting import Accepted
from pdplane.transport.line import Dial
from pdplane.transport.receiver import ReceiverSnapshot
from pdplane.transport.reports import OnReport, TransportOptions

BATCH_RUNS = 128
"""Runs of one batch; far below what the engine's TCP lanes hold, with room for other sessions' batches."""
BATCH_BYTES = 8 << 20
"""Bytes of one batch: what is still written after a cancel."""
MAX_RETIRED = 4
"""Unused engines that are kept until the arena's owner closes; more are closed at once, the oldest first."""
MAX_ENDED = 16
"""Ended sessions after which an engine is replaced: it keeps a few descriptors of each."""

_MISSING = (
    "the transport 'mooncake' needs `pip install 'pdplane[mooncake]'` and, on Debian,"
    " `apt-get install libibverbs1 librdmacm1 libnuma1`"
)


def mooncake_options(options: TransportOptions) -> TransportOptions:
    """Return the same settings with segments of one batch."""
    return attrs.evolve(
        options,
        segment_bytes=min(options.segment_bytes, BATCH_BYTES),
        segment_runs=min(options.segment_runs, BATCH_RUNS),
        resume_tries=0,  # an engine has its own timeouts, and nothing counts what it wrote
        checksum="",
    )


def load_mooncake() -> ModuleType:
    """Return Mooncake's module. Raises ConfigError, which says what to install."""
    # It logs a lot on stderr; the environment variable turns that on again.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as missing:
        raise ConfigError(f"{_MISSING} ({missing})") from None


class MooncakeEngine:
    """A TransferEngine with one registered arena."""

    def __init__(self, host: str, arena: Arena, options: TransportOptions) -> None:
        module = load_mooncake()
        protocol, device = options.mooncake_protocol, options.mooncake_device
        self._arena = arena  # kept alive while the engine may touch it
        self._engine: Any = module.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            raise ConfigError(f"mooncake cannot start at {host!r} over {protocol} (device {device or 'any'!r})")
        if self._engine.register_memory(arena.base, arena.nbytes):
            raise ConfigError(f"mooncake cannot register {arena.nbytes} bytes over {protocol}")

    @property
    def port(self) -> int:
        return int(self._engine.get_rpc_port())

    def reaches(self, session: SessionId) -> bool:
        """Return whether an engine answers at the session's address.

        Other sessions of this engine wait meanwhile, the interpreter does not (under `get_first_buffer_address` it
        would). A peer that accepts and sends nothing holds it up for 60 s.
        """
        return int(self._engine.batch_transfer_sync_write(session, [], [], [])) == 0

    def write(self, session: SessionId, parts: Sequence[Copies], target_base: int) -> bool:
        """Write one batch whole, without the interpreter's lock; bounded by the engine's own timeout (30 s)."""
        source = [self._arena.base + offset for part in parts for offset in part.source.tolist()]
        target = [target_base + offset for part in parts for offset in part.destination.tolist()]
        length = [nbytes for part in parts for nbytes in part.length.tolist()]
        return int(self._engine.batch_transfer_sync_write(session, source, target, length)) == 0

    def close(self) -> None:
        """Join its threads and close its sockets; stops the whole process for up to a second."""
        if self._engine is not None:
            self._engine.unregister_memory(self._arena.base)
            self._engine = None  # its destructor keeps the interpreter's lock while its listener's `accept` times out


@attrs.define(eq=False)
class _Shared:
    """An engine of an arena's lines."""

    engine: MooncakeEngine
    arena: Arena
    lines: int = 0  # those that use it
    sessions: set[SessionId] = attrs.field(factory=set)  # those it has opened
    owned: bool = True  # the arena's owner has not closed it

    def suits(self, session: SessionId) -> bool:
        """Return whether the engine can take another session: a new one, and not after too many ended ones."""
        return session not in self.sessions and len(self.sessions) - self.lines < MAX_ENDED


class _Engines:
    """One engine for all senders of an arena: an engine has threads, and registering over RDMA pins the memory.

    An unused engine stays for the next line, since closing one stops the process for up to a second. But an engine
    never forgets a session's addresses, even wrong ones: after a failed write, when a session begins again, or after
    many ended sessions another engine takes its place, and the old one is one of a few that are kept until the owner
    closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Shared] = []  # the oldest first
        self._current: dict[tuple[object, ...], _Shared] = {}

    def acquire(self, host: str, session: SessionId, arena: Arena, options: TransportOptions) -> _Shared:
        key = (arena.base, host, options.mooncake_protocol, options.mooncake_device)
        with self._lock:
            shared = self._current.get(key)
            if shared is None or not shared.suits(session):
                shared = self._current[key] = _Shared(MooncakeEngine(host, arena, options), arena)
                self._open.append(shared)
            shared.lines += 1
        self._sweep()
        return shared

    def retire(self, shared: _Shared) -> None:
        """Use the engine for no other line."""
        with self._lock:
            self._current = {key: other for key, other in self._current.items() if other is not shared}

    def release(self, shared: _Shared) -> None:
        with self._lock:
            shared.lines -= 1
        self._sweep()

    def close_all(self, arena: Arena) -> None:
        """Close the arena's engines; one that a line still uses is closed when that line ends."""
        with self._lock:
            self._current = {key: shared for key, shared in self._current.items() if shared.arena is not arena}
            for shared in self._open:
                if shared.arena is arena:
                    shared.owned = False
        self._sweep()

    def _sweep(self) -> None:
        """Close engines that no line uses or will use: of owned ones all but the newest few, of others all."""
        with self._lock:
            current = list(self._current.values())
            idle = [shared for shared in self._open if not shared.lines and shared not in current]
            owned = [shared for shared in idle if shared.owned]
            over = [shared for shared in idle if not shared.owned] + owned[:-MAX_RETIRED]
            self._open = [shared for shared in self._open if shared not in over]
        for shared in over:
            shared.engine.close()


_engines = _Engines()


def close_engines(arena: Arena) -> None:
    """Close what was kept for an arena's lines, which have ended."""
    _engines.close_all(arena)


class MooncakeLine:
    """A `Line` whose segments are batches of writes; a write that returned is its own acknowledgement.

    A batch takes as long for one small segment as for many. So segments are held until the sender has no more to send
    or they fill a batch, and rooms that are sent together share one.
    """

    def __init__(
        self, peer: Endpoint, session: SessionId, target_base: int, arena: Arena, options: TransportOptions
    ) -> None:
        self._peer, self._session, self._target_base = peer, session, target_base
        self._arena, self._options = arena, options
        self._changed = threading.Condition()
        self._acks: deque[Header] = deque()
        self._written: dict[PushKey, int] = {}
        self._held: list[tuple[Header, Copies]] = []
        self._woken = self._shut = False
        self._wakeup: Wakeup | None = None
        self._shared: _Shared | None = None

    def open(self) -> Accepted:
        """Shake hands with the session's engine; the life in the answer is empty, since no engine names one."""
        host, there = self._probe()  # ours names the engine in its handshakes
        # The engine would look a name up in the middle of a write, for as long as that takes.
        self._session = SessionId(str(there))
        try:
            shared = _engines.acquire(host, self._session, self._arena, self._options)
        except ConfigError as wrong:
            raise ConnectionError(str(wrong)) from None
        self._shared = shared
        if not shared.engine.reaches(self._session):
            raise ConnectionError(f"{self._session}: no mooncake engine answers there")
        shared.sessions.add(self._session)
        return Accepted(0, Life(""), "", "", "", "mooncake")

    def send_segment(self, header: Header, part: Copies) -> None:
        if self._shut or self._shared is None:
            raise ConnectionAbortedError("the sender was closed")
        runs = len(part.length) + sum(len(held.length) for _, held in self._held)
        if runs > self._options.segment_runs or self._held_bytes + part.nbytes > self._options.segment_bytes:
            self._write()
        self._held.append((header, part))

    @property
    def _held_bytes(self) -> int:
        return sum(part.nbytes for _, part in self._held)

    def _write(self) -> None:
        """Write what is held as one batch. Raises ConnectionError."""
        held, nbytes, self._held = self._held, self._held_bytes, []
        if self._shut or self._shared is None:
            raise ConnectionAbortedError("the sender was closed")
        if nbytes and not self._shared.engine.write(self._session, [part for _, part in held], self._target_base):
            _engines.retire(self._shared)
            raise ConnectionError(f"{self._session}: a mooncake write of {nbytes} bytes failed")
        for header, part in held:
            total = self._written.pop(header.key, 0) + part.nbytes
            if header.last:
                with self._changed:
                    self._acks.append(attrs.evolve(header, kind=FrameKind.ACK, count=0, nbytes=total))
            else:
                self._written[header.key] = total

    def send_header(self, header: Header) -> None:
        """Forget a push that was given up."""
        self._held = [(held, part) for held, part in self._held if held.key != header.key]
        self._written.pop(header.key, None)

    def receive(self, timeout_s: float | None) -> list[Header]:
        if self._held and timeout_s != 0:  # the sender has no more to send
            self._write()
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._acks, timeout_s)
            self._woken = False
            acks = list(self._acks)
            self._acks.clear()
            return acks

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    def shutdown(self) -> None:
        """Begin no more batches; the running one cannot be stopped."""
        with self._changed:
            self._shut = True
            if self._wakeup is not None:
                self._wakeup.wake()

    def close(self) -> None:
        if self._shared is not None:
            _engines.release(self._shared)
            self._shared = None

    def _probe(self) -> tuple[str, Endpoint]:
        """Connect without the engine first, which a silent peer (a stopped process) would hold up with all its
        sessions.

        The peer has as long as for a write; its engine may log an incomplete handshake. Returns our address and its.
        """
        wakeup = Wakeup()
        with self._changed:
            self._wakeup = wakeup
        dial = Dial(wakeup, lambda: self._shut, self._options.connect_timeout_s)
        try:
            return dial.probe(self._peer, self._options.send_timeout_s)
        except OSError as error:
            cause = error.strerror or error
            raise ConnectionError(f"{self._session}: no mooncake engine answers there: {cause}") from None
        finally:
            wakeup.close()


class MooncakeReceiver:
    """A `Receiver` that lets any peer write into the whole arena and reports nothing."""

    def __init__(
        self,
        listen: Endpoint,
        session: SessionId | None,
        decode_life: Life,
        fence: Fence,
        secret: Secret | None,
        report: OnReport,
        options: TransportOptions,
    ) -> None:
        del decode_life, secret, report  # a one-sided write asks nobody and reports nothing
        self._listen, self._session = listen, session
        self._arena, self._options = fence.arena, options
        self._engine: MooncakeEngine | None = None
        self._started = False

    @property
    def endpoint(self) -> Endpoint:
        return self._listen

    @property
    def session(self) -> SessionId:
        if self._session is None:
            raise LocalProtocolError("a receiver has no session before it starts")
        return self._session

    def start(self, advertise_host: str | None = None) -> SessionId:
        """Start the engine, which listens on every interface. Raises ConfigError."""
        if self._started:
            raise LocalProtocolError("a receiver starts once")
        self._started = True
        host = advertise_host or self._listen.host
        if ":" in host:
            raise ConfigError(f"mooncake sessions cannot carry the IPv6 address {host}: advertise IPv4 or a name")
        if self._listen.port or self._session is not None:
            raise ConfigError("mooncake chooses its own port, and with it the session; ask for port 0")
        self._engine = MooncakeEngine(host, self._arena, self._options)
        self._listen = Endpoint(self._listen.host, self._engine.port)
        self._session = SessionId(f"{host}:{self._engine.port}")
        return self._session

    def snapshot(self) -> ReceiverSnapshot:
        """Return zeros: the engine keeps its connections to itself."""
        return ReceiverSnapshot(0, 0, 0, 0, 0)

    def trouble(self) -> str | None:
        return None

    def close(self) -> None:
        self._started = True
        if self._engine is not None:
            self._engine.close()
            self._engine = None
