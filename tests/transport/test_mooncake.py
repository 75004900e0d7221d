"""The real Mooncake engine over TCP on loopback: whole bytes, clear failures, no promise that it cannot keep."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

import attrs
import numpy as np
import pytest

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.transport.framing import segments
from pdplane.transport.mooncake import BATCH_RUNS, mooncake_options
from pdplane.transport.registry import Sender, close_shared, is_one_sided, open_sender, require_transport
from pdplane.transport.reports import Connected, ConnectFailed, Disconnected, Pushed, PushFailed, TransportOptions
from tests.mooncake_engine import needs_engine
from tests.transport.ends import (
    PATIENCE_S,
    PREFILL_LIFE,
    Decode,
    Reports,
    expected,
    permuted,
    push,
    random_arena,
    whole,
)
from tests.waiting import until


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode("mooncake", 1 << 20)
    yield made
    made.receiver.close()


@pytest.fixture
def source() -> Iterator[Arena]:
    """What the senders write from."""
    made = random_arena(1 << 20)
    yield made
    close_shared("mooncake", made)


@pytest.fixture
def senders(source: Arena) -> Iterator[list[Sender]]:
    made: list[Sender] = []
    yield made
    for sender in made:
        sender.close()


def _sender(
    senders: list[Sender],
    decode: Decode,
    arena: Arena,
    session: SessionId | None = None,
    base: int | None = None,
    options: TransportOptions | None = None,
) -> tuple[Sender, Reports]:
    reports = Reports()
    found = session or decode.session
    sender = open_sender(
        "mooncake",
        peer=Endpoint.parse(found),
        session=found,
        prefill_rank=Rank(0),
        prefill_life=PREFILL_LIFE,
        arena=arena,
        report=reports,
        options=options,
        target_base=decode.arena.base if base is None else base,
    )
    senders.append(sender)
    sender.start()
    return sender, reports


@needs_engine
def test_every_byte_lands_and_the_receiver_hears_nothing(decode: Decode, senders: list[Sender], source: Arena) -> None:
    copies = permuted(source.nbytes, 1 << 10)
    sender, reports = _sender(senders, decode, source)
    sender.submit(push(7, copies))
    (pushed,) = reports.wait(Pushed)
    assert pushed == Pushed(decode.session, Room(7), Generation(1), 0, source.nbytes)
    assert np.array_equal(decode.arena.bytes, expected(source, decode.arena.nbytes, copies))
    assert reports.of(Connected) == [Connected(decode.session, Life(""), "mooncake")]
    assert decode.reports.all == []
    assert decode.session == f"127.0.0.1:{decode.receiver.endpoint.port}"
    assert decode.receiver.endpoint.port > 0


@needs_engine
def test_two_sessions_share_one_engine_of_the_arena(decode: Decode, senders: list[Sender], source: Arena) -> None:
    other = Decode("mooncake", 1 << 16)
    try:
        for number, target in enumerate((decode, other)):
            sender, reports = _sender(senders, target, source)
            sender.submit(push(number, whole(1 << 16)))
            reports.wait(Pushed)
            assert np.array_equal(target.arena.bytes[: 1 << 16], source.bytes[: 1 << 16])
    finally:
        other.receiver.close()


@needs_engine
def test_nobody_at_the_address(decode: Decode, senders: list[Sender], source: Arena) -> None:
    sender, reports = _sender(senders, decode, source, session=SessionId("127.0.0.1:1"))
    sender.submit(push(1, whole(16)))
    (failed,) = reports.wait(ConnectFailed)
    assert "no mooncake engine" in failed.cause
    assert [type(end) for end in reports.ends(1)] == [PushFailed]


@contextlib.contextmanager
def _listener() -> Iterator[tuple[socket.socket, SessionId]]:
    """Accepts and says nothing, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        yield listener, SessionId(f"127.0.0.1:{listener.getsockname()[1]}")


@needs_engine
def test_a_silent_peer_holds_nobody_up(decode: Decode, senders: list[Sender], source: Arena) -> None:
    with _listener() as (_, silent):
        stuck, failures = _sender(senders, decode, source, session=silent)
        sender, reports = _sender(senders, decode, source)
        sender.submit(push(1, whole(1 << 16)))
        reports.wait(Pushed)
        assert failures.all == []
        stuck.close()
        assert stuck.ended


