"""The data connections of a prefill rank: one a session's life, opened when first needed, owned by the reactor."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any, Protocol

import attrs

from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.machine import events
from pdplane.machine.actions import CancelPush, OpenData, StartPush
from pdplane.messages import Push, PushKey
from pdplane.net import Complaints
from pdplane.plane.config import PrefillConfig
from pdplane.transport import reports
from pdplane.transport.registry import Sender, close_shared, is_one_sided, open_sender, require_transport

logger = logging.getLogger(__name__)


class Post(Protocol):
    """Hands an event to the reactor, which handles it with a later one unless it is woken."""

    def __call__(self, event: events.PrefillEvent, *, wake: bool = True) -> None: ...


@attrs.define
class _DataConnection:
    sender: Sender
    way: str = ""
    over: bool = False
    retired: bool = False  # closed by us, so that its end is not reported
    began: dict[PushKey, float] = attrs.field(factory=dict)  # when each push under way was submitted
    ended: float = 0.0  # the last one
    _under_way: Counter[tuple[Room, Generation]] = attrs.field(factory=Counter)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def offer(self, push: Push) -> bool:
        """Return whether the sender took the push; it takes none once its connection is over."""
        self._begin(push)
        taken = self.sender.offer(push)
        if not taken:
            self.end(push.room, push.generation)
        return taken

    def submit(self, push: Push) -> None:
        self._begin(push)
        self.sender.submit(push)

    def end(self, room: Room, generation: Generation) -> bool:
        """Count a push as over; return whether it was the last one of its use that is under way here."""
        with self._lock:
            left = self._under_way[room, generation] = self._under_way[room, generation] - 1
            if left <= 0:
                del self._under_way[room, generation]
            return left <= 0

    def _begin(self, push: Push) -> None:
        self.began[push.key] = time.monotonic()
        with self._lock:
            self._under_way[push.room, push.generation] += 1


@attrs.define
class _Traffic:
    """Bytes that were acknowledged, and seconds in which each connection had a push under way, summed over all."""

    pushed_bytes: int = 0
    push_seconds: float = 0.0
    resumed: int = 0  # cuts whose pushes were sent again

    def add(self, connection: _DataConnection, key: PushKey, nbytes: int, now: float) -> None:
        began = connection.began.pop(key, now)
        self.pushed_bytes += nbytes
        self.push_seconds += now - max(began, connection.ended)  # time that two pushes share counts once
        connection.ended = now


class Senders:
    """The senders by session and life. Everything runs on the reactor's thread except the reports, which only post."""

    def __init__(self, config: PrefillConfig, arena: Arena, life: Life, post: Post) -> None:
        self._config, self._arena, self._life, self._post = config, arena, life, post
        self._legacy_scheme = config.legacy_transport or config.transport
        self._one_sided = {scheme: is_one_sided(scheme) for scheme in (config.transport, self._legacy_scheme)}
        self._connections: dict[tuple[SessionId, Life], _DataConnection] = {}
        self._lock = threading.Lock()
        self._complaints = Complaints(logger)
        self._traffic = _Traffic()
        self._ending: list[Sender] = []  # stopped; a slow name look-up may keep a thread for a while

    def __len__(self) -> int:
        return len(self._connections)

    def counts(self) -> dict[str, Any]:
        """Count open connections by what carries their bytes, and the traffic so far."""
        ways = Counter(connection.way for connection in list(self._connections.values()) if not connection.over)
        with self._lock:
            totals = attrs.asdict(self._traffic)
        return {"ways": {way: ways[way] for way in sorted(ways) if way}, "totals": totals}

    def check(self) -> None:
        """Raise ConfigError when a transport cannot work here, rather than at the first session."""
        for scheme in self._one_sided:
            require_transport(scheme)

    def open(self, action: OpenData) -> list[events.PrefillEvent]:
        """Connect, to learn which life answers at the session's address; return an event if that cannot be tried."""
        self._sweep()
        session, life = action.session, action.life
        try:
            self._connect(session, life, action.arena_base)
        except ConfigError as wrong:
            return [events.DataLost(session, life, str(wrong))]
        return []

    def push(self, action: StartPush) -> list[events.PrefillEvent]:
        """Queue a push on its session's connection; connect again if the last one is over."""
        push = action.push
        try:
            connection = self._connections.get((action.session, action.life))
            if connection is None or connection.over or not connection.offer(push):
                connection = self._connect(action.session, action.life, action.arena_base, expected=action.life or None)
                connection.submit(push)
        except (ConfigError, LocalProtocolError) as wrong:
            return [events.PushEnded(action.session, push.room, push.generation, push.push, str(wrong))]
        return []

    def cancel(self, action: CancelPush) -> None:
        if connection := self._connections.get((action.session, action.life)):
            connection.sender.cancel(action.room, action.generation)

    def close(self, session: SessionId, life: Life) -> None:
        """Stop a connection without waiting: this is the reactor's thread, and the other end may be stuck."""
        if connection := self._connections.pop((session, life), None):
            connection.retired = True
            connection.sender.stop()
            self._ending.append(connection.sender)

    def close_all(self) -> None:
        """End every connection and join their threads; after the reactor's end."""
        for key in list(self._connections):
            self.close(*key)
        for sender in self._ending:
            sender.close()
        self._ending.clear()
        for scheme, one_sided in self._one_sided.items():
            if one_sided:
                close_shared(scheme, self._arena)

    def _connect(
        self, session: SessionId, life: Life, arena_base: int, expected: Life | None = None
    ) -> _DataConnection:
        self.close(session, life)
        try:
            peer = Endpoint.parse(session)
        except ValueError as wrong:
            raise ConfigError(f"session {session!r} is no data address: {wrong}") from None
        connection: _DataConnection
        scheme = self._config.transport if life else self._legacy_scheme
        # A one-sided transport learns of no life, so the registered one is assumed.
        believed = life if self._one_sided[scheme] else None
        lacks = "" if life else self._config.legacy_lacks
        sender = open_sender(
            scheme,
            peer=peer,
            session=session,
            prefill_rank=Rank(self._config.tp_rank),
            prefill_life=self._life,
            arena=self._arena,
            report=lambda report: self._hear(connection, life, believed, report, lacks),
            secret=self._config.secret,
            decode_life=expected,
            options=self._config.transport_options,
            target_base=arena_base,
        )
        connection = self._connections[session, life] = _DataConnection(sender)
        sender.start()
        return connection

    def _sweep(self) -> None:
        self._ending = [sender for sender in self._ending if not sender.ended]
        for key in [key for key, connection in self._connections.items() if connection.over]:
            self.close(*key)

    def _hear(
        self, connection: _DataConnection, life: Life, believed: Life | None, report: reports.Report, lacks: str
    ) -> None:
        because = f" ({lacks})" if lacks else ""
        match report:
            case reports.Connected(session, decode_life, way) if not connection.retired:
                connection.way = way
                self._complaints.tell((session, way), "data connection to %s over %s", session, way, level=logging.INFO)
                self._post(events.DataConnected(session, life, decode_life if believed is None else believed))
            case reports.Pushed(session, room, generation, push, nbytes):
                with self._lock:
                    self._traffic.add(connection, (room, generation, push), nbytes, time.monotonic())
                # The last push of a use decides what follows, so that the others need no turn of the reactor.
                last = connection.end(room, generation)
                self._post(events.PushEnded(session, room, generation, push, None), wake=last)
            case reports.PushFailed(session, room, generation, push, cause):
                connection.began.pop((room, generation, push), None)
                connection.end(room, generation)
                self._post(events.PushEnded(session, room, generation, push, f"{cause}{because}"))
            case reports.ConnectFailed(session, cause) | reports.Disconnected(session, cause):
                connection.over = True
                if not connection.retired:
                    self._post(events.DataLost(session, life, f"{cause}{because}"))
            case reports.Resumed(session, count, cause):
                with self._lock:
                    self._traffic.resumed += 1
                text = "data connection to %s was cut, %d pushes are sent again: %s"
                self._complaints.tell((session, "cut"), text, session, count, cause)
            case _:
                return
