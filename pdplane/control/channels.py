"""The native control channel: one ROUTER on a prefill rank, one DEALER on a decode rank for each prefill rank."""

from __future__ import annotations

import hmac
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Never, TypeAlias

import zmq
from zmq.utils import z85

from pdplane import wire
from pdplane.control.connections import Comings, Connections, Intake
from pdplane.control.reactor import Reactor
from pdplane.errors import Cause, ConfigError, Why, WireError
from pdplane.ids import Endpoint, SessionId, new_life
from pdplane.kv.layout import Layout
from pdplane.machine import events
from pdplane.machine.actions import DecodeAction, Offer, Send, Tell
from pdplane.messages import Preallocation, Registration, Status, is_legacy
from pdplane.security import Secret
from pdplane.wire.frames import MAX_LAYOUT

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_DOMAIN = b"pdplane"


class Curve:
    """The key pair of CURVE, and the sockets' ends that use it."""

    def __init__(self, secret: Secret) -> None:
        self._private = z85.encode(secret.curve_key())
        self.public = zmq.curve_public(self._private)

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Accept only clients that prove that they own the pair; needs a `Gatekeeper` in the same context."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def join(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._private)


class Gatekeeper:
    """Answers libzmq's ZAP requests: only the one key is let in. A source of the reactor that causes no events."""

    def __init__(self, curve: Curve) -> None:
        self._key = z85.decode(curve.public)
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._socket is not None, "bind first"
        return self._socket

    def bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.REP)
        self._socket.bind(_ZAP_ENDPOINT)

    def receive(self) -> list[Never]:
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart(
            zmq.NOBLOCK
        )
        known = mechanism == b"CURVE" and credentials and hmac.compare_digest(credentials[0], self._key)
        code, text = (b"200", b"OK") if known else (b"400", b"another key")
        self.socket.send_multipart([version, request, code, text, b"", b""], zmq.NOBLOCK)
        return []

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


# ---- The native control channel on a prefill rank: one ROUTER that every decode rank connects to
#
# Frames are those of the legacy wire, notices stand beside them on the same socket so that order holds.
# Sockets never block: a message that cannot be queued becomes an event or a count. `pdplane.wire` has the frames.


MAX_FRAME_BYTES = 4 << 20  # a manifest may have 2 MiB, a layout 256 KiB
_HIGH_WATER = 4096
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)  # numbers: pyzmq's own flags are slow to join
_LINGER_MS = 500  # time that the last messages have to leave at closing


Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


def open_context() -> Context:
    """Return a new context, so that a forked child or another library shares nothing with us."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    context.setsockopt(zmq.LINGER, _LINGER_MS)
    context.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    context.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    context.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    return context


def bind_socket(bound: zmq.Socket[bytes], listen: Endpoint, name: str) -> Endpoint:
    """Bind and give the real address. Raises ConfigError, which names one that cannot be bound."""
    try:
        bound.bind(listen.url("tcp"))
    except zmq.ZMQError as error:
        raise ConfigError(f"{name}: cannot bind {listen}: {zmq.strerror(error.errno or 0)}") from error
    last = bound.getsockopt(zmq.LAST_ENDPOINT)
    port = Endpoint.parse(last.decode("ascii").rstrip("\0").removeprefix("tcp://")).port  # type: ignore[union-attr]
    return Endpoint(listen.host, port)  # libzmq spells an IPv4 address in IPv6


def send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    """Queue one message, or raise zmq.ZMQError with nothing queued; never blocks."""
    last = len(frames) - 1
    for number, frame in enumerate(frames):
        socket.send(frame, _MORE if number < last else _LAST)


MayOffer: TypeAlias = Callable[[bytes, SessionId], bool]


class Reading:
    """What of a decode rank's messages is parsed: nothing large of a peer from which it means nothing.

    `may_offer` tells whether a session belongs to an identity; manifests of others are not looked at. A layout that is
    far longer than ours is another model's.
    """

    def __init__(self, may_offer: MayOffer = lambda _identity, _session: True, layout: bytes | None = None) -> None:
        self._may_offer = may_offer
        self._longest = MAX_LAYOUT if layout is None else 4 * len(layout) + 4096

    def registration(self, identity: bytes, frames: Sequence[bytes], address: str = "") -> events.PrefillEvent:
        """Return the machine's event for a registration, accepted or rejected."""
        try:
            registration = wire.decode_registration(frames)
            layout = self._read_layout(registration.layout)
        except WireError as wrong:
            try:
                route = wire.decode_route(frames)
            except WireError:
                route = None
            return events.RegistrationRejected(identity, route, wrong.field, str(wrong), address)
        return events.RegistrationReceived(identity, registration, layout, address)

    def preallocation(self, identity: bytes, frames: Sequence[bytes]) -> events.PrefillEvent:
        """Return a pre-allocation as the machine's event; raise WireError when room or session cannot be read."""
        room, session = wire.preallocation_route(frames)  # without them nobody can be answered
        if not self._may_offer(identity, session):
            return events.PreallocationReceived(identity, room, session, None)
        offer = wire.decode_preallocation(frames)
        try:
            manifest = wire.decode_manifest(offer.manifest) if offer.manifest else None
        except WireError as wrong:
            return events.PreallocationRejected(identity, room, session, str(wrong))
        return events.PreallocationReceived(identity, room, session, manifest)

    def _read_layout(self, text: bytes) -> Layout:
        if len(text) > self._longest:
            raise WireError("layout", f"a layout of {len(text)} bytes is another model's: ours is far shorter")
        return wire.decode_layout(text)


