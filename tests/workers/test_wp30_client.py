"""The client against a worker shaped like the reference, in raw socket calls: accounting, and no late reply taken."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from pdplane.errors import SessionLost, WireError
from pdplane.ids import Endpoint
from pdplane.workers.cache.wp30 import Wp30Client, Wp30Limits, expect

Answer = Callable[[socket.socket, dict[str, object], bytes], None]


def reply(raw: socket.socket, header: object, payload: bytes = b"") -> None:
    text = json.dumps(header).encode()
    raw.sendall(b"WP30" + struct.pack(">II", len(text), len(payload)) + text + payload)


@contextlib.contextmanager
def reference(answer: Answer) -> Iterator[Endpoint]:
    """One client at a time and a thread that answers every frame, until the test ends."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                raw, _ = server.accept()
            except OSError:
                return
            with raw, contextlib.suppress(OSError, struct.error):
                while True:
                    _, header_bytes, payload_bytes = struct.unpack(">4sII", _exactly(raw, 12))
                    header = json.loads(_exactly(raw, header_bytes))
                    answer(raw, header, _exactly(raw, payload_bytes))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield Endpoint("127.0.0.1", server.getsockname()[1])
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def _exactly(raw: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := raw.recv(count - len(data))):
        data += part
    return data


def test_accounting_as_the_reference_counts_and_complete() -> None:
    def answer(raw: socket.socket, header: dict[str, object], payload: bytes) -> None:
        reply(raw, {"cmd": header["cmd"], "status": "success"}, b"1234567")

    with reference(answer) as endpoint, Wp30Client(endpoint) as client:
        found = client.run_cache(b"cache", [1, 2], 4, codec="zlib", prefix_hash="ph")
    header = {"cmd": "run_cache", "codec": "zlib", "prefix_hash": "ph", "query_ids": [1, 2], "max_tokens": 4}
    assert found.transport_bytes == found.request_bytes == 12 + len(json.dumps(header)) + 5
    assert found.reply_bytes == 7 + 12
    assert found.reply_frame_bytes == 12 + len(json.dumps(found.header)) + 7
    assert bytes(found.payload) == b"1234567"
    assert 0 <= found.send_ms <= found.roundtrip_ms
    assert found.failure is None
    assert expect(found, "status") == "success"
    with pytest.raises(WireError, match="no reason given"):
        expect(found, "text")


def test_a_late_reply_is_never_the_next_calls() -> None:
    release = threading.Event()

    def answer(raw: socket.socket, header: dict[str, object], payload: bytes) -> None:
        if header["cmd"] == "slow":
            release.wait(5)
        reply(raw, {"cmd": header["cmd"]})

    with reference(answer) as endpoint, Wp30Client(endpoint) as client:
        with pytest.raises(SessionLost, match=r"deadline|timed out"):
            client.call({"cmd": "slow"}, timeout_s=0.1)
        release.set()  # the reply to `slow` is written now, to a connection that is closed
        assert client.ping().header == {"cmd": "ping"}


GARBAGE: dict[str, bytes] = {
    "other magic": b"HTTP/1.1 400 Bad",
    "header too long": b"WP30" + struct.pack(">II", 101, 0) + bytes(101),
    "payload too long": b"WP30" + struct.pack(">II", 2, 2**32 - 1) + b"{}",
    "no object": b"WP30" + struct.pack(">II", 2, 0) + b"[]",
    "nothing": b"",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_bytes_that_are_no_reply_close_the_connection(name: str) -> None:
    def answer(raw: socket.socket, header: dict[str, object], payload: bytes) -> None:
        if header["cmd"] == "ping":
            reply(raw, {"cmd": "ping"})
            return
        raw.sendall(GARBAGE[name])
        raw.shutdown(socket.SHUT_WR)

    limits = Wp30Limits(header_bytes=100, payload_bytes=1000)
    with reference(answer) as endpoint, Wp30Client(endpoint, limits=limits) as client:
        with pytest.raises(SessionLost):
            client.call({"cmd": "garbage"})
        assert client.ping().header == {"cmd": "ping"}


def test_nobody_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1])
    with Wp30Client(endpoint) as client, pytest.raises(SessionLost, match=str(endpoint)):
        client.ping()
