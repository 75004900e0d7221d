"""The expert worker over real sockets: the recorded conversations, every bad field, strangers, and many peers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.workers.experts.tx1 import Tx1Limits, Tx1Token
from pdplane.workers.experts.worker import ExpertWorker, ExpertWorkerOptions
from pdplane.workers.listener import parse_networks
from tests.waiting import until
from tests.workers.raw_tx1 import TOKEN, RawCoordinator
from tests.workers.toy_experts import ToyStore

OBSERVED: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "tx1.json").read_text())[
    "observed"
]
_TALKS = [case for case in OBSERVED if "requests" in case]
HELLO = {"proto": "TX1", "model_type": "toy"}

# Requests that the recorded worker took, or whose capacity it died of, and what they are here.
CHANGED = {
    "load_layer_out_of_range": "error",  # made a table for a layer that is not there
    "load_layer_negative": "error",
    "exec_layer_string": "error",  # made a second table beside layer 0's
    "exec_layer_new_allocates": "error",
    "exec_rows_minus1": "error",  # took whatever the payload held
    "exec_row_float": "error",  # cut 0.9 down to 0
    "exec_over_capacity": "exec_reply",  # is split
}
_CAPACITY_2 = {"load_over_capacity", "load_beyond_capacity_evicts_silently", "exec_over_capacity"}


class Bench:
    """A started worker over the toy store."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (the options' own types)
        self.store = ToyStore()
        self.worker = ExpertWorker(
            Endpoint("127.0.0.1", 0), lambda: self.store, Tx1Token(TOKEN), ExpertWorkerOptions(**options)
        )
        self.worker.start()

    def connect(self, token: bytes = TOKEN) -> RawCoordinator:
        return RawCoordinator(self.worker.endpoint.host, self.worker.endpoint.port, token)

    def hello(self, **more: object) -> RawCoordinator:
        found = self.connect().finish()
        kind, self.ack, _ = found.ask("hello", {**HELLO, **more})
        assert kind == "hello_ack"
        return found

    def close(self) -> None:
        self.worker.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    found = Bench()
    yield found
    found.close()


def test_every_case_is_run() -> None:
    # The one without requests is the race of concurrent execs: test_concurrent_execs_with_evictions.
    assert len(OBSERVED) == 39 == len(_TALKS) + 1
    assert set(CHANGED) < {case["name"] for case in _TALKS}


@pytest.mark.parametrize("case", _TALKS, ids=[case["name"] for case in _TALKS])
def test_recorded_conversations(case: dict[str, Any]) -> None:
    bench = Bench(capacity=2 if case["name"] in _CAPACITY_2 else None)
    try:
        if case["name"] == "wrong_token":
            stranger = bench.connect(b"another token of 32 bytes.......")
            assert stranger.is_closed()
            stranger.close()
            assert bench.worker.statistics().refused_handshakes == 1
            return
        client = bench.connect().finish() if _begins_wrong(case) else bench.hello()
        try:
            if case["name"] == "hello_ok":
                _check_as_recorded(case["replies"][0], ("hello_ack", bench.ack, b""))
            else:
                _talk(case, client)
            if _begins_wrong(case):
                assert client.is_closed()
            else:
                assert client.ask("ping", {})[0] == "pong"  # whatever it was, the connection lives
        finally:
            client.close()
    finally:
        bench.close()