class RouterChannel:
    """A prefill rank's end: receives from every decode rank, answers each by the identity of its connection."""

    def __init__(
        self,
        rejected: Counter[str],
        connections: Connections | None = None,
        reading: Reading | None = None,
        curve: Curve | None = None,
    ) -> None:
        self._rejected, self._curve = rejected, curve
        self._connections, self._reading = connections or Connections(rejected), reading or Reading()
        self._intake: Intake | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._intake is not None, "bind first"
        return self._intake.socket

    @property
    def comings(self) -> Comings:
        assert self._intake is not None, "bind first"
        return Comings(self._intake)

    def bind(self, context: Context, listen: Endpoint) -> Endpoint:
        """Bind and give the real address. Raises ConfigError, which names one that cannot be bound."""
        bound = context.socket(zmq.ROUTER)
        self._intake = self._connections.watch("control port", bound)
        bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve is not None:
            self._curve.serve(bound)
        return bind_socket(bound, listen, "control port")

    def receive(self) -> list[events.PrefillEvent]:
        assert self._intake is not None, "bind first"
        if not (message := self._intake.receive()):
            return []
        identity, *frames = message
        if is_legacy(identity):  # only we give this name, to legacy peers
            self._rejected["reserved_identity"] += 1
            return []
        try:
            return [self._read(identity, frames)]
        except WireError as wrong:
            self._rejected[f"wire_{wrong.kind}"] += 1
            return []

    def send(self, send: Send) -> list[events.PrefillEvent]:
        """Queue one message; return an event if the connection is gone or its queue is full."""
        message = send.message
        frames = wire.encode_status(message) if isinstance(message, Status) else wire.encode_notice(message)
        try:
            send_frames(self.socket, [send.identity, *frames])
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return [events.Undeliverable(send.identity)]
        return []

    def close(self) -> None:
        if self._intake is not None:
            self._intake.close()

    @property
    def _address(self) -> str:
        assert self._intake is not None, "bind first"
        return self._intake.address

    def _read(self, identity: bytes, frames: Sequence[bytes]) -> events.PrefillEvent:
        if wire.is_notice(frames):
            return events.NoticeReceived(identity, wire.decode_notice(frames), self._address)
        if wire.is_registration(frames):
            return self._reading.registration(identity, frames, self._address)
        return self._reading.preallocation(identity, frames)


# ---- The native control channel on a decode rank: one DEALER for each prefill rank that it needs


_SILENT_S = 5.0  # for a connection that nobody accepts or refuses
_STEP_S = 0.25  # a longer pause between two looks was ours
_HANDSHAKE_REFUSED = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_OTHER_SECRET = "one side has a secret that the other has not (--secret-file)"


