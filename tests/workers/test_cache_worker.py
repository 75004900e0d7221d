"""The cache worker over real sockets with a stub model: every recorded reply, strangers, and many clients."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import pytest

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.workers.cache import codecs
from pdplane.workers.cache.file import CacheFile
from pdplane.workers.cache.model import CacheRun, Left, PrefilledCache, TextRun
from pdplane.workers.cache.worker import CacheWorker, CacheWorkerOptions
from pdplane.workers.cache.wp30 import Wp30Client, Wp30Limits
from tests.waiting import PATIENCE_S, until
from tests.workers.stub_receiver import FailingReceiver, StubReceiver
from tests.workers.wp30_cases import SERVER, Case, deep_nesting

_REQUESTS = [case for case in SERVER if "request" in case and case["name"] != "shutdown"]
_STREAMS = [case for case in SERVER if "stream_hex" in case]
_OTHERS = {"second_client_while_first_open", "second_client_after_first_closed", "shutdown"}

# Requests that get another reply than the recorded one, and why.
CHANGED: dict[str, dict[str, Any]] = {
    # Token ids are a list of numbers; recorded was what a stub makes of any sequence.
    "run_text_ids_string": {"status": "implementation_error"},
    # null is the default; recorded was the stub's own word for it.
    "run_text_max_null": {"text": "T1/48"},
    # The error names the field and both values.
    "run_cache_incompatible": {"error": "prefix_hash differs: ours ph, the cache's other"},
    "run_cache_corrupt_zlib": {"error": None},  # another text for the same damage
    # `prefill_time` exists here, so that it lacks its tokens is what is wrong with it.
    "prefill_time_docstring_only": {"status": "implementation_error"},
}


@pytest.fixture
def worker() -> Iterator[CacheWorker]:
    found = CacheWorker(Endpoint("127.0.0.1", 0), StubReceiver())
    found.start()
    yield found
    found.close()


def recorded_client(worker: CacheWorker, header: object, payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
    """The framing of the recorded client, in raw socket calls."""
    with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
        return exchange(raw, header, payload)


def exchange(raw: socket.socket, header: object, payload: bytes = b"") -> tuple[dict[str, Any], bytes]:
    _send(raw, header, payload)
    return _reply(raw)


def _send(raw: socket.socket, header: object, payload: bytes = b"") -> None:
    text = json.dumps(header).encode()
    raw.sendall(b"WP30" + struct.pack(">II", len(text), len(payload)) + text + payload)


def _reply(raw: socket.socket) -> tuple[dict[str, Any], bytes]:
    magic, header_bytes, payload_bytes = struct.unpack(">4sII", _exactly(raw, 12))
    assert magic == b"WP30"
    reply = _exactly(raw, header_bytes).decode("ascii")
    found = json.loads(reply)
    assert reply == json.dumps(found)  # the same spelling, byte for byte
    return found, _exactly(raw, payload_bytes)


def _exactly(raw: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = raw.recv(count - len(data))
        if not part:
            raise ConnectionError("closed")
        data += part
    return data


def test_every_case_is_run() -> None:
    assert len(SERVER) == 36 == len(_REQUESTS) + len(_STREAMS) + len(_OTHERS)
    assert set(CHANGED) < {case["name"] for case in _REQUESTS}


@pytest.mark.parametrize("case", _REQUESTS, ids=[case["name"] for case in _REQUESTS])
def test_recorded_replies(worker: CacheWorker, case: Case) -> None:
    reply, payload = recorded_client(worker, case["request"], b"CACHE"[: case["payload_len"]])
    changed = CHANGED.get(case["name"], {})
    if "status" in changed:
        assert list(reply) == ["cmd", "recv_ms", "payload_bytes", "status", "error", "trace", "server_ms"]
        assert reply["status"] == changed["status"]
        return
    assert list(reply) == case["reply_key_order"]
    assert payload.hex() == case["reply_payload_hex"]
    for key, wanted in {**case["reply"], **changed}.items():
        if key.endswith("_ms") or wanted in ("<str>", None):
            assert type(reply[key]) is (float if key.endswith("_ms") else type(reply[key]))
        else:
            assert reply[key] == wanted, key


@pytest.mark.parametrize("case", _STREAMS, ids=[case["name"] for case in _STREAMS])
def test_recorded_streams(worker: CacheWorker, case: Case) -> None:
    """What killed the recorded server closes one connection here, and the next client is served."""
    stream = bytes.fromhex(case["stream_hex"])
    if case["name"] == "deep_nesting_header":  # recorded by its beginning
        nested = deep_nesting()
        assert stream == (b"WP30" + len(nested).to_bytes(4, "big") + bytes(4) + nested)[: len(stream)]
        stream = b"WP30" + len(nested).to_bytes(4, "big") + bytes(4) + nested
    with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
        raw.sendall(stream)
        if case["client_sees"] == "reply":
            assert _exactly(raw, 4) == b"WP30"
        elif case["client_sees"] != "closed by us":
            _assert_closed(raw)
    assert recorded_client(worker, {"cmd": "ping"})[0]["cmd"] == "ping"


def _assert_closed(raw: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert raw.recv(1) == b""


def test_a_silent_client_blocks_nobody(worker: CacheWorker) -> None:
    with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as silent:
        assert recorded_client(worker, {"cmd": "ping"})[0]["cmd"] == "ping"
        silent.sendall(b"WP30\0\0")
        assert recorded_client(worker, {"cmd": "ping"})[0]["cmd"] == "ping"
        assert worker.statistics().accepted == 3
    assert recorded_client(worker, {"cmd": "ping"})[0]["cmd"] == "ping"  # the next one, once the first has closed


def test_several_clients_at_once(worker: CacheWorker) -> None:
    wrong: list[object] = []

    def ask(number: int) -> None:
        with Wp30Client(worker.endpoint) as client:
            for count in range(20):
                reply = client.run_text([1] * number, count + 1)
                if reply.header["text"] != f"T{number}/{count + 1}":
                    wrong.append(reply.header)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert worker.statistics().commands == 160


def test_shutdown_answers_ok_alone_and_ends_the_worker(worker: CacheWorker) -> None:
    assert recorded_client(worker, {"cmd": "shutdown"}) == ({"ok": True}, b"")
    assert worker.wait(5)
    worker.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5)


@pytest.mark.parametrize(
    ("header", "payload_bytes", "says"),
    [
        (b'{"cmd":"' + b"x" * 91 + b'"}', 0, "a header of 101 bytes, allowed are 1..100"),
        (b'{"cmd":"ping"}', 1001, "a payload of 1001 bytes, allowed are 1000"),
        (b'{"cmd":"ping"}', 3 << 20, "a payload of 3145728 bytes, allowed are 1000"),
    ],
)
def test_a_frame_over_the_limits_is_told_them_and_skipped(header: bytes, payload_bytes: int, says: str) -> None:
    """A client that sends the whole frame before it reads, as recorded ones do, hears the limit and may go on."""
    options = CacheWorkerOptions(Wp30Limits(header_bytes=100, payload_bytes=1000))
    worker = CacheWorker(Endpoint("127.0.0.1", 0), StubReceiver(), options)
    worker.start()
    try:
        with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
            raw.sendall(b"WP30" + struct.pack(">II", len(header), payload_bytes) + header + bytes(payload_bytes))
            reply, _ = _reply(raw)
            assert list(reply) == ["cmd", "recv_ms", "payload_bytes", "status", "error", "trace", "server_ms"]
            assert reply["cmd"] == ("ping" if payload_bytes else None)
            assert (reply["payload_bytes"], reply["error"]) == (payload_bytes, f"WireError: {says}")
            assert exchange(raw, {"cmd": "ping"}, bytes(1000))[0]["payload_bytes"] == 1000
        assert worker.statistics().malformed_frames == 1
    finally:
        worker.close()


def test_each_refusal_is_logged_once(worker: CacheWorker, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        for _ in range(3):
            with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
                raw.sendall(b"WP30" + struct.pack(">II", 2, 2**32 - 1) + b"{}")
                _reply(raw)
            recorded_client(worker, {"cmd": "run_cache", "prefix_hash": "x", "query_ids": [1]}, b"CACHE")
            recorded_client(worker, {"cmd": "run_text"})
    said = [record.getMessage() for record in caplog.records]
    for text in ("allowed are 1073741824", "a cache is refused: prefix_hash", "command 'run_text' failed"):
        assert sum(text in line for line in said) == 1, (text, said)


def test_the_limit_is_told_before_a_payload_comes(worker: CacheWorker) -> None:
    with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
        raw.sendall(b"WP30" + struct.pack(">II", 2**32 - 1, 2**32 - 1))
        assert "allowed are 1..4194304" in _reply(raw)[0]["error"]


class LongRun(StubReceiver):
    """Whose model runs for as long as its client is there."""

    def run_text(self, tokens: Sequence[int], max_tokens: int, left: Left) -> TextRun:
        until(left, "the client to leave")
        raise ConnectionAbortedError("the client left")


def test_a_command_ends_when_its_client_leaves() -> None:
    worker = CacheWorker(Endpoint("127.0.0.1", 0), LongRun())
    worker.start()
    try:
        with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
            _send(raw, {"cmd": "run_text", "token_ids": [1], "max_tokens": 2**31 - 1})
            until(lambda: worker.statistics().connections == 1, "the connection")
        until(lambda: worker.statistics().abandoned_commands == 1, "the command's end")
        until(lambda: worker.statistics().connections == 0, "the connection's end")
    finally:
        worker.close()


class HugeCache(StubReceiver):
    """Whose cache no frame holds."""

    def prefill_cache(self, tokens: Sequence[int], document_id: str, lossy: str, left: Left) -> PrefilledCache:
        return attrs.evolve(super().prefill_cache(tokens, document_id, lossy, left), data=np.zeros(1 << 32, "u1").data)


def test_a_cache_that_no_frame_holds_is_told() -> None:
    worker = CacheWorker(Endpoint("127.0.0.1", 0), HugeCache())
    worker.start()
    try:
        reply, payload = recorded_client(worker, {"cmd": "prefill_cache", "token_ids": [1]})
        assert reply["error"].startswith("ValueError: the cache is too large: 4294967296 bytes")
        assert payload == b""
    finally:
        worker.close()


def test_a_frame_that_stalls_is_closed() -> None:
    worker = CacheWorker(Endpoint("127.0.0.1", 0), StubReceiver(), CacheWorkerOptions(stall_s=0.1))
    worker.start()
    try:
        with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
            raw.sendall(b"WP30\0\0\0\x02\0\0\0\x05{}ab")
            _assert_closed(raw)
    finally:
        worker.close()


def test_a_failure_is_told_without_file_names() -> None:
    worker = CacheWorker(Endpoint("127.0.0.1", 0), FailingReceiver())
    worker.start()
    try:
        with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
            reply, _ = exchange(raw, {"cmd": "run_text", "token_ids": [1]})
            assert reply["error"] == "RuntimeError: out of memory"
            assert reply["trace"].splitlines() == ["RuntimeError: out of memory", "OSError: stub_receiver.py"]
            assert exchange(raw, {"cmd": "ping"})[0]["cmd"] == "ping"  # the connection lives
    finally:
        worker.close()


@pytest.mark.parametrize("command", ["1e999", "[" * 900 + "]" * 900])
def test_a_command_that_cannot_be_echoed_ends_its_connection_only(worker: CacheWorker, command: str) -> None:
    text = f'{{"cmd":{command}}}'.encode()
    with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as raw:
        raw.sendall(b"WP30" + struct.pack(">II", len(text), 0) + text)
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(4) in (b"", b"WP30")
    assert recorded_client(worker, {"cmd": "ping"})[0]["cmd"] == "ping"


def test_an_ipv6_address_is_listened_at() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")
    worker = CacheWorker(Endpoint.parse("[::1]:0"), StubReceiver())
    worker.start()
    with Wp30Client(worker.endpoint) as client:
        assert client.ping().header["cmd"] == "ping"
        assert client.shutdown().header == {"ok": True}
    worker.close()


def test_too_many_connections_are_closed_at_once() -> None:
    worker = CacheWorker(Endpoint("127.0.0.1", 0), StubReceiver(), CacheWorkerOptions(max_connections=1))
    worker.start()
    try:
        with Wp30Client(worker.endpoint) as first:
            first.ping()
            with socket.create_connection((worker.endpoint.host, worker.endpoint.port), 5) as second:
                _assert_closed(second)
            first.ping()
        assert worker.statistics().refused_connections == 1
    finally:
        worker.close()


def test_silent_connections_make_place_for_others() -> None:
    worker = CacheWorker(Endpoint("127.0.0.1", 0), StubReceiver(), CacheWorkerOptions(max_connections=4))
    address = worker.start()
    with contextlib.ExitStack() as stack:
        stack.callback(worker.close)
        for _ in range(3):
            for _silent in range(4):
                stack.enter_context(socket.create_connection((address.host, address.port), 5))
            with Wp30Client(address) as client:
                client.ping()
        assert worker.statistics().refused_connections == 0


def test_a_busy_port_is_named(worker: CacheWorker) -> None:
    again = CacheWorker(worker.endpoint, StubReceiver())
    with pytest.raises(ConfigError, match=str(worker.endpoint.port)):
        again.start()
    again.close()


class Small(StubReceiver):
    """Whose context needs little, and whose model runs when the test says so."""

    longest_cache = 1000

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def run_cache(self, file: CacheFile | None, query: Sequence[int], max_tokens: int, left: Left) -> CacheRun:
        self.begun.release()
        assert self.go.wait(PATIENCE_S)
        return super().run_cache(file, query, max_tokens, left)


@pytest.fixture
def small() -> Iterator[tuple[Small, CacheWorker]]:
    receiver = Small()
    worker = CacheWorker(Endpoint("127.0.0.1", 0), receiver, CacheWorkerOptions(expanded_bytes=2500))
    worker.start()
    yield receiver, worker
    receiver.go.set()
    worker.close()


@pytest.mark.parametrize("codec", codecs.LOSSLESS)
def test_nothing_is_unpacked_beyond_what_the_context_needs(small: tuple[Small, CacheWorker], codec: str) -> None:
    bomb = codecs.encode(codec, bytes(100_000))
    header = {"cmd": "run_cache", "codec": codec, "query_ids": [1]}
    reply, _payload = recorded_client(small[1], header, bytes(bomb))
    assert reply["status"] == "implementation_error"
    assert "1000" in reply["error"]


def test_unpacked_caches_share_one_bound(small: tuple[Small, CacheWorker]) -> None:
    receiver, worker = small
    with ThreadPoolExecutor(3) as clients:
        header = {"cmd": "run_cache", "codec": "zlib", "query_ids": [1]}
        payload = bytes(codecs.encode("zlib", bytes(900)))
        replies = [clients.submit(recorded_client, worker, header, payload) for _ in range(3)]
        assert [receiver.begun.acquire(timeout=PATIENCE_S) for _ in range(2)] == [True, True]
        assert recorded_client(worker, {"cmd": "ping"})[0]["config_hash"] == "cfg0", "others are answered meanwhile"
        assert not receiver.begun.acquire(blocking=False), "the third would be more than the bound"
        receiver.go.set()
        assert [reply.result()[0]["status"] for reply in replies] == ["success"] * 3
