"""TX1's framing: the recorded session byte for byte, and the recorded attacks over a socket."""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import ConfigError, LocalProtocolError, WireError
from pdplane.workers.experts import tx1
from pdplane.workers.experts.tx1 import Framer, Opener, Sealer, Tx1Limits, Tx1Token
from tests.sockets import sends_at_once
from tests.workers.ends import tcp_pair

_VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "tx1.json").read_text())[
    "framer_prototype_vectors"
]
RECORDED, *ATTACKS = _VECTORS
TO_SERVER = bytes.fromhex(RECORDED["client_to_server_hex"])
TO_CLIENT = bytes.fromhex(RECORDED["server_to_client_hex"])
TOKEN = Tx1Token(bytes.fromhex(RECORDED["token_hex"]))
CLIENT_NONCE, SERVER_NONCE = bytes.fromhex(RECORDED["client_nonce"]), bytes.fromhex(RECORDED["server_nonce"])
LIMITS = Tx1Limits()

_HELLO = 72  # offsets in the client's stream
_HELLO_END = _HELLO + 20 + 5 + 0x22 + 32


def test_every_case_is_run() -> None:
    assert len(_VECTORS) == 15
    assert {attack["attack"] for attack in ATTACKS} == set(STREAMS)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_frames_are_not_held_back() -> None:
    with tcp_pair() as (_line, theirs):
        theirs.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert sends_at_once(theirs.getsockname()[1]) == [True, True]


def test_the_recorded_session_byte_for_byte() -> None:
    challenged = tx1.challenge(SERVER_NONCE)
    answered, transcript = tx1.answer(TOKEN, challenged, CLIENT_NONCE)
    accepted, keys = tx1.accept(TOKEN, challenged, answered)
    assert tx1.confirm(TOKEN, transcript, answered, accepted) == keys
    client, server = Sealer(keys.client_to_server, LIMITS), Sealer(keys.server_to_client, LIMITS)
    ones = bytes.fromhex("003c003c003c003c")
    sent = [
        client.seal("hello", {"proto": "TX1", "model_type": "toy"}),
        client.seal("exec", {"layer": 0, "rows": 1, "dim": 4, "pairs": [[0, 1]]}, ones),
    ]
    replied = [server.seal("hello_ack", {"num_layers": 2}), server.seal("exec_reply", {"n": 1}, ones)]
    assert answered + b"".join(part for parts in sent for part in parts) == TO_SERVER
    assert challenged + accepted + b"".join(part for parts in replied for part in parts) == TO_CLIENT
    assert bytes.fromhex(RECORDED["token_hex"]) not in TO_SERVER + TO_CLIENT
    assert not RECORDED["token_appears_on_wire"]


def test_the_recorded_session_over_a_socket() -> None:
    with tcp_pair() as (line, theirs):
        theirs.sendall(TO_SERVER)
        framer = Framer.serve(line, TOKEN, LIMITS, time.monotonic() + 5, SERVER_NONCE)
        assert [framer.receive(5).kind, bytes(framer.receive(5).payload).hex()] == ["hello", "003c003c003c003c"]
    with tcp_pair() as (line, theirs):
        theirs.sendall(TO_CLIENT)
        framer = Framer.connect(line, TOKEN, LIMITS, time.monotonic() + 5, CLIENT_NONCE)
        assert [framer.receive(5).kind, framer.receive(5).header.json] == ["hello_ack", {"n": 1}]


def _flipped(offset: int) -> bytes:
    data = bytearray(TO_SERVER)
    data[offset] ^= 1
    return bytes(data)


# Each attack's bytes to a server with the recorded nonce; the replay meets a fresh one.
STREAMS: dict[str, bytes] = {
    "bit flip in magic": _flipped(0),
    "bit flip in client nonce": _flipped(10),
    "bit flip in proof": _flipped(50),
    "bit flip in frame version": _flipped(_HELLO + 4),
    "bit flip in header length": _flipped(_HELLO + 8),  # its highest byte
    "bit flip in kind": _flipped(_HELLO + 20),
    "bit flip in header": _flipped(_HELLO + 30),
    "bit flip in tag": _flipped(_HELLO_END - 1),
    "replay of a recorded session against a fresh nonce": TO_SERVER,
    "reflection: server's own challenge as the client's nonce": TO_SERVER[:8] + SERVER_NONCE + TO_SERVER[40:],
    "replay of a frame in its own session": TO_SERVER[:_HELLO_END] + TO_SERVER[_HELLO:_HELLO_END],
    "payload length 2^40": TO_SERVER[: _HELLO + 12] + (2**40).to_bytes(8, "big") + TO_SERVER[_HELLO + 20 :],
    "silence": b"",
    "WP30 frame": b"WP30" + (2).to_bytes(4, "big") + bytes(4) + b"{}" + bytes(72),
}


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_attacks(name: str) -> None:
    nonce = bytes(32) if "fresh nonce" in name else SERVER_NONCE
    with tcp_pair() as (line, theirs):
        theirs.sendall(STREAMS[name])
        with pytest.raises((WireError, TimeoutError)) as refused:
            _read_two(line, nonce, 0.05 if name == "silence" else 5)
    recorded = next(attack for attack in ATTACKS if attack["attack"] == name)["server"]
    kinds = {"client proof": ("proof", "answer"), "bad prefix": ("prefix",), "bad tag": ("tag",),
             "frame over the limits": ("header", "payload")}  # fmt: skip
    if recorded == "TimeoutError: timed out":
        assert isinstance(refused.value, TimeoutError)
    else:
        assert isinstance(refused.value, WireError)
        assert refused.value.field in kinds[recorded.removeprefix("ProtocolError: ")]