class DealerChannel:
    """A decode rank's end: the connection to one life of one prefill rank."""

    def __init__(
        self,
        channel: events.Channel,
        session: SessionId,
        rejected: Counter[str],
        connections: Connections,
        curve: Curve | None = None,
    ) -> None:
        self._channel, self._session, self._rejected, self._curve = channel, session, rejected, curve
        self._connections = connections
        self._intake: Intake | None = None
        self._endpoint = channel.bootstrap
        self._stood = self._over = False  # the connection stood once; its obstacle was told
        self._obstacle: str | None = None
        self._looked_at = time.monotonic()
        self._waited_s = 0.0

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._intake is not None, "connect first"
        return self._intake.socket

    def connect(self, context: Context, endpoint: Endpoint) -> None:
        """Begin to connect; messages sent meanwhile are queued."""
        connecting, self._endpoint = context.socket(zmq.DEALER), endpoint
        self._intake = self._connections.watch(f"channel to {endpoint}", connecting, self._told)
        # Unguessable and never used twice: two owners of one identity would steal each other's messages.
        connecting.setsockopt(zmq.IDENTITY, new_life().encode("ascii"))
        if self._curve is not None:
            self._curve.join(connecting)
        connecting.connect(endpoint.url("tcp"))

    def receive(self) -> list[events.DecodeEvent]:
        assert self._intake is not None, "connect first"
        if not (frames := self._intake.receive()):
            return []
        try:
            if wire.is_notice(frames):
                return [events.NoticeFromPrefill(self._channel, wire.decode_notice(frames))]
            return [events.StatusFromPrefill(self._channel, wire.decode_status(frames))]
        except WireError as wrong:
            self._rejected[f"wire_{wrong.kind}"] += 1
            return []

    def obstacle(self, unreachable_s: float) -> Why | None:
        """Return once why the connection does not come to stand, None while it may or did; asked again and again."""
        now = time.monotonic()
        self._waited_s += min(_STEP_S, now - self._looked_at)
        self._looked_at = now
        refused = self._obstacle == _OTHER_SECRET
        patience_s = 0.0 if refused else unreachable_s if self._obstacle else max(unreachable_s, _SILENT_S)
        if self._stood or self._over or self._waited_s < patience_s:
            return None
        self._over = True
        channel, what = self._channel, self._obstacle or f"nothing there answers a connection in {patience_s:g} s"
        text = f"no control connection to prefill rank {channel.prefill_rank} at {self._endpoint}: {what}"
        text += f"; that is the address which its rendezvous at {channel.bootstrap} names"
        return Why(Cause.REFUSED if refused else Cause.UNREACHABLE, text)

    def _told(self, event: int, _value: int) -> None:
        """Learn from libzmq what becomes of the connection."""
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._stood = True
        elif event & _HANDSHAKE_REFUSED or self._obstacle == _OTHER_SECRET:
            self._obstacle = _OTHER_SECRET  # also if one end closes before it hears why in later tries
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._obstacle = "it ends each handshake: it has another secret (--secret-file), or is no pdplane"
        elif event == zmq.EVENT_CLOSED:
            self._obstacle = "nobody accepts connections there"

    def send(self, action: Tell | Offer) -> None:
        """Queue one message, or count it as undeliverable: a peer whose queue is full is about to be lost."""
        try:
            send_frames(self.socket, self._frames(action))
        except zmq.Again:
            self._rejected["undeliverable"] += 1

    def close(self) -> None:
        if self._intake is not None:
            self._intake.close()

    def _frames(self, action: Tell | Offer) -> list[bytes]:
        if isinstance(action, Offer):
            manifest = wire.encode_manifest(action.manifest) if action.manifest is not None else b""
            return wire.encode_preallocation(Preallocation(action.room, self._session, manifest))
        if isinstance(action.message, Registration):
            return wire.encode_registration(action.message)
        return wire.encode_notice(action.message)


class Dealers:
    """Every channel of one decode rank; used on the reactor's thread only, except `open` and `close`."""

    def __init__(
        self,
        rejected: Counter[str],
        curve: Curve | None,
        connections: Connections | None = None,
        unreachable_s: float = 1.5,
    ) -> None:
        self._rejected, self._curve, self._connections = rejected, curve, connections or Connections(rejected)
        self._unreachable_s = unreachable_s
        self._context: Context | None = None
        self._reactor: Reactor[events.DecodeEvent, DecodeAction] | None = None
        self._channels: dict[events.Channel, DealerChannel] = {}

    def open(self, reactor: Reactor[events.DecodeEvent, DecodeAction]) -> None:
        self._context, self._reactor = open_context(), reactor

    def connect(self, channel: events.Channel, endpoint: Endpoint, session: SessionId) -> list[events.DecodeEvent]:
        """Begin to connect; return an event if that cannot be tried (a host that is no address, no sockets left)."""
        assert self._context is not None, "open first"
        assert self._reactor is not None, "open first"
        dealer = DealerChannel(channel, session, self._rejected, self._connections, self._curve)
        try:
            dealer.connect(self._context, endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            text = f"cannot connect to {endpoint}: {zmq.strerror(error.errno or 0)}"
            return [events.ChannelBroken(channel, Why(Cause.UNREACHABLE, text))]
        self._channels[channel] = dealer
        self._reactor.watch(dealer)
        return []

    def tend(self, now: float) -> float:
        """Look after the connections, tell of those that do not come to stand; return when the next look is due."""
        due = self._connections.tend(now)
        for channel, dealer in self._channels.items():
            if self._reactor is not None and (why := dealer.obstacle(self._unreachable_s)):
                self._reactor.post(events.ChannelBroken(channel, why))
        return due

    def disconnect(self, channel: events.Channel) -> None:
        dealer = self._channels.pop(channel, None)
        if dealer is not None and self._reactor is not None:
            self._reactor.unwatch(dealer)
            dealer.close()

    def send(self, action: Tell | Offer) -> list[events.DecodeEvent]:
        """Queue one message; return no event, since the loss of a peer is noticed by its silence."""
        dealer = self._channels.get(action.channel)
        if dealer is not None:
            dealer.send(action)
        else:  # it could not be connected, and that event is still under way
            self._rejected["undeliverable"] += 1
        return []

    def close(self) -> None:
        for dealer in self._channels.values():
            dealer.close()
        self._channels.clear()
        if self._context is not None:
            self._context.term()
            self._context = None
