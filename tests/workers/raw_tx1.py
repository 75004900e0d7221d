"""TX1 in plain calls, as a second implementation would write it."""

from __future__ import annotations

import hmac
import json
import socket
import struct
from typing import Any

TOKEN = bytes(range(32))
NONCE = b"C" * 32


def mac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def exactly(raw: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = raw.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


class RawCoordinator:
    """A coordinator's end of a connection; `sent` keeps every byte that went out."""

    def __init__(self, host: str, port: int, token: bytes = TOKEN, nonce: bytes = NONCE) -> None:
        self.raw = socket.create_connection((host, port), 5)
        self.sent = b""
        self._numbers = [0, 0]
        key = mac(token, b"TX1F key v1")
        challenge = exactly(self.raw, 40)
        transcript = challenge + b"TX1A\x01\0\0\0" + nonce
        proof = mac(key, b"client", transcript)
        self.write(transcript[40:] + proof)
        self._keys = [mac(key, b"c2s", transcript, proof), mac(key, b"s2c", transcript, proof)]
        self._expected = mac(key, b"server", transcript, proof)

    def finish(self) -> RawCoordinator:
        assert exactly(self.raw, 40) == b"TX1B\x01\0\0\0" + self._expected
        return self

    def write(self, data: bytes) -> None:
        self.sent += data
        self.raw.sendall(data)

    def frame(self, kind: str, header: object, payload: bytes = b"") -> bytes:
        text = json.dumps(header, separators=(",", ":")).encode()
        head = struct.pack("!4sBBHIQ", b"TX1F", 1, len(kind), 0, len(text), len(payload)) + kind.encode() + text
        tag = mac(self._keys[0], struct.pack("!Q", self._numbers[0]), head, payload)
        self._numbers[0] += 1
        return head + payload + tag

    def send(self, kind: str, header: object, payload: bytes = b"") -> None:
        self.write(self.frame(kind, header, payload))

    def receive(self) -> tuple[str, dict[str, Any], bytes]:
        prefix = exactly(self.raw, 20)
        _, _, kind_bytes, _, header_bytes, payload_bytes = struct.unpack("!4sBBHIQ", prefix)
        body = exactly(self.raw, kind_bytes + header_bytes + payload_bytes)
        tag = mac(self._keys[1], struct.pack("!Q", self._numbers[1]), prefix, body)
        assert exactly(self.raw, 32) == tag
        self._numbers[1] += 1
        kind, rest = body[:kind_bytes].decode(), body[kind_bytes:]
        return kind, json.loads(rest[:header_bytes]), rest[header_bytes:]

    def ask(self, kind: str, header: object, payload: bytes = b"") -> tuple[str, dict[str, Any], bytes]:
        self.send(kind, header, payload)
        return self.receive()

    def is_closed(self) -> bool:
        try:
            return self.raw.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.raw.close()
