"""The native control channel on a prefill rank: one ROUTER that every decode rank connects to.

Frames are those of the legacy wire, notices stand beside them on the same socket so that order holds.
Sockets never block: what cannot be queued is an event or a count. Source of the frames: `pdplane.wire`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

import zmq

from pdplane import wire
from pdplane.control.curve import Curve
from pdplane.errors import ConfigError, WireError
from pdplane.ids import Endpoint
from pdplane.machine import events
from pdplane.machine.actions import Send
from pdplane.messages import Status

MAX_FRAME_BYTES = 4 << 20  # a manifest may have 2 MiB, a layout 256 KiB
_HIGH_WATER = 4096
_LINGER_MS = 500  # what is said last at closing gets this long to leave


Context: TypeAlias = zmq.Context[zmq.Socket[bytes]]


def open_context() -> Context:
    """A context of our own, so that a forked child or another library shares nothing with us."""
    context: Context = zmq.Context()
    context.setsockopt(zmq.IPV6, 1)
    context.setsockopt(zmq.LINGER, _LINGER_MS)
    context.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    context.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    context.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    return context


def bind_socket(bound: zmq.Socket[bytes], listen: Endpoint, name: str) -> Endpoint:
    """Bind and give the real address; ConfigError names one that cannot be bound."""
    try:
        bound.bind(listen.url("tcp"))
    except zmq.ZMQError as error:
        raise ConfigError(f"{name}: cannot bind {listen}: {zmq.strerror(error.errno or 0)}") from error
    last = bound.getsockopt(zmq.LAST_ENDPOINT)
    port = Endpoint.parse(last.decode("ascii").rstrip("\0").removeprefix("tcp://")).port  # type: ignore[union-attr]
    return Endpoint(listen.host, port)  # libzmq spells an IPv4 address in IPv6


class RouterChannel:
    """A prefill rank's end: hears every decode rank, answers each by the identity of its connection."""

    def __init__(self, rejected: Counter[str], curve: Curve | None = None) -> None:
        self._rejected, self._curve = rejected, curve
        self._socket: zmq.Socket[bytes] | None = None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._socket is not None, "bind first"
        return self._socket

    def bind(self, context: Context, listen: Endpoint) -> Endpoint:
        """Bind and give the real address; ConfigError names one that cannot be bound."""
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._curve is not None:
            self._curve.serve(self._socket)
        return bind_socket(self._socket, listen, "control port")

    def receive(self) -> list[events.PrefillEvent]:
        identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        if events.is_legacy(identity):  # a name that only we give, to peers without a connection of their own
            self._rejected["reserved_identity"] += 1
            return []
        try:
            return [self._read(identity, frames)]
        except WireError as wrong:
            self._rejected[f"wire_{wrong.kind}"] += 1
            return []

    def send(self, send: Send) -> list[events.PrefillEvent]:
        """Queue one message; the event says that the connection is gone or takes no more."""
        message = send.message
        frames = wire.encode_status(message) if isinstance(message, Status) else wire.encode_notice(message)
        try:
            self.socket.send_multipart([send.identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return [events.Undeliverable(send.identity)]
        return []

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _read(self, identity: bytes, frames: Sequence[bytes]) -> events.PrefillEvent:
        if wire.is_notice(frames):
            return events.NoticeReceived(identity, wire.decode_notice(frames))
        if wire.is_registration(frames):
            return read_registration(identity, frames)
        return read_preallocation(identity, frames)


def read_registration(identity: bytes, frames: Sequence[bytes]) -> events.PrefillEvent:
    """A registration as the machine's event, rejected or not."""
    try:
        registration = wire.decode_registration(frames)
        layout = wire.decode_layout(registration.layout)
    except WireError as wrong:
        try:
            route = wire.decode_route(frames)
        except WireError:
            route = None
        return events.RegistrationRejected(identity, route, wrong.field, str(wrong))
    return events.RegistrationReceived(identity, registration, layout)


def read_preallocation(identity: bytes, frames: Sequence[bytes]) -> events.PrefillEvent:
    """A pre-allocation as the machine's event; WireError when room or session cannot be read."""
    offer = wire.decode_preallocation(frames)  # without room and session there is nobody to answer for
    try:
        manifest = wire.decode_manifest(offer.manifest) if offer.manifest else None
    except WireError as wrong:
        return events.PreallocationRejected(identity, offer.room, offer.session, str(wrong))
    return events.PreallocationReceived(identity, offer.room, offer.session, manifest)