@needs_engine
def test_a_silent_peer_is_given_up(decode: Decode, senders: list[Sender], source: Arena) -> None:
    with _listener() as (_, silent):
        options = TransportOptions(send_timeout_s=0.1)
        _, reports = _sender(senders, decode, source, session=silent, options=options)
        assert "stays silent" in reports.wait(ConnectFailed)[0].cause


@needs_engine
def test_the_interpreter_goes_on_while_an_engine_waits_for_its_peer(
    decode: Decode, senders: list[Sender], source: Arena
) -> None:
    """The peer stops between our probe and the engine's own handshake, which no close can end."""
    with _listener() as (listener, session):
        options = TransportOptions(close_timeout_s=0.1)
        sender, reports = _sender(senders, decode, source, session=session, options=options)
        listener.accept()[0].close()
        handshake = listener.accept()[0]
        with handshake:
            assert handshake.recv(8)
            sender.close()
            assert not sender.ended  # so this thread has run while that one was stuck
        until(lambda: sender.ended, "the end of the sender's thread")
        assert reports.of(Connected) == []


@needs_engine
def test_a_write_outside_the_registered_arena_fails_and_the_next_connection_works(
    decode: Decode, senders: list[Sender], source: Arena
) -> None:
    sender, reports = _sender(senders, decode, source, base=decode.arena.base + decode.arena.nbytes)
    sender.submit(push(1, whole(1 << 16)))
    assert "failed" in reports.wait(PushFailed)[0].cause
    reports.wait(Disconnected)
    assert not decode.arena.bytes.any()
    again, reports = _sender(senders, decode, source)
    again.submit(push(1, whole(1 << 16)))
    reports.wait(Pushed)
    assert np.array_equal(decode.arena.bytes[: 1 << 16], source.bytes[: 1 << 16])


@needs_engine
def test_a_cancelled_push_ends_between_batches(decode: Decode, senders: list[Sender], source: Arena) -> None:
    sender, reports = _sender(senders, decode, source)
    for number in range(20):
        sender.submit(push(1, permuted(source.nbytes, 1 << 8), number))
    sender.cancel(Room(1), Generation(1))
    sender.submit(push(2, whole(16)))
    ends = reports.ends(21)
    assert any(isinstance(end, PushFailed) and end.cause == "cancelled" for end in ends)
    assert any(isinstance(end, Pushed) and end.room == 2 for end in ends)


@needs_engine
def test_a_closed_receiver_takes_no_more_bytes(senders: list[Sender], source: Arena) -> None:
    decode = Decode("mooncake", 1 << 16)
    sender, reports = _sender(senders, decode, source)
    sender.submit(push(1, whole(16)))
    reports.wait(Pushed)
    decode.receiver.close()
    sender.submit(push(2, whole(1 << 16)))
    reports.wait(PushFailed)
    assert not decode.arena.bytes[16:].any()


@needs_engine
def test_a_port_of_our_own_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match="its own port"):
        Decode("mooncake", 4096, port=4000)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)  # as if it could not be imported
    with pytest.raises(ConfigError, match="libibverbs1"):
        require_transport("mooncake")
    with pytest.raises(ConfigError, match="pip install"):
        Decode("mooncake", 4096)
    require_transport("tcp")


def test_ipv6_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="IPv6"):
        Decode("mooncake", 4096, host="::1")


def test_a_sender_needs_the_arenas_address(senders: list[Sender]) -> None:
    with pytest.raises(ConfigError, match="address of the arena"):
        open_sender(
            "mooncake",
            peer=Endpoint("127.0.0.1", 1),
            session=SessionId("127.0.0.1:1"),
            prefill_rank=Rank(0),
            prefill_life=PREFILL_LIFE,
            arena=Arena.zeros(16),
            report=Reports(),
        )


def test_batches_stay_small_whatever_the_options_say() -> None:
    options = mooncake_options(attrs.evolve(TransportOptions(), segment_bytes=64 << 20))
    parts = list(segments(permuted(1 << 20, 1 << 8), options.segment_bytes, options.segment_runs))
    assert max(len(part.length) for part in parts) == BATCH_RUNS
    assert is_one_sided("mooncake")
    assert not is_one_sided("tcp")


@pytest.mark.parametrize("wrong", [{"mooncake_protocol": "udp"}, {"segment_runs": 1 << 20}])
def test_wrong_settings(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"mooncake|segment_runs"):
        TransportOptions(**wrong)  # type: ignore[arg-type]
