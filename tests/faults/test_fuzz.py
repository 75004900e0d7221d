"""Thousands of almost right inputs at every socket: each may be refused, none may hurt what comes after.

`make test` sends two thousand to each socket, `make test-slow` a hundred thousand in all.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection

import attrs
import pytest
import zmq

from pdplane import wire
from pdplane.control.http_thread import HttpThread
from pdplane.control.ranks import RankListener, connect_rank
from pdplane.control.rendezvous import rendezvous_app
from pdplane.ids import Endpoint, Life, Rank
from pdplane.net import json_line
from pdplane.serving.routes import decode_app
from pdplane.transport.fence import Writer
from pdplane.transport.framing import encode_segment
from pdplane.transport.greeting import SenderGreeting
from pdplane.transport.reports import Pushed, TransportOptions
from pdplane.workers.cache.worker import CacheWorker
from pdplane.workers.experts.tx1 import Tx1Token
from pdplane.workers.experts.worker import ExpertWorker
from tests.control.registrations import native
from tests.faults.mutations import Mutations
from tests.http_client import ask
from tests.plane import hostile
from tests.plane.conftest import opened, start_decode, start_prefill  # noqa: F401  (fixtures)
from tests.plane.sides import DecodeSide, PrefillSide, meet
from tests.raw_peers import RawPeer
from tests.serving.bodies import chat, completion, generate
from tests.serving.fake_node import FakeNode, answers
from tests.transport.ends import Ends, push, random_arena, u64, whole
from tests.transport.stranger import stranger
from tests.transport.test_strangers import SEGMENT
from tests.waiting import PATIENCE_S, until
from tests.workers.raw_tx1 import TOKEN, RawCoordinator
from tests.workers.stub_receiver import StubReceiver
from tests.workers.test_cache_worker import recorded_client
from tests.workers.toy_experts import ToyStore

FEW, MANY = 2_000, 12_000

counts = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
HOSTS = (b"", b"localhost", b"127.0.0.1", b"127.0.0.2", b"::1", b"h" * 256, b"\xff", b"no such host")
SESSIONS = (b"", b"127.0.0.1:7001", b"127.0.0.1:1", b"s" * 600, b"\x80:1", b"[::1]:9", b"127.0.0.1:0")


def say_once(endpoint: Endpoint, data: bytes) -> None:
    """One connection: say this, end, and read until the other side has ended too."""
    with socket.create_connection((endpoint.host, endpoint.port), PATIENCE_S) as client:
        client.settimeout(PATIENCE_S)
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
        except TimeoutError:
            raise AssertionError(f"nobody ended the connection after {data[:100]!r}") from None
        except OSError:  # the other side may end it at any point
            return


def rejected(side: PrefillSide | DecodeSide) -> int:
    return int(sum(side.plane.statistics()["rejected"].values()))


@attrs.define
class Pair:
    """Both planes, which have met."""

    prefill: PrefillSide
    decode: DecodeSide

    def serves_on(self) -> bool:
        meet(self.prefill, self.decode).serve()
        return self.prefill.plane.alive and self.decode.plane.alive


@pytest.fixture
def pair(start_prefill: Callable[..., PrefillSide], start_decode: Callable[..., DecodeSide]) -> Pair:  # noqa: F811
    found = Pair(start_prefill(), start_decode())
    assert found.serves_on()
    return found


def send_all(kind: int, at: Endpoint, messages: Iterable[list[bytes]]) -> None:
    with RawPeer(kind) as raw:
        raw.socket.connect(f"tcp://{at}")
        for frames in messages:
            raw.send(*frames)
        raw.socket.setsockopt(zmq.LINGER, 5000)


@counts
def test_the_control_socket(pair: Pair, count: int) -> None:
    changes, control = Mutations(1), pair.prefill.plane.control
    target, manifest = pair.decode.lend(10)
    bases = [
        hostile.registration(pair.prefill.plane.layout),
        [b"7", b"127.0.0.1:7001", wire.encode_manifest(manifest)],
        [hostile.NOTICE, b"window", b'{"room":7,"generation":1,"prompt_hash":"ab"}'],
        [hostile.NOTICE, b"ping", b'{"life":"a"}'],
        [hostile.NOTICE, b"hello", b'{"version":"1","life":"a","fingerprint":{"required":[],"advisory":[]}}'],
    ]
    pair.decode.pool.release(target)
    assert control is not None
    send_all(zmq.DEALER, control, (changes.frames(bases, {1: HOSTS, 3: SESSIONS}) for _ in range(count)))
    until(lambda: rejected(pair.prefill) > count // 3, "most of them")
    assert pair.serves_on()


@counts
def test_the_control_socket_of_legacy_peers(pair: Pair, count: int) -> None:
    changes, control = Mutations(2), pair.prefill.plane.legacy_control
    target, manifest = pair.decode.lend(10)
    offer = [b"7", b"127.0.0.1:7001", wire.encode_manifest(manifest)]
    pair.decode.pool.release(target)
    assert control is not None
    bases = [hostile.registration(pair.prefill.plane.layout), offer]
    send_all(zmq.PUSH, control, (changes.frames(bases, {1: HOSTS, 3: SESSIONS}) for _ in range(count)))
    until(lambda: rejected(pair.prefill) > count // 3, "most of them")
    assert pair.serves_on()


@counts
def test_the_status_socket(pair: Pair, count: int) -> None:
    changes, status = Mutations(3), pair.decode.plane.legacy_status
    bases = [[b"1", b"5", b"0", b"42", b"", b"0", struct.pack("=d", -0.5)], [b"1", b"0", b"0", b"-1", b""]]
    assert status is not None
    send_all(zmq.PUSH, status, (changes.frames(bases) for _ in range(count)))
    until(lambda: rejected(pair.decode) > count // 3, "most of them")
    assert pair.serves_on()


@counts
def test_the_data_plane(count: int) -> None:
    changes = Mutations(4)
    with closing(Ends("tcp")) as ends:
        decode = ends.decode(64, options=TransportOptions(greeting_timeout_s=5))
        hello = SenderGreeting(decode.session, Writer(Rank(9), Life("stranger")), None).hello()
        segment = encode_segment(SEGMENT, u64(0, 16), u64(16, 16)) + bytes(32)
        for number in range(count):
            if number % 2:
                say_once(decode.receiver.endpoint, changes.data(hello))
                continue
            with stranger(decode) as client:
                client.greet()
                client.send(changes.data(segment))
                with contextlib.suppress(OSError):
                    client.socket.shutdown(socket.SHUT_WR)
                assert client.is_closed_by_peer()
        assert not decode.arena.bytes.any()
        sender, reports = ends.sender(decode, random_arena(64))
        decode.open_all(1)
        sender.submit(push(1, whole(64)))
        assert isinstance(reports.ends(1)[0], Pushed)


@counts
def test_the_line_between_ranks(count: int) -> None:
    changes = Mutations(5)
    with closing(RankListener("127.0.0.1")) as listener, ThreadPoolExecutor(1) as other:
        at = Endpoint("127.0.0.1", listener.port)
        accepted = other.submit(listener.accept, 2)
        greeting = json_line({"word": listener.word, "rank": 1})
        for _ in range(count):
            say_once(at, changes.data(greeting).replace(listener.word.encode(), b"?" * 32))
        with closing(connect_rank(at, listener.word, 1)) as link:
            (there,) = accepted.result(PATIENCE_S)
            with closing(there):
                heard: queue.SimpleQueue[object] = queue.SimpleQueue()
                there.start(heard.put, lambda _why: None)
                link.start(lambda _message: None, lambda _why: None)
                link.send("turn", 3)
                assert heard.get(timeout=PATIENCE_S) == ("turn", 3, "")


@pytest.fixture
def http() -> Iterator[HttpThread]:
    thread = HttpThread("pdplane-http-fuzz")
    thread.start()
    yield thread
    thread.close()


@counts
def test_the_rendezvous(http: HttpThread, count: int) -> None:
    changes, at = Mutations(6), http.serve(rendezvous_app(), "127.0.0.1", 0)
    with closing(HTTPConnection(at.host, at.port, timeout=PATIENCE_S)) as connection:
        for _ in range(count):
            connection.request("PUT", "/route", changes.json(native(Life("a" * 32))))
            answer = connection.getresponse()
            answer.read()
            assert answer.status < 500
    assert ask(at, "PUT", "/route", native(Life("b" * 32), engine_rank=0)).status in (200, 409)


@counts
def test_the_http_of_a_daemon(http: HttpThread, count: int) -> None:
    changes, node = Mutations(7), FakeNode()
    node.script = answers("ab")
    at = http.serve(decode_app(node), "127.0.0.1", 0)
    bodies = {
        "/generate": generate(sampling_params={"max_new_tokens": 3, "stop": ["x"], "temperature": 0.5}, stream=False),
        "/v1/chat/completions": chat(max_tokens=3, tools=[], logit_bias={"3": 1}, n=1, stop=["x"]),
        "/v1/completions": completion([1, 2, 3], max_tokens=3, logprobs=2, seed=1),
    }
    with closing(HTTPConnection(at.host, at.port, timeout=PATIENCE_S)) as connection:
        for _ in range(count):
            path = changes.chance.choice(list(bodies))
            connection.request("POST", path, changes.json(bodies[path]))
            answer = connection.getresponse()
            body = answer.read()
            assert answer.status in (200, 400, 404), (path, body[:500])
    head = b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
    for _ in range(count // 10):
        say_once(at, changes.data(head))
    assert ask(at, "POST", "/generate", generate()).json["text"] == "ab"


@counts
def test_the_cache_worker(count: int) -> None:
    changes = Mutations(8)
    headers = [
        {"cmd": "ping"},
        {"cmd": "run_text", "ids": [1, 2], "max_tokens": 2},
        {"cmd": "run_cache", "codec": "raw"},
    ]
    with closing(CacheWorker(Endpoint("127.0.0.1", 0), StubReceiver())) as worker:
        worker.start()
        for _ in range(count):
            header = json.dumps(changes.value(changes.chance.choice(headers))).encode()
            frame = b"WP30" + struct.pack(">II", len(header), 5) + header + b"CACHE"
            say_once(worker.endpoint, changes.data(frame) if changes.chance.random() < 0.5 else frame)
        assert recorded_client(worker, {"cmd": "ping"})[0]["cmd"] == "ping"


@counts
def test_the_expert_worker(count: int) -> None:
    """Half the inputs come before the proof, half from a coordinator that knows the token."""
    changes = Mutations(9)
    hello = {"proto": "TX1", "model_type": "toy"}
    requests = [
        ("load", {"layer": 0, "experts": [0, 1]}, b""),
        ("exec", {"layer": 0, "pairs": [[0, 0]], "rows": 1, "dtype": "float32"}, bytes(32)),
    ]
    with closing(ExpertWorker(Endpoint("127.0.0.1", 0), ToyStore, Tx1Token(TOKEN))) as worker:
        worker.start()
        for number in range(count):
            if number % 2:
                say_once(worker.endpoint, changes.data(b"TX1A\x01\0\0\0" + bytes(64)))
                continue
            client = RawCoordinator(worker.endpoint.host, worker.endpoint.port).finish()
            with contextlib.suppress(ConnectionError), closing(client):
                client.ask("hello", hello)
                kind, header, payload = changes.chance.choice(requests)
                client.ask(kind, changes.value(header), changes.data(payload) if payload else payload)
        client = RawCoordinator(worker.endpoint.host, worker.endpoint.port).finish()
        with closing(client):
            assert client.ask("hello", hello)[0] == "hello_ack"
