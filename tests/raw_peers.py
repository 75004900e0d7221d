"""Peers of raw ZeroMQ frames, which say what a test tells them to and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import zmq
from zmq.utils import z85

from pdplane.ids import Endpoint, new_life
from pdplane.security import Secret

Frames = list[bytes]


class RawPeer:
    """One socket in a context of its own; `with` closes both at once, without a word."""

    def __init__(self, kind: int, *, secret: Secret | None = None, server_key: bytes | None = None) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        if secret is not None:
            private = z85.encode(secret.curve_key())
            public = zmq.curve_public(private)
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, private)
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key or public)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()

    def send(self, *frames: bytes) -> None:
        """Send one message, waiting for room in the queue."""
        self.socket.send_multipart(list(frames))

    def receive(self, timeout_s: float = 10.0) -> Frames:
        """The next message; an AssertionError when none comes."""
        assert self.socket.poll(timeout_s * 1000), "no message came"
        return self.socket.recv_multipart()

    def hears(self, timeout_s: float) -> bool:
        return bool(self.socket.poll(timeout_s * 1000))

    def receive_until(self, kind: bytes) -> Frames:
        """The next notice of this kind; what comes before it is dropped."""
        while True:
            frames = self.receive()
            if frames[-2:-1] == [kind]:
                return frames


class RawDealer(RawPeer):
    """A decode rank's end of the control channel."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        identity: bytes | None = None,
        secret: Secret | None = None,
        server_key: bytes | None = None,
    ) -> None:
        super().__init__(zmq.DEALER, secret=secret, server_key=server_key)
        self.socket.setsockopt(zmq.IDENTITY, identity or new_life().encode())
        self.socket.connect(endpoint.url("tcp"))


class RawRouter(RawPeer):
    """A prefill rank's end of the control channel; `identity` is that of the last sender."""

    def __init__(self) -> None:
        super().__init__(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # else it drops what does not fit in the queue
        self.endpoint = Endpoint("127.0.0.1", self.socket.bind_to_random_port("tcp://127.0.0.1"))
        self.identity = b""

    def receive(self, timeout_s: float = 10.0) -> Frames:
        self.identity, *frames = super().receive(timeout_s)
        return frames

    def answer(self, frames: Sequence[bytes]) -> None:
        self.send(self.identity, *frames)
