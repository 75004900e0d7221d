"""The legacy control channel on either role: one PULL that is bound, one PUSH to each peer.

No connection has a name here. On prefill a peer is known by the host, port and session of its registration, and that
makes its identity for the machine; a pre-allocation names only the session, so its sender is whoever registered the
session last. Sockets never block: a message that cannot be queued becomes an event or a count.
Rules: docs/legacy_wire.md sections 1, 3, 5, 6 and 11.
"""

from __future__ import annotations

import socket
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeAlias, TypeVar

import attrs
import zmq

from pdplane import wire
from pdplane.control.channels import (
    Context,
    Reading,
    bind_socket,
    open_context,
    send_frames,
)
from pdplane.control.connections import Comings, Connections, Intake
from pdplane.control.reactor import Reactor
from pdplane.errors import Cause, Why, WireError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.machine import events
from pdplane.machine.actions import DecodeAction, Offer, Send, Tell
from pdplane.messages import Ping, Preallocation, Refused, Registered, Registration, Status, Window, legacy_identity
from pdplane.net import AddressInfo, Names

MAX_PEERS = 4096
MAX_SOCKETS = 256
MAX_WAITING = 1000  # statuses, while one name is looked up
_RECONNECT_MS = 5000  # at most between two attempts; a dead peer must not cost much

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Latest(Generic[_Key, _Value]):
    """A table of bounded size; of the share with the most entries the one that was used longest ago goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[_Key, tuple[str, _Value]] = {}
        self._shares: dict[str, OrderedDict[_Key, None]] = {}  # of each the keys, the one that was used last at the end

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: _Key) -> _Value | None:
        found = self._held.get(key)
        if found is None:
            return None
        self._shares[found[0]].move_to_end(key)
        return found[1]

    def put(self, key: _Key, value: _Value, share: str = "") -> list[_Value]:
        """Keep a value; return those that had to go."""
        self.pop(key)
        self._held[key] = share, value
        self._shares.setdefault(share, OrderedDict())[key] = None
        gone = []
        while len(self._held) > self._capacity:
            most = max(self._shares, key=lambda each: len(self._shares[each]))
            old = next(iter(self._shares[most]))
            gone.append(self._held[old][1])
            self.pop(old)
        return gone

    def pop(self, key: _Key) -> _Value | None:
        share, value = self._held.pop(key, (None, None))
        if share is not None:
            del self._shares[share][key]
            if not self._shares[share]:
                del self._shares[share]
        return value

    def clear(self) -> list[_Value]:
        values = [value for _, value in self._held.values()]
        self._held.clear()
        self._shares.clear()
        return values


def reply_host(host: str) -> str:
    """Return a registration's host as legacy peers use it: what stands before the colon. Raises WireError for IPv6.

    They would cut `fd00::2` to `fd00`, and their sockets have IPv6 turned off.
    """
    if host.startswith("[") or host.count(":") > 1:
        raise WireError("endpoint", f"a legacy peer cannot be answered at the IPv6 address {host}")
    name = host.partition(":")[0]
    if not name:
        raise WireError("endpoint", "the registration's host is empty")
    return name


@attrs.define(eq=False)
class _Way:
    """The connection to one address for statuses, which wait while its name is looked up."""

    push: Intake
    waiting: list[tuple[bytes, list[bytes]]] | None = None


Do: TypeAlias = Callable[[Callable[[], Iterable[events.PrefillEvent]]], None]
"""Do something on the thread of the channel's owner, which takes the events that it causes."""


