"""Whoever connects to a receiver and says whatever they like."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from pdplane.ids import Life, Rank
from pdplane.transport.fence import Writer
from pdplane.transport.greeting import PREFIX_BYTES, Accepted, GreetingKind, SenderGreeting, decode_body, decode_prefix
from pdplane.transport.unix_socket import address_of
from tests.transport.ends import Decode


class Stranger:
    """A raw client socket of a receiver, over TCP or its Unix path."""

    def __init__(self, decode: Decode, unix_path: str | None = None) -> None:
        endpoint = decode.receiver.endpoint
        self.decode = decode
        if unix_path is None:
            self.socket = socket.create_connection((endpoint.host, endpoint.port))
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address_of(unix_path))
        self.socket.settimeout(30)

    def greet(self, rank: int = 9) -> int:
        """Greet as a writer should; the session number."""
        return self.accepted(rank).session_number

    def accepted(self, rank: int = 9) -> Accepted:
        """Greet as a writer should; all that the receiver then says."""
        greeting = SenderGreeting(self.decode.session, Writer(Rank(rank), Life("stranger")), None)
        self.socket.sendall(greeting.hello())
        self.socket.sendall(greeting.welcome(*self.message()))
        return greeting.accepted(*self.message())

    def message(self) -> tuple[GreetingKind, tuple[str, ...]]:
        kind, length = decode_prefix(self.read(PREFIX_BYTES))
        return kind, decode_body(kind, self.read(length))

    def read(self, count: int) -> bytes:
        data = self.socket.recv(count, socket.MSG_WAITALL)
        assert len(data) == count
        return data

    def is_closed_by_peer(self) -> bool:
        """Wait for the end of the stream, whatever comes before it."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(4096):
                pass
        return True

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the receiver may have given up already
            self.socket.sendall(data)


@contextlib.contextmanager
def stranger(decode: Decode, unix_path: str | None = None) -> Iterator[Stranger]:
    made = Stranger(decode, unix_path)
    with made.socket:
        yield made
