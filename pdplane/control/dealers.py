"""The native control channel on a decode rank: one DEALER for each prefill rank that it needs."""

from __future__ import annotations

from collections import Counter

import zmq

from pdplane import wire
from pdplane.control.channel import Context, open_context
from pdplane.control.curve import Curve
from pdplane.control.reactor import Reactor
from pdplane.errors import WireError
from pdplane.ids import Endpoint, SessionId, new_life
from pdplane.machine import events
from pdplane.machine.actions import DecodeAction, Offer, Tell
from pdplane.messages import Preallocation, Registration


class DealerChannel:
    """A decode rank's end: one connection to one life of one prefill rank."""

    def __init__(
        self, channel: events.Channel, session: SessionId, rejected: Counter[str], curve: Curve | None = None
    ) -> None:
        self._channel, self._session, self._rejected, self._curve = channel, session, rejected, curve
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._socket is not None, "connect first"
        return self._socket

    def connect(self, context: Context, endpoint: Endpoint) -> None:
        """Begin to connect; what is sent meanwhile is queued."""
        self._socket = context.socket(zmq.DEALER)
        # Unguessable and never used twice: two owners of one identity would steal each other's messages.
        self._socket.setsockopt(zmq.IDENTITY, new_life().encode("ascii"))
        if self._curve is not None:
            self._curve.join(self._socket)
        self._socket.connect(endpoint.url("tcp"))

    def receive(self) -> list[events.DecodeEvent]:
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        try:
            if wire.is_notice(frames):
                return [events.NoticeFromPrefill(self._channel, wire.decode_notice(frames))]
            return [events.StatusFromPrefill(self._channel, wire.decode_status(frames))]
        except WireError as wrong:
            self._rejected[f"wire_{wrong.kind}"] += 1
            return []

    def send(self, action: Tell | Offer) -> None:
        """Queue one message; a full queue drops it with a count (the peer is silent and about to be lost)."""
        try:
            self.socket.send_multipart(self._frames(action), zmq.NOBLOCK)
        except zmq.Again:
            self._rejected["undeliverable"] += 1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _frames(self, action: Tell | Offer) -> list[bytes]:
        if isinstance(action, Offer):
            manifest = wire.encode_manifest(action.manifest) if action.manifest is not None else b""
            return wire.encode_preallocation(Preallocation(action.room, self._session, manifest))
        if isinstance(action.message, Registration):
            return wire.encode_registration(action.message)
        return wire.encode_notice(action.message)


class Dealers:
    """Every channel of one decode rank. On the reactor's thread only, but for `open` and `close` around its life."""

    def __init__(self, rejected: Counter[str], curve: Curve | None) -> None:
        self._rejected, self._curve = rejected, curve
        self._context: Context | None = None
        self._reactor: Reactor[events.DecodeEvent, DecodeAction] | None = None
        self._channels: dict[events.Channel, DealerChannel] = {}

    def open(self, reactor: Reactor[events.DecodeEvent, DecodeAction]) -> None:
        self._context, self._reactor = open_context(), reactor

    def connect(self, channel: events.Channel, endpoint: Endpoint, session: SessionId) -> list[events.DecodeEvent]:
        """Begin to connect; the event says that it cannot be tried (a host that is no address, no sockets left)."""
        assert self._context is not None, "open first"
        assert self._reactor is not None, "open first"
        dealer = DealerChannel(channel, session, self._rejected, self._curve)
        try:
            dealer.connect(self._context, endpoint)
        except zmq.ZMQError as error:
            dealer.close()
            return [events.ChannelBroken(channel, f"cannot connect to {endpoint}: {zmq.strerror(error.errno or 0)}")]
        self._channels[channel] = dealer
        self._reactor.watch(dealer)
        return []

    def disconnect(self, channel: events.Channel) -> None:
        dealer = self._channels.pop(channel, None)
        if dealer is not None and self._reactor is not None:
            self._reactor.unwatch(dealer)
            dealer.close()

    def send(self, action: Tell | Offer) -> list[events.DecodeEvent]:
        """Queue one message; gives no event: a peer that takes nothing falls silent, and that is noticed."""
        dealer = self._channels.get(action.channel)
        if dealer is not None:
            dealer.send(action)
        else:  # it could not be connected, and the machine has not been told yet
            self._rejected["undeliverable"] += 1
        return []

    def close(self) -> None:
        for dealer in self._channels.values():
            dealer.close()
        self._channels.clear()
        if self._context is not None:
            self._context.term()
            self._context = None
