"""What comes to the port and is no request, and clients that hang up: neither costs an error in the log."""

from __future__ import annotations

import json
import logging
import socket
import struct

import pytest

from pdplane.api import Token
from pdplane.ids import Endpoint
from tests.http_client import ask
from tests.serving.bodies import chat
from tests.serving.fake_node import FakeNode


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\nno header\x00\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n",
    ],
    ids=["HTTP/2", "TLS", "bad header", "long header"],
)
def test_a_probe_costs_one_line_of_debug(decode: Endpoint, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    with caplog.at_level(logging.DEBUG, "aiohttp.server"):
        with socket.create_connection((decode.host, decode.port), timeout=10) as probe:
            probe.sendall(data)
            assert b" 400 " in probe.recv(4096).split(b"\r\n")[0]
        (line,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert (line.levelno, line.exc_info) == (logging.DEBUG, None)
    assert "\n" not in line.getMessage()
    assert ask(decode, "GET", "/health").status == 200


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_hangs_up_costs_no_error(
    node: FakeNode, decode: Endpoint, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    node.script = lambda leg: leg.on_token(Token(97, -1.0))
    payload = json.dumps(chat(stream=streamed)).encode()
    with socket.create_connection((decode.host, decode.port), timeout=10) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        client.sendall(head.encode() + payload)
        if streamed:
            client.recv(1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leg = node.next_leg()
    assert "closed the connection" in leg.cancelled()
    assert ask(decode, "GET", "/health").status == 200
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
