"""From TCP to a Unix socket or to reading memory: agreed on when both can, and never in the way of a push."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import WireError
from pdplane.ids import Generation, Room
from pdplane.kv.arena import Arena
from pdplane.messages import WriterCut
from pdplane.transport.framing import HEADER_BYTES, FrameKind, Header, decode_header, encode_header, encode_segment
from pdplane.transport.greeting import (
    Accepted,
    Attach,
    GreetingKind,
    boot_id,
    decode_attach,
    decode_attached,
    decode_body,
    decode_prefix,
    encode_attached,
    is_reachable,
)
from pdplane.transport.pull import Nonce, PeerMemory, allow_tracer, can_pull
from pdplane.transport.reports import Connected, Pushed
from pdplane.transport.unix_socket import open_unix_listener
from tests.transport.ends import Decode, Ends, Reports, counted, push, random_arena, u64, whole
from tests.transport.stranger import Stranger, stranger

pytestmark = pytest.mark.skipif(not can_pull(), reason="only Linux lets a process read another one's memory")
NBYTES = 1 << 16
SCHEMES = ("tcp", "unix", "pull", "auto")


def way_of(reports: Reports) -> str:
    return reports.wait(Connected)[0].way


@pytest.mark.parametrize("theirs", SCHEMES)
@pytest.mark.parametrize("ours", SCHEMES)
def test_any_two_agree_on_the_shortest_way_that_both_know(ours: str, theirs: str) -> None:
    receiving, sending = Ends(theirs), Ends(ours)
    try:
        source, decode = random_arena(NBYTES), receiving.decode(NBYTES)
        decode.open_all(7)
        sender, reports = sending.sender(decode, source)
        sender.submit(push(7, whole(NBYTES)))
        assert isinstance(reports.ends(1)[0], Pushed)
        known = [{"auto": 2, "pull": 2, "unix": 1, "tcp": 0}[scheme] for scheme in (ours, theirs)]
        way = ("tcp", "unix", "pull")[min(known)]
        assert way_of(reports) == way
        assert decode.receiver.snapshot().ways == {way: 1}
        assert (decode.arena.bytes == source.bytes).all()
        assert not decode.reports.of(WriterCut), "the end of the TCP connection is no cut"
    finally:
        sending.close()
        receiving.close()


@pytest.fixture
def foldered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Systems without abstract names: the sockets are files, in folders made here."""
    monkeypatch.setattr("pdplane.transport.unix_socket.ABSTRACT", False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_socket_in_a_folder_is_for_its_user_only_and_leaves_nothing(foldered: Path, pulled: Ends) -> None:
    source, decode = random_arena(NBYTES), pulled.decode(NBYTES)
    decode.open_all(7)
    sender, reports = pulled.sender(decode, source)
    sender.submit(push(7, whole(NBYTES)))
    assert isinstance(reports.ends(1)[0], Pushed)
    assert way_of(reports) == "pull"
    (folder,) = foldered.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    decode.receiver.close()
    assert not list(foldered.iterdir())


def test_a_path_that_is_gone_leaves_the_sender_on_tcp(foldered: Path, pulled: Ends) -> None:
    source, decode = random_arena(NBYTES), pulled.decode(NBYTES)
    decode.open_all(7)
    shutil.rmtree(next(foldered.iterdir()))
    sender, reports = pulled.sender(decode, source)
    sender.submit(push(7, whole(NBYTES)))
    assert isinstance(reports.ends(1)[0], Pushed)
    assert way_of(reports) == "tcp"


@pytest.mark.parametrize("name", ["missing", "x" * 120])
def test_a_receiver_without_a_place_for_its_socket_serves_tcp(
    foldered: Path, pulled: Ends, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = foldered / name
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    if name != "missing":
        folder.mkdir()
    assert open_unix_listener() is None
    assert way_of(pulled.sender(pulled.decode(NBYTES), random_arena(NBYTES))[1]) == "tcp"


@pytest.mark.parametrize("wish", [Attach(1, "unix"), b"PDPG\x01\x01\x00\x00", b"GET / HTTP/1.0\r\n\r\n"], ids=str)
def test_strangers_at_the_door_cost_nobody_else(pulled: Ends, wish: Attach | bytes) -> None:
    decode = pulled.decode(NBYTES)
    decode.open_all(1)
    with stranger(decode) as client, stranger(decode, client.accepted().unix_path) as other:
        other.send(wish if isinstance(wish, bytes) else wish.encode())
        assert other.is_closed_by_peer()
        assert decode.receiver.snapshot().ways == {"tcp": 1}, "and the number's owner stays connected"
    sender, reports = pulled.sender(decode, random_arena(NBYTES))
    sender.submit(push(1, whole(64)))
    assert isinstance(reports.ends(1)[0], Pushed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_users_process_is_refused_before_it_speaks(pulled: Ends) -> None:
    decode = pulled.decode()
    with stranger(decode) as client:
        accepted = client.accepted()
        os.seteuid(65534)
        try:
            over = Stranger(decode, accepted.unix_path)
        finally:
            os.seteuid(0)
        with over.socket:
            over.send(Attach(accepted.session_number, "unix").encode())
            assert over.message() == (GreetingKind.REFUSED, ("another user's process",))
            assert over.is_closed_by_peer()
        assert decode.receiver.snapshot().ways == {"tcp": 1}


@pytest.mark.parametrize("wrong", [{"nonce": "a" * 64}, {"nonce_address": 0}, {"nonce_address": 2**64 - 8}], ids=str)
def test_a_nonce_that_is_not_there_means_bytes_over_the_socket(pulled: Ends, wrong: dict[str, object]) -> None:
    decode = pulled.decode(64)
    decode.open_all(7)
    with stranger(decode) as client:
        accepted = client.accepted()
        wish = attrs.evolve(Attach(accepted.session_number, "pull", arena_nbytes=64), **wrong)  # type: ignore[arg-type]
        with stranger(decode, accepted.unix_path) as over:
            over.send(wish.encode())
            assert decode_attached(*over.message(), "pull") == "unix"
            assert client.is_closed_by_peer(), "the TCP connection has done its part"
            header = Header(
                FrameKind.SEGMENT, accepted.session_number, Room(7), Generation(1), 0, count=1, nbytes=4, last=True
            )
            over.send(encode_segment(header, u64(0), u64(4)) + b"abcd")
            assert decode_header(over.read(HEADER_BYTES), accepted.session_number).count == 0
    assert decode.arena.bytes[:4].tobytes() == b"abcd"


def pulled_stranger(decode: Decode, client: Stranger, over: Stranger, arena: Arena, number: int) -> None:
    nonce = Nonce()
    over.send(Attach(number, "pull", nonce.address, nonce.text, arena.base, arena.nbytes).encode())
    assert decode_attached(*over.message(), "pull") == "pull"
    assert client.is_closed_by_peer()


@pytest.mark.parametrize("sources", [(64, 0), (0, 2**64 - 16), (49, 0)])
def test_sources_outside_the_senders_arena_end_the_connection(pulled: Ends, sources: tuple[int, int]) -> None:
    arena, decode = random_arena(64), pulled.decode(64)
    decode.open_all(7)
    with stranger(decode) as client:
        accepted = client.accepted()
        with stranger(decode, accepted.unix_path) as over:
            pulled_stranger(decode, client, over, arena, accepted.session_number)
            header = Header(
                FrameKind.PULL, accepted.session_number, Room(7), Generation(1), 0, count=2, nbytes=32, last=True
            )
            over.send(encode_segment(header, u64(0, 16), u64(16, 16), u64(*sources)))
            assert over.is_closed_by_peer()
    assert "malformed" in decode.reports.wait(WriterCut)[0].text
    assert not decode.arena.bytes.any()


def test_memory_that_went_away_cuts_the_connection_and_counts_nothing(pulled: Ends) -> None:
    arena, decode = random_arena(64), pulled.decode(64)
    decode.open_all(7)
    with stranger(decode) as client:
        accepted = client.accepted()
        with stranger(decode, accepted.unix_path) as over:
            nonce = Nonce()
            number = accepted.session_number
            over.send(Attach(number, "pull", nonce.address, nonce.text, 4096, 64).encode())  # page 1 is never mapped
            assert decode_attached(*over.message(), "pull") == "pull"
            header = Header(FrameKind.PULL, number, Room(7), Generation(1), 0, count=1, nbytes=64, last=True)
            over.send(encode_segment(header, u64(0), u64(64), u64(0)))
            assert over.is_closed_by_peer()
    assert "memory" in decode.reports.wait(WriterCut)[0].text
    assert counted(decode.fence) == 0
    assert arena.bytes.any()


def test_pulled_segments_are_answered_one_by_one_and_an_abandoned_push_once(pulled: Ends) -> None:
    arena, decode = random_arena(64), pulled.decode(64)
    decode.open_all(7)
    with stranger(decode) as client:
        accepted = client.accepted()
        with stranger(decode, accepted.unix_path) as over:
            pulled_stranger(decode, client, over, arena, accepted.session_number)
            header = Header(FrameKind.PULL, accepted.session_number, Room(7), Generation(1), 0, count=1, nbytes=16)
            over.send(encode_segment(header, u64(0), u64(16), u64(48)))
            taken = decode_header(over.read(HEADER_BYTES), accepted.session_number)
            assert (taken.kind, taken.segment) == (FrameKind.TAKEN, 0)
            gone = Header(FrameKind.ABANDON, accepted.session_number, Room(7), Generation(1), 1, last=True)
            over.send(encode_header(gone))
            ack = decode_header(over.read(HEADER_BYTES), accepted.session_number)
            assert (ack.kind, ack.segment, ack.nbytes) == (FrameKind.ACK, 1, 16)
    assert (decode.arena.bytes[:16] == arena.bytes[48:]).all()


def test_a_sender_that_stalls_on_a_unix_socket_does_not_hold_the_window(pulled: Ends) -> None:
    decode = pulled.decode(1 << 16)
    decode.open_all(7)
    with stranger(decode) as client:
        accepted = client.accepted()
        with stranger(decode, accepted.unix_path) as over:
            over.send(Attach(accepted.session_number, "unix").encode())
            assert decode_attached(*over.message(), "unix") == "unix"
            header = Header(
                FrameKind.SEGMENT, accepted.session_number, Room(7), Generation(1), 0, 1, 1 << 16, last=True
            )
            over.send(encode_segment(header, u64(0), u64(1 << 16)) + b"x" * 1000)
            while not decode.arena.bytes[0]:
                pass
            assert decode.fence.close(Room(7), Generation(1))
            decode.arena.bytes[:] = 0
            over.send(b"x" * ((1 << 16) - 1000))
            assert decode_header(over.read(HEADER_BYTES), accepted.session_number).count == 1
    assert not decode.arena.bytes.any()


def test_the_memory_of_another_process_is_known_by_its_nonce() -> None:
    say = (
        "import sys\nfrom pdplane.transport.pull import Nonce\nn=Nonce()\n"
        "print(n.address, n.text, flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", say], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        address, nonce = other.stdout.readline().split()
        memory = PeerMemory(other.pid, 0, 0)
        assert memory.holds(int(address), bytes.fromhex(nonce))
        assert not memory.holds(int(address), bytes(32))
        assert not PeerMemory(os.getpid(), 0, 0).holds(int(address), bytes.fromhex(nonce))
        other.communicate("")
    assert not memory.holds(int(address), bytes.fromhex(nonce)), "the process is gone"
    allow_tracer(os.getpid())


def read(data: bytes) -> tuple[GreetingKind, tuple[str, ...]]:
    kind, _ = decode_prefix(data[:8])
    return kind, decode_body(kind, data[8:])


@given(st.builds(Attach, *[st.integers(0, 2**64 - 1)], st.sampled_from(["unix", "pull"]), st.integers(0, 2**64 - 1)))
def test_attach_reads_back(wish: Attach) -> None:
    assert decode_attach(*read(wish.encode())) == wish


@given(st.lists(st.text(max_size=30), min_size=6, max_size=6), st.integers(0, 5))
def test_any_other_texts_of_an_attach_are_refused(texts: list[str], at: int) -> None:
    good = ["5", "pull", "1", "0" * 64, "1", "1"]
    good[at] = texts[0]
    for each in (texts, good):
        try:
            assert isinstance(decode_attach(GreetingKind.ATTACH, tuple(each)), Attach)
        except WireError:
            continue


def test_ways_that_were_not_asked_for_are_refused() -> None:
    with pytest.raises(WireError):
        decode_attached(*read(encode_attached("pull")), "unix")
    with pytest.raises(WireError):
        decode_attached(*read(encode_attached("tunnel")), "pull")
    assert decode_attached(*read(encode_attached("unix")), "pull") == "unix"


def test_only_our_own_kernel_and_user_are_reachable() -> None:
    offer = Accepted(1, "d", boot_id(), str(os.getuid()), "/a/b")  # type: ignore[arg-type]
    assert is_reachable(offer)
    for change in ({"boot_id": "another"}, {"uid": "12345678"}, {"unix_path": ""}):
        assert not is_reachable(attrs.evolve(offer, **change))