class LegacyPrefillChannel:
    """A prefill rank's end; used on the reactor's thread only, except `bind` and `close`."""

    def __init__(
        self,
        rejected: Counter[str],
        connections: Connections | None = None,
        reading: Reading | None = None,
        do: Do = lambda work: None,
    ) -> None:
        self._rejected = rejected
        self._connections, self._reading = connections or Connections(rejected), reading or Reading()
        self._context: Context | None = None
        self._pull: Intake | None = None
        self._identities: Latest[SessionId, bytes] = Latest(MAX_PEERS)
        self._addresses: Latest[bytes, Endpoint] = Latest(2 * MAX_PEERS)
        self._ways: Latest[Endpoint, _Way] = Latest(MAX_SOCKETS)
        self._names, self._do = Names(), do

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._pull is not None, "bind first"
        return self._pull.socket

    @property
    def comings(self) -> Comings:
        assert self._pull is not None, "bind first"
        return Comings(self._pull)

    def bind(self, context: Context, listen: Endpoint) -> Endpoint:
        """Bind and give the real address. Raises ConfigError, which names one that cannot be bound."""
        self._context, self._pull = context, self._connections.watch("legacy control port", context.socket(zmq.PULL))
        return bind_socket(self.socket, listen, "legacy control port")

    def receive(self) -> list[events.PrefillEvent]:
        assert self._pull is not None, "bind first"
        frames = self._pull.receive()
        return self.read(frames) if frames else []

    def read(self, frames: Sequence[bytes]) -> list[events.PrefillEvent]:
        """Return the events of one message; one whose sender cannot be answered is dropped and counted."""
        try:
            if wire.is_registration(frames):
                return [self._registration(frames)]
            return self._preallocation(frames)
        except WireError as wrong:
            self._rejected[f"wire_{wrong.kind}"] += 1
            return []

    def send(self, send: Send) -> list[events.PrefillEvent]:
        """Queue a status; return an event if the peer's address is forgotten or its queue is full."""
        address = self._addresses.get(send.identity)
        if isinstance(send.message, Refused):  # this wire has no message for it: the session's rooms will fail
            self._complain(address, "the legacy decode at %s is refused: %s", address, _reason(send.message))
            return []
        if address is None or not isinstance(send.message, Status):
            return [events.Undeliverable(send.identity)]
        try:
            way = self._way(address)
            if way.waiting is None:
                send_frames(way.push.socket, wire.encode_status(send.message))
            elif len(way.waiting) < MAX_WAITING:
                way.waiting.append((send.identity, wire.encode_status(send.message)))
            else:
                return [events.Undeliverable(send.identity)]
        except zmq.ZMQError as error:  # a full queue, no sockets left
            reason = zmq.strerror(error.errno or 0)
            self._complain(address, "no status reaches the legacy decode at %s: %s", address, reason)
            self._drop(self._ways.pop(address))
            return [events.Undeliverable(send.identity)]
        return []

    @property
    def peers(self) -> int:
        """Sessions that registered and are remembered."""
        return len(self._identities)

    def close(self) -> None:
        if self._pull is not None:
            self._pull.close()
        for way in self._ways.clear():
            way.push.close()

    def _registration(self, frames: Sequence[bytes]) -> events.PrefillEvent:
        route = wire.decode_route(frames)  # without an address for answers nothing of it is kept
        route = attrs.evolve(route, host=reply_host(route.host))
        identity = legacy_identity(route)
        address = self._pull.address if self._pull else ""
        self._identities.put(route.session, identity, address)
        self._addresses.put(identity, Endpoint(route.host, route.port), address)
        return self._reading.registration(identity, frames, address)

    def _preallocation(self, frames: Sequence[bytes]) -> list[events.PrefillEvent]:
        _, session = wire.preallocation_route(frames)
        identity = self._identities.get(session)
        if identity is None:  # there is no address to answer
            self._rejected["unknown_session"] += 1
            return []
        return [self._reading.preallocation(identity, frames)]

    def _way(self, address: Endpoint) -> _Way:
        way = self._ways.get(address)
        if way is None:
            assert self._context is not None, "bind first"
            way = _Way(self._connections.watch(f"channel to {address}", self._context.socket(zmq.PUSH)))
            way.push.socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            for old in self._ways.put(address, way):
                self._drop(old)
            self._connect(address, way)
        return way

    def _connect(self, address: Endpoint, way: _Way) -> None:
        """Connect to a number; libzmq would look a name up on the thread that serves all its sockets."""
        looked_up = self._names.begin(address.host, address.port)
        if looked_up.done() and looked_up.exception() is None:
            way.push.socket.connect(_ipv4_first(looked_up.result()).url("tcp"))
            return
        way.waiting = []
        looked_up.add_done_callback(lambda done: self._do(lambda: self._found(address, way, done)))

    def _found(
        self, address: Endpoint, way: _Way, looked_up: Future[Sequence[AddressInfo]]
    ) -> Iterable[events.PrefillEvent]:
        """Connect and send what waits, or return that it cannot be sent."""
        waiting, way.waiting = way.waiting or [], None
        if self._ways.get(address) is not way:  # it was dropped meanwhile, to make place
            return [events.Undeliverable(identity) for identity, _ in waiting]
        try:
            way.push.socket.connect(_ipv4_first(looked_up.result()).url("tcp"))
            for _, frames in waiting:
                send_frames(way.push.socket, frames)
        except (OSError, zmq.ZMQError) as error:
            self._complain(address, "no status reaches the legacy decode at %s: %s", address, error)
            self._drop(self._ways.pop(address))
            return [events.Undeliverable(identity) for identity, _ in waiting]
        return []

    def _complain(self, address: Endpoint | None, text: str, *values: object) -> None:
        """Write a line, of each host one a minute: which port and session it names costs it nothing."""
        self._connections.complaints.tell((text, address and address.host), text, *values)

    @staticmethod
    def _drop(way: _Way | None) -> None:
        if way is not None:
            way.push.close()


