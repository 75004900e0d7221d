"""TX1 in plain calls, as a second implementation would write it."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
from typing import Any

import numpy as np

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
        try:
            self._prove(token, nonce)
        except OSError:
            self.close()
            raise

    def _prove(self, token: bytes, nonce: bytes) -> None:
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


class RawWorker:
    """A worker of the old kind, for one coordinator: knows no ids and no dtype but float16. Doubles every row."""

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.requests: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._thread.join()
        self._server.close()

    def _serve(self) -> None:
        raw, _ = self._server.accept()
        with raw, contextlib.suppress(ConnectionError):
            keys = _accept(raw)
            numbers = [0, 0]
            while True:
                kind, header, payload = _read(raw, keys[0], numbers)
                self.requests.append(header)
                _write(raw, keys[1], numbers, *self._answer(kind, header, payload))

    def _answer(self, kind: str, header: dict[str, Any], payload: bytes) -> tuple[str, object, bytes]:
        if kind == "hello":
            return (
                "hello_ack",
                {"host": "h", "num_layers": 2, "num_experts": 4, "cap": self._capacity, "resident": {}},
                b"",
            )
        if kind == "load":
            return "load_reply", {"loaded": 0, "resident": {}}, b""
        if len({expert for _, expert in header["pairs"]}) > self._capacity:
            raise ConnectionError("more experts than slots")  # as recorded: no reply, the line ends
        rows = np.frombuffer(payload, np.float16).reshape(header["rows"], header["dim"])
        results = rows[[row for row, _ in header["pairs"]]] * np.float16(2)
        return "exec_reply", {"layer": header["layer"], "n": len(results), "exec_ms": 1.5}, results.tobytes()


def _accept(raw: socket.socket) -> list[bytes]:
    key = mac(TOKEN, b"TX1F key v1")
    challenge = b"TX1C\x01\x01\0\0" + b"S" * 32
    raw.sendall(challenge)
    answer = exactly(raw, 72)
    transcript, proof = challenge + answer[:40], answer[40:]
    assert proof == mac(key, b"client", transcript)
    raw.sendall(b"TX1B\x01\0\0\0" + mac(key, b"server", transcript, proof))
    return [mac(key, b"c2s", transcript, proof), mac(key, b"s2c", transcript, proof)]


def _read(raw: socket.socket, key: bytes, numbers: list[int]) -> tuple[str, dict[str, Any], bytes]:
    prefix = exactly(raw, 20)
    _, _, kind_bytes, _, header_bytes, payload_bytes = struct.unpack("!4sBBHIQ", prefix)
    body = exactly(raw, kind_bytes + header_bytes + payload_bytes)
    assert exactly(raw, 32) == mac(key, struct.pack("!Q", numbers[0]), prefix, body)
    numbers[0] += 1
    rest = body[kind_bytes:]
    return body[:kind_bytes].decode(), json.loads(rest[:header_bytes]), rest[header_bytes:]


def _write(raw: socket.socket, key: bytes, numbers: list[int], kind: str, header: object, payload: bytes) -> None:
    text = json.dumps(header).encode()
    head = struct.pack("!4sBBHIQ", b"TX1F", 1, len(kind), 0, len(text), len(payload)) + kind.encode() + text
    raw.sendall(head + payload + mac(key, struct.pack("!Q", numbers[1]), head, payload))
    numbers[1] += 1