def _talk(case: dict[str, Any], client: RawCoordinator) -> None:
    replies = []
    for kind, header, nbytes in case["requests"]:
        payload = np.ones(nbytes // 2, "<f2").tobytes() + bytes(nbytes % 2)
        replies.append(client.ask(kind, header, payload))
    if case["name"] in CHANGED or isinstance(case["replies"][0], str):
        # Recorded as a lost connection, or as laxness: ours is an error that says why.
        kind, header, _ = replies[0]
        assert kind == CHANGED.get(case["name"], "error")
        assert kind != "error" or (header["code"] == "bad_request" and header["msg"])
        return
    for recorded, reply in zip(case["replies"], replies, strict=True):
        _check_as_recorded(recorded, reply)


def _begins_wrong(case: dict[str, Any]) -> bool:
    return case["name"] in ("hello_wrong_proto", "hello_wrong_model", "hello_missing")


def _check_as_recorded(recorded: list[Any], reply: tuple[str, dict[str, Any], bytes]) -> None:
    wanted_kind, wanted_header, nbytes = recorded
    kind, header, payload = reply
    assert (kind, len(payload)) == (wanted_kind, nbytes)
    assert list(header)[: len(wanted_header)] == list(wanted_header)  # theirs first, in their order; ours behind
    for key, value in wanted_header.items():
        assert header[key] == value or value in ("<host>", "<float>"), key


def ones(rows: int = 2) -> bytes:
    return np.ones((rows, 8), "<f2").tobytes()


EXEC: dict[str, Any] = {"layer": 0, "rows": 2, "dim": 8, "pairs": [[0, 0], [1, 1], [0, 1]]}
BAD_EXECS: dict[str, Any] = {
    "layer.missing": {k: v for k, v in EXEC.items() if k != "layer"},
    **{f"{key}={bad!r:.20}": {**EXEC, key: bad} for key in EXEC for bad in (None, "0", -1, 0.5, True, [], {}, 2**64)
       if not (key == "pairs" and bad == [])},
    "a row too high": {**EXEC, "pairs": [[2, 0]]},
    "an expert too high": {**EXEC, "pairs": [[0, 4]]},
    "a pair of three": {**EXEC, "pairs": [[0, 0, 0]]},
    "a pair of true": {**EXEC, "pairs": [[0, True]]},
    "an id that is none": {**EXEC, "id": -1},
    "grouped is no number": {**EXEC, "grouped": 1},
    "grouped but in another order": {**EXEC, "pairs": [[0, 1], [1, 0]], "grouped": True},
    "a dtype that is none": {**EXEC, "dtype": "<f8"},
}  # fmt: skip


def test_every_bad_field_is_answered_and_the_connection_lives(bench: Bench) -> None:
    client = bench.hello()
    for name, header in BAD_EXECS.items():
        kind, found, payload = client.ask("exec", header, ones())
        assert (kind, found["code"], payload) == ("error", "bad_request", b""), name
        assert found["field"].startswith("header"), name
    kind, found, _ = client.ask("exec", EXEC, ones(3))
    assert (kind, found["field"]) == ("error", "payload")
    for bad in (None, 7, {"0": 1}, {"0": [4]}, {"0": [True]}, {"00": [1]}, {"5": [0]}, {"0": [[]]}):
        assert client.ask("load", {"assignments": bad})[1]["code"] == "bad_request", bad
    assert client.ask("exec", EXEC, ones())[0] == "exec_reply"
    client.close()
    assert bench.worker.statistics().refused_requests == len(BAD_EXECS) + 9


def test_results_are_float16_rows_in_pair_order(bench: Bench) -> None:
    """As recorded peers read them, who name no dtype: swiglu of rows times (expert + 1), one row a pair."""
    client = bench.hello()
    rows = (np.arange(16, dtype="<f2") / 16).reshape(2, 8)
    _, header, payload = client.ask("exec", EXEC, rows.tobytes())
    client.close()
    assert list(header) == ["layer", "n", "exec_ms", "ms"]
    picked = rows.astype(np.float32)[[row for row, _ in EXEC["pairs"]]]
    scale = np.array([[expert + 1] for _, expert in EXEC["pairs"]], np.float32)
    gate = picked * scale
    wanted = gate / (1 + np.exp(-gate)) * gate * scale
    found = np.frombuffer(payload, "<f2").reshape(3, 8)
    assert np.allclose(found, wanted, rtol=1e-3, atol=1e-4)


def test_each_refusal_is_logged_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        client = bench.connect().finish()
        assert client.ask("hello", {"proto": "TX2"})[0] == "error"
        client.close()
        client = bench.hello()
        assert client.ask("exec", {**EXEC, "dim": 9}, ones())[0] == "error"
        client.close()
    said = [record.message for record in caplog.records]
    assert [sum(text in line for line in said) for text in ("a coordinator is refused", "exec is refused")] == [1, 1]


def test_replies_carry_the_id(bench: Bench) -> None:
    client = bench.hello(framer=1, dtype="<f4", max_payload=1 << 20)
    assert bench.ack["dtype"] == "<f4"
    assert bench.ack["identity"] == "toy"
    rows = np.arange(16, dtype="<f4").tobytes()
    for number, (kind, header, payload) in enumerate(
        [
            ("ping", {}, b""),
            ("load", {"assignments": {}}, b""),
            ("exec", EXEC, rows),
            ("nope", {}, b""),
            ("exec", {}, b""),
        ]
    ):
        _, found, _ = client.ask(kind, {**header, "id": number}, payload)
        assert found["id"] == number
    client.close()


def test_numbers_are_right_in_pair_order(bench: Bench) -> None:
    client = bench.hello(dtype="<f4")
    rows = np.random.default_rng(1).normal(size=(2, 8)).astype("<f4")
    _, _, payload = client.ask("exec", EXEC, rows.tobytes())
    found = np.frombuffer(payload, "<f4").reshape(3, 8)
    for result, (row, expert) in zip(found, EXEC["pairs"], strict=True):
        x = rows[row] * (expert + 1)
        assert np.allclose(result, x / (1 + np.exp(-x)) * x * (expert + 1), rtol=1e-5)
    client.close()


def test_evictions_are_reported(bench: Bench) -> None:
    small = Bench(capacity=2)
    try:
        client = small.hello()
        assert small.ack["cap"] == 2
        client.ask("load", {"assignments": {"0": [0, 1]}})
        _, found, _ = client.ask("load", {"assignments": {"0": [2]}})
        assert found["evicted"] == {"0": [0]}
        _, found, _ = client.ask("exec", {**EXEC, "pairs": [[0, n] for n in range(4)]}, ones())
        assert len(found["evicted"]) == 3  # four experts through two slots, one of them was there
        assert small.store.reading == {next(iter(small.store.reading))}  # one owner
        client.close()
        assert small.worker.statistics().evicted == 4
    finally:
        small.close()


def test_a_file_that_cannot_be_read_is_told(bench: Bench) -> None:
    client = bench.hello()
    bench.store.broken = {1}
    _, found, _ = client.ask("exec", EXEC, ones())
    assert found["code"] == "failed"
    assert "Input/output error" in found["msg"]
    bench.store.broken = set()
    assert client.ask("exec", EXEC, ones())[0] == "exec_reply"
    client.close()


def test_concurrent_execs_with_evictions() -> None:
    """The recorded race: 360 requests of three clients over two slots gave 64 silently wrong replies."""
    bench = Bench(capacity=2)
    wrong: list[object] = []

    def ask(seed: int) -> None:
        client = bench.hello(dtype="<f4")
        order = np.random.default_rng(seed)
        for _ in range(120):
            pairs = [[0, int(expert)] for expert in order.integers(0, 4, 3)]
            header = {"layer": int(order.integers(0, 2)), "rows": 1, "dim": 8, "pairs": pairs}
            _, _, payload = client.ask("exec", header, np.ones(8, "<f4").tobytes())
            for result, (_, expert) in zip(np.frombuffer(payload, "<f4").reshape(3, 8), pairs, strict=True):
                x = np.float32(expert + 1)
                if not np.allclose(result, x / (1 + np.exp(-x)) * x * x, rtol=1e-5):
                    wrong.append((pairs, result))
        client.close()

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert bench.worker.statistics().execs == 360
    bench.close()


def test_results_larger_than_the_coordinator_takes_are_refused(bench: Bench) -> None:
    client = bench.hello(dtype="<f4", max_payload=95)
    _, found, _ = client.ask("exec", EXEC, bytes(64))
    assert found["field"] == "pairs"
    client.close()


def test_silent_peers_are_bounded() -> None:
    bench = Bench(max_unproved=2, handshake_s=60)
    try:
        address = (bench.worker.endpoint.host, bench.worker.endpoint.port)
        with socket.create_connection(address, 5) as first, socket.create_connection(address, 5) as second:
            assert [len(first.recv(40)), len(second.recv(40))] == [40, 40]
            with socket.create_connection(address, 5) as third:
                assert len(third.recv(40)) == 40
                assert first.recv(1) == b""  # two are at their handshake: the oldest makes place
            bench.hello().close()
    finally:
        bench.close()


def test_silent_and_half_proved_peers_are_closed() -> None:
    bench = Bench(max_unproved=2, handshake_s=0.3)
    try:
        address = (bench.worker.endpoint.host, bench.worker.endpoint.port)
        with socket.create_connection(address, 5) as first, socket.create_connection(address, 5) as second:
            assert [len(first.recv(40)), len(second.recv(40))] == [40, 40]
            second.sendall(b"TX1A")
            assert first.recv(1) == b""  # after the deadline
            with contextlib.suppress(ConnectionResetError):  # when the deadline was before the four bytes
                assert second.recv(1) == b""
        until(lambda: _is_served(bench), "a handshake in time")
        until(lambda: _is_closed_after_its_proof(bench), "a proof in time")
    finally:
        bench.close()


def _is_served(bench: Bench) -> bool:
    """Whether a client was quick enough for the short deadline, which it may miss on a busy machine."""
    with contextlib.suppress(ConnectionError), contextlib.closing(bench.connect()) as client:
        client.finish()
        client.ask("hello", HELLO)
        return client.ask("ping", {})[0] == "pong"
    return False


def _is_closed_after_its_proof(bench: Bench) -> bool:
    """Whether a client that proved itself in time, and then said no hello, was hung up on."""
    with contextlib.suppress(ConnectionError), contextlib.closing(bench.connect()) as client:
        return client.finish().is_closed()
    return False


def test_garbage_and_replay_end_their_connection_only(bench: Bench) -> None:
    good = bench.hello()
    for attack in ("garbage", "replay", "flip"):
        client = bench.hello()
        frame = client.frame("ping", {})
        client.write({"garbage": bytes(100), "flip": frame[:-1] + bytes([frame[-1] ^ 1]), "replay": frame}[attack])
        if attack == "replay":
            assert client.receive()[0] == "pong"
            client.write(frame)
        assert client.is_closed()
        client.close()
    address = (bench.worker.endpoint.host, bench.worker.endpoint.port)
    with socket.create_connection(address, 5) as recorded:  # a whole session, replayed against a fresh nonce
        recorded.sendall(good.sent)
        assert recorded.recv(40)[:4] == b"TX1C"
        with contextlib.suppress(ConnectionResetError):
            assert recorded.recv(1) == b""
    assert good.ask("ping", {})[0] == "pong"
    good.close()


def test_declared_lengths_are_limited(bench: Bench) -> None:
    small = Bench(limits=Tx1Limits(header_bytes=1000, payload_bytes=1000))
    try:
        for nbytes in (1001, 2**40, 2**64 - 1):
            client = small.hello()
            frame = client.frame("ping", {})
            client.write(frame[:12] + nbytes.to_bytes(8, "big"))
            kind, told, _ = client.receive()
            assert (kind, told["field"]) == ("error", "payload")
            assert told["msg"] == f"a payload of {nbytes} bytes, allowed are 1000"
            client.close()
        client = small.hello()
        client.send("exec", EXEC, bytes(3 << 20))  # all of it, before the reply is read
        assert client.receive()[1]["field"] == "payload"
        assert client.is_closed()
        client.close()
    finally:
        small.close()


def test_only_allowed_addresses() -> None:
    for networks, allowed in ((["10.0.0.0/8"], False), (["10.0.0.0/8", "127.0.0.0/30"], True), (["::1"], False)):
        bench = Bench(allow=parse_networks(networks))
        try:
            if allowed:
                bench.hello().close()
                continue
            stranger = socket.create_connection((bench.worker.endpoint.host, bench.worker.endpoint.port), 5)
            with stranger, contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
            assert bench.worker.statistics().refused_connections == 1
        finally:
            bench.close()


def test_bad_settings_are_told_and_leave_nothing() -> None:
    with pytest.raises(ConfigError, match="300"):
        parse_networks(["300.0.0.0/8"])
    with pytest.raises(ConfigError, match="capacity of 0"):
        Bench(capacity=0)
    bench = Bench()
    again = ExpertWorker(bench.worker.endpoint, ToyStore, Tx1Token(TOKEN))
    with pytest.raises(ConfigError, match=str(bench.worker.endpoint.port)):
        again.start()
    bench.close()