def _read_two(line: Any, nonce: bytes, within_s: float) -> None:  # noqa: ANN401  (a line)
    framer = Framer.serve(line, TOKEN, LIMITS, time.monotonic() + within_s, nonce)
    framer.receive(5)
    framer.receive(5)


def test_a_handshake_that_drips_ends_at_its_deadline() -> None:
    with tcp_pair() as (line, theirs):
        theirs.sendall(TO_SERVER[:71])
        with pytest.raises(TimeoutError):
            Framer.serve(line, TOKEN, LIMITS, time.monotonic() + 0.1, SERVER_NONCE)


def test_a_server_with_another_token_is_found_out() -> None:
    with tcp_pair() as (line, theirs):
        theirs.sendall(TO_CLIENT)
        with pytest.raises(WireError) as refused:
            Framer.connect(line, Tx1Token(b"x" * 32), LIMITS, time.monotonic() + 5, CLIENT_NONCE)
    assert refused.value.field == "proof"


@pytest.mark.parametrize("versions", [(2, 3), (0, 0)])
def test_no_common_version(versions: tuple[int, int]) -> None:
    with pytest.raises(WireError) as refused:
        tx1.answer(TOKEN, b"TX1C" + bytes([*versions, 0, 0]) + bytes(32), CLIENT_NONCE)
    assert refused.value.field == "version"


def test_a_changed_offer_of_versions_breaks_the_proof() -> None:
    challenged = tx1.challenge(SERVER_NONCE)
    weaker = challenged[:4] + b"\0" + challenged[5:]
    answered, _ = tx1.answer(TOKEN, weaker, CLIENT_NONCE)
    with pytest.raises(WireError, match="token"):
        tx1.accept(TOKEN, challenged, answered)


@pytest.mark.parametrize(
    ("kind", "header", "payload"),
    [("Bad", {}, b""), ("", {}, b""), ("a", {"k": "x" * 100}, b""), ("a", {}, bytes(201))],
)
def test_frames_over_the_limits_are_not_made(kind: str, header: dict[str, str], payload: bytes) -> None:
    with pytest.raises(LocalProtocolError):
        Sealer(bytes(32), Tx1Limits(100, 200)).seal(kind, header, payload)


@given(st.binary(min_size=20, max_size=20))
def test_any_prefix_is_lengths_or_a_wire_error(prefix: bytes) -> None:
    with pytest.raises(WireError):
        Opener(bytes(32), LIMITS).lengths(prefix)


@pytest.mark.parametrize("header", [b"[]", b"nul", b'{"a":NaN}', b'{"a":1,"a":2}', b"\xff{}", b'{"a":' + b"[" * 9000])
def test_headers_that_are_no_object(header: bytes) -> None:
    key = bytes(32)
    prefix = b"TX1F\x01\x01\0\0" + len(header).to_bytes(4, "big") + bytes(8)
    opener = Opener(key, LIMITS)
    lengths = opener.lengths(prefix)
    tag = tx1.hmac.digest(key, bytes(8) + prefix + b"a" + header, "sha256")  # type: ignore[attr-defined]
    with pytest.raises(WireError) as refused:
        opener.open(prefix, lengths, b"a" + header, memoryview(b""), tag)
    assert refused.value.field == "header"


def test_token_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"  sixteen bytes ok\n")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Tx1Token.from_file(file)
    file.chmod(0o600)
    assert repr(Tx1Token.from_file(file)) == "Tx1Token(...)"
    assert Tx1Token.from_file(file).prove(b"x") == Tx1Token(b"sixteen bytes ok").prove(b"x")
    file.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="16 to 4096"):
        Tx1Token.from_file(file)
    with pytest.raises(ConfigError, match="No such file"):
        Tx1Token.from_file(tmp_path / "absent")