def _ipv4_first(found: Sequence[AddressInfo]) -> Endpoint:
    """Return the address to try: legacy peers have IPv6 turned off."""
    *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return Endpoint(str(address[0]), int(address[1]))


def _reason(refused: Refused) -> str:
    return f"{refused.field} differs: ours {refused.ours}, theirs {refused.theirs} (session {refused.session})"


# ---- The legacy control channel on a decode rank: one PULL for every prefill rank, one PUSH to each
#
# The notices that native peers send beside the legacy frames are imitated here, so that the machine need not know: a
# registration counts as answered when it is sent (this wire never answers), a ping asks the rendezvous and looks at the
# connection, a cancel and a hello are not sent. A status names neither its channel nor its use of the room; both are
# taken from our last offer.


MAX_ROOMS = 65536

Probe: TypeAlias = Callable[["LegacyLine"], None]
"""Ask the rendezvous whether the line's rank is still at its address; must not block. See `probed`."""


@attrs.define
class _Asked:
    """The latest use of a room number: its generation, and the channels of the ranks that know of it."""

    generation: Generation
    channels: dict[Rank, events.Channel] = attrs.field(factory=dict)


def probed(line: LegacyLine, found: Endpoint | None) -> events.DecodeEvent | None:
    """Return the event that the rendezvous' answer means; None when it does not show that the rank lives."""
    channel = line.channel
    if found is not None and found != line.endpoint:
        text = f"prefill rank {channel.prefill_rank} restarted and is at {found} now"
        return events.ChannelBroken(channel, Why(Cause.PEER_LOST, text))
    return events.NoticeFromPrefill(channel, Ping(Life(""))) if found is not None and line.stands else None


class LegacyLine:
    """The PUSH to one prefill rank, and the events of its connection."""

    def __init__(self, channel: events.Channel, endpoint: Endpoint, context: Context, connections: Connections) -> None:
        self.channel, self.endpoint = channel, endpoint
        self.stands = False  # the rank has accepted the connection, and has not left since
        self.introduction: list[bytes] = []
        self._left = False
        self._complaints = connections.complaints
        self._push = connections.watch(f"channel to {endpoint}", context.socket(zmq.PUSH), self._told)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """What brings the events of the connection."""
        return self._push.monitor

    def connect(self) -> None:
        self._push.socket.connect(self.endpoint.url("tcp"))

    def receive(self) -> list[events.DecodeEvent]:
        self._push.hear_one()
        return []

    def _told(self, event: int, _value: int) -> None:
        """Register again when the connection is back, since another life may be there."""
        if event == zmq.EVENT_DISCONNECTED:
            self.stands, self._left = False, True
            text = "legacy prefill rank %d at %s closed the connection"
            self._complaints.tell(self.endpoint, text, self.channel.prefill_rank, self.endpoint)
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.stands = True
            if self._left and self.introduction:
                self._left = not self.queue(self.introduction)

    def queue(self, frames: list[bytes]) -> bool:
        """Queue one message; return False when the queue is full."""
        try:
            send_frames(self._push.socket, frames)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._push.close()


