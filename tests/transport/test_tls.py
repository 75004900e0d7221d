"""Who gets in over TLS, what the others are told, and that the bytes on the wire are not those of the cache."""

from __future__ import annotations

import socket
import threading

import attrs
import pytest

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.net import listen
from pdplane.security import Tls
from pdplane.transport.reports import Connected, ConnectFailed, Pushed, TransportOptions
from tests.certificates import member
from tests.transport.ends import Ends, push, random_arena, whole


@pytest.fixture
def encrypted() -> Ends:
    return Ends("tls")


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (member(), None, "WRONG_VERSION_NUMBER"),
        (None, member(), "asks for TLS"),
        (member("others"), member(), "certificate"),
        (attrs.evolve(member("others"), ca=member().ca), member(), ""),  # an alert, or an end that overtakes it
    ],
    ids=["decode has none", "prefill has none", "another CA", "a stranger that trusts ours"],
)
def test_only_members_of_one_ca_connect(ours: Tls | None, theirs: Tls | None, words: str) -> None:
    ends = Ends("tcp")
    decode = ends.decode(64, options=TransportOptions(tls=theirs))
    _sender, reports = ends.sender(decode, random_arena(64), options=TransportOptions(tls=ours))
    (failed,) = reports.wait(ConnectFailed)
    assert words.lower() in failed.cause.lower()
    assert not reports.of(Connected)
    member_sender, good = ends.sender(decode, random_arena(64), options=TransportOptions(tls=theirs))
    assert good.wait(Connected)
    member_sender.close()
    ends.close()


def test_the_bytes_on_the_wire_are_encrypted(encrypted: Ends) -> None:
    decode, source = encrypted.decode(1 << 20), random_arena(1 << 20)
    decode.open_all(7)
    with listen(Endpoint("127.0.0.1", 0)) as listener:
        listener.settimeout(None)
        seen = bytearray()
        tap = threading.Thread(target=_relay, args=(listener, decode.receiver.endpoint, seen))
        tap.start()
        port = listener.getsockname()[1]
        sender, reports = encrypted.sender(
            decode, source, peer=Endpoint("127.0.0.1", port), pushes=[push(7, whole(1 << 20))]
        )
        assert isinstance(reports.ends(1)[0], Pushed)
        sender.close()
        tap.join()
    assert decode.arena.bytes.tobytes() == source.bytes.tobytes()
    assert len(seen) > 1 << 20
    cache = source.bytes.tobytes()
    assert not any(cache[at : at + 32] in seen for at in range(0, 1 << 20, 1 << 14))
    assert decode.session.encode() not in seen
    encrypted.close()


def _relay(listener: socket.socket, target: Endpoint, seen: bytearray) -> None:
    """Pass one connection on, and keep what the connecting side sends."""
    client, _address = listener.accept()
    with client, socket.create_connection((target.host, target.port)) as server:
        back = threading.Thread(target=_pass, args=(server, client, bytearray()))
        back.start()
        _pass(client, server, seen)
        back.join()


def _pass(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
    try:
        while piece := source.recv(1 << 16):
            seen += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cert": "/nonexistent"}, "cannot use /nonexistent"),
        ({"key": member("others").key}, "cannot use"),
        ({"ca": "/nonexistent"}, "cannot read the CA"),
        ({"ca": None}, "--tls-ca"),
    ],
)
def test_files_that_cannot_work_are_named_at_the_start(encrypted: Ends, changes: dict[str, str], words: str) -> None:
    ends = Ends("tcp")
    with pytest.raises(ConfigError, match=words):
        ends.decode(64, options=TransportOptions(tls=attrs.evolve(member(), **changes)))
