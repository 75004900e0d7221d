"""The legacy control channel on a prefill rank: one PULL that decode ranks push to, one PUSH to each way back.

There are no connections with names here: a peer is known by the host, port and session of its registration, and
that makes its identity for the machine. A pre-allocation names only the session, so its sender is whoever
registered the session last. Sockets never block: what cannot be queued is an event or a count.
Source of the rules: legacy_peer.md sections 1, 3 and 5.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import attrs
import zmq

from pdplane import wire
from pdplane.control.channel import Context, bind_socket, read_preallocation, read_registration
from pdplane.errors import WireError
from pdplane.ids import Endpoint, SessionId
from pdplane.machine import events
from pdplane.machine.actions import Send
from pdplane.messages import Refused, Status

logger = logging.getLogger(__name__)

MAX_PEERS = 4096
MAX_SOCKETS = 256
_RECONNECT_MS = 5000  # at most between two attempts; a dead peer must not cost much

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class Latest(Generic[_Key, _Value]):
    """A table of bounded size; what was used least lately goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._held = capacity, OrderedDict[_Key, _Value]()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: _Key) -> _Value | None:
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key]

    def put(self, key: _Key, value: _Value) -> list[_Value]:
        """Keep a value; gives those that had to go."""
        self._held[key] = value
        self._held.move_to_end(key)
        return [self._held.popitem(last=False)[1] for _ in range(len(self._held) - self._capacity)]

    def pop(self, key: _Key) -> _Value | None:
        return self._held.pop(key, None)

    def clear(self) -> list[_Value]:
        values = list(self._held.values())
        self._held.clear()
        return values


def reply_host(host: str) -> str:
    """A registration's host as the legacy peers use it: what stands before the colon. WireError for IPv6.

    They would cut `fd00::2` to `fd00`; their sockets speak no IPv6 anyway.
    """
    if host.startswith("[") or host.count(":") > 1:
        raise WireError("endpoint", f"a legacy peer cannot be answered at the IPv6 address {host}")
    name = host.partition(":")[0]
    if not name:
        raise WireError("endpoint", "the registration's host is empty")
    return name


class LegacyPrefillChannel:
    """A prefill rank's legacy end. On the reactor's thread only, but for `bind` and `close` around its life."""

    def __init__(self, rejected: Counter[str]) -> None:
        self._rejected = rejected
        self._context: Context | None = None
        self._pull: zmq.Socket[bytes] | None = None
        self._identities: Latest[SessionId, bytes] = Latest(MAX_PEERS)
        self._addresses: Latest[bytes, Endpoint] = Latest(2 * MAX_PEERS)
        self._pushes: Latest[Endpoint, zmq.Socket[bytes]] = Latest(MAX_SOCKETS)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        assert self._pull is not None, "bind first"
        return self._pull

    def bind(self, context: Context, listen: Endpoint) -> Endpoint:
        """Bind and give the real address; ConfigError names one that cannot be bound."""
        self._context, self._pull = context, context.socket(zmq.PULL)
        return bind_socket(self._pull, listen, "legacy control port")

    def receive(self) -> list[events.PrefillEvent]:
        return self.read(self.socket.recv_multipart(zmq.NOBLOCK))

    def read(self, frames: Sequence[bytes]) -> list[events.PrefillEvent]:
        """The events of one message; what nobody could be told about is dropped with a count."""
        try:
            if wire.is_registration(frames):
                return [self._registration(frames)]
            return self._preallocation(frames)
        except WireError as wrong:
            self._rejected[f"wire_{wrong.kind}"] += 1
            return []

    def send(self, send: Send) -> list[events.PrefillEvent]:
        """Queue a status; the event says that its way back is not known any more or takes no more."""
        address = self._addresses.get(send.identity)
        if isinstance(send.message, Refused):  # this wire has no word for it: decode learns it with its first room
            logger.warning("the legacy decode at %s is refused: %s", address, _reason(send.message))
            return []
        if address is None or not isinstance(send.message, Status):
            return [events.Undeliverable(send.identity)]
        try:
            self._push(address).send_multipart(wire.encode_status(send.message), zmq.NOBLOCK)
        except zmq.ZMQError as error:  # a full queue, a host that is no address, no sockets left
            logger.warning("no status reaches the legacy decode at %s: %s", address, zmq.strerror(error.errno or 0))
            self._drop(self._pushes.pop(address))
            return [events.Undeliverable(send.identity)]
        return []

    @property
    def peers(self) -> int:
        """Sessions that registered and are remembered."""
        return len(self._identities)

    def close(self) -> None:
        if self._pull is not None:
            self._pull.close()
        for push in self._pushes.clear():
            push.close()

    def _registration(self, frames: Sequence[bytes]) -> events.PrefillEvent:
        route = wire.decode_route(frames)  # without a way back nothing of it is kept
        route = attrs.evolve(route, host=reply_host(route.host))
        identity = events.legacy_identity(route)
        self._identities.put(route.session, identity)
        self._addresses.put(identity, Endpoint(route.host, route.port))
        return read_registration(identity, frames)

    def _preallocation(self, frames: Sequence[bytes]) -> list[events.PrefillEvent]:
        _, session = wire.preallocation_route(frames)
        identity = self._identities.get(session)
        if identity is None:  # nobody knows whom to answer
            self._rejected["unknown_session"] += 1
            return []
        return [read_preallocation(identity, frames)]

    def _push(self, address: Endpoint) -> zmq.Socket[bytes]:
        push = self._pushes.get(address)
        if push is None:
            assert self._context is not None, "bind first"
            push = self._context.socket(zmq.PUSH)
            push.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MS)
            for old in self._pushes.put(address, push):
                self._drop(old)
            push.connect(address.url("tcp"))
        return push

    @staticmethod
    def _drop(push: zmq.Socket[bytes] | None) -> None:
        if push is not None:
            push.close()


def _reason(refused: Refused) -> str:
    return f"{refused.field} differs: ours {refused.ours}, theirs {refused.theirs} (session {refused.session})"