class LegacyPrefills:
    """Every legacy channel of one decode rank; used on the reactor's thread only, except `bind` and `close`."""

    def __init__(self, rejected: Counter[str], probe: Probe, connections: Connections | None = None) -> None:
        self._rejected, self._probe, self._connections = rejected, probe, connections or Connections(rejected)
        self._session = SessionId("")
        self._context: Context | None = None
        self._pull: Intake | None = None
        self._reactor: Reactor[events.DecodeEvent, DecodeAction] | None = None
        self._lines: dict[events.Channel, LegacyLine] = {}
        self._asked: Latest[Room, _Asked] = Latest(MAX_ROOMS)

    def bind(self, listen: Endpoint, session: SessionId) -> Endpoint:
        """Bind the PULL, for the session that legacy ranks write to, and return its real address.

        Raises ConfigError.
        """
        self._session, self._context = session, open_context()
        self._pull = self._connections.watch("legacy status port", self._context.socket(zmq.PULL))
        return bind_socket(self.socket, listen, "legacy status port")

    def open(self, reactor: Reactor[events.DecodeEvent, DecodeAction]) -> None:
        assert self._pull is not None, "bind first"
        self._reactor = reactor
        reactor.watch(self)
        reactor.watch(Comings(self._pull))

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._pull is not None, "bind first"
        return self._pull.socket

    def receive(self) -> list[events.DecodeEvent]:
        assert self._pull is not None, "bind first"
        frames = self._pull.receive()
        return self.read(frames) if frames else []

    def read(self, frames: Sequence[bytes]) -> list[events.DecodeEvent]:
        """Return the event of one status; one that cannot be read, or of a room that was never offered, is counted."""
        try:
            status = wire.decode_status(frames)
        except WireError as wrong:
            self._rejected[f"wire_{wrong.field}"] += 1
            return []
        asked = self._asked.get(status.room)
        if asked is None:
            self._rejected["unknown_room"] += 1
            return []
        some = next(iter(asked.channels.values()))  # any channel: the machine sees that the rank is a foreign one
        channel = asked.channels.get(status.prefill_rank, some)
        return [events.StatusFromPrefill(channel, status, asked.generation)]

    def connect(self, channel: events.Channel, endpoint: Endpoint, session: SessionId) -> list[events.DecodeEvent]:
        """Begin to connect; return an event if that cannot be tried."""
        del session  # legacy ranks write to a session of their own
        assert self._context is not None, "bind first"
        assert self._reactor is not None, "open first"
        try:
            line = self._lines[channel] = LegacyLine(channel, endpoint, self._context, self._connections)
            self._reactor.watch(line)
            line.connect()
        except zmq.ZMQError as error:
            self.disconnect(channel)
            text = f"cannot connect to {endpoint}: {zmq.strerror(error.errno or 0)}"
            return [events.ChannelBroken(channel, Why(Cause.UNREACHABLE, text))]
        return []

    def disconnect(self, channel: events.Channel) -> None:
        line = self._lines.pop(channel, None)
        if line is not None and self._reactor is not None:
            self._reactor.unwatch(line)
            line.close()

    def send(self, action: Tell | Offer) -> list[events.DecodeEvent]:
        """Queue what this wire can carry; return what a native peer would have answered."""
        channel, line = action.channel, self._lines.get(action.channel)
        if line is None:
            self._rejected["undeliverable"] += 1
            return []
        if isinstance(action, Offer):
            manifest = wire.encode_manifest(action.manifest) if action.manifest is not None else b""
            self._queue(line, wire.encode_preallocation(Preallocation(action.room, self._session, manifest)))
            return []
        match action.message:
            case Registration() as registration:
                line.introduction = wire.encode_registration(attrs.evolve(registration, session=self._session))
                self._queue(line, line.introduction)
                return [events.NoticeFromPrefill(channel, Registered(registration.session, channel.life))]
            case Window(room, generation):
                self._remember(channel, room, generation)
            case Ping():
                self._probe(line)
            case _:
                pass  # a hello, a cancel: this wire has neither
        return []

    def close(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        if self._pull is not None:
            self._pull.close()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _remember(self, channel: events.Channel, room: Room, generation: Generation) -> None:
        asked = self._asked.get(room)
        if asked is None or asked.generation != generation:
            asked = _Asked(generation)
            self._asked.put(room, asked)
        asked.channels[channel.prefill_rank] = channel

    def _queue(self, line: LegacyLine, frames: list[bytes]) -> None:
        if not line.queue(frames):
            self._rejected["undeliverable"] += 1  # the peer is silent and about to be lost
