"""What every transport keeps to: exact bytes, one end for each push, and refusals that cost nobody else."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from pdplane.errors import ConfigError, LocalProtocolError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.messages import Landed, WriterCut
from pdplane.security import Secret
from pdplane.transport.registry import open_receiver, open_sender
from pdplane.transport.reports import Connected, ConnectFailed, Disconnected, Pushed, PushFailed, TransportOptions
from tests.transport.ends import (
    DECODE_LIFE,
    PREFILL_LIFE,
    Decode,
    Ends,
    Reports,
    expected,
    permuted,
    push,
    random_arena,
    u64,
    whole,
)

SMALL_SEGMENTS = TransportOptions(segment_bytes=1 << 12, call_bytes=1 << 11)


def test_a_push_lands_its_exact_bytes(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source)
    copies = permuted(1 << 16, 512)
    sender.submit(push(7, copies))
    assert reports.ends(1) == [Pushed(decode.session, Room(7), Generation(1), 0, 1 << 16)]
    assert reports.all[0] == Connected(decode.session, DECODE_LIFE, ends.scheme)
    assert decode.reports.all == [Landed(Room(7), Generation(1), Rank(0), 1 << 16)]
    assert (decode.arena.bytes == expected(source, 1 << 16, copies)).all()


@pytest.mark.parametrize("block", [1, 7, 64, 4096, 1 << 16])
def test_many_segments_and_odd_sizes(ends: Ends, block: int) -> None:
    nbytes = 1 << 16 if block > 7 else 7 * 500
    source, decode = random_arena(nbytes), ends.decode(nbytes)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=SMALL_SEGMENTS)
    copies = permuted(nbytes, block)
    sender.submit(push(7, copies))
    assert isinstance(reports.ends(1)[0], Pushed)
    assert (decode.arena.bytes == expected(source, nbytes, copies)).all()
    assert [report.nbytes for report in decode.reports.of(Landed)] == [nbytes]


def test_more_runs_than_one_system_call_takes(ends: Ends) -> None:
    nbytes = 5000 * 4 * 4
    source, decode = random_arena(nbytes), ends.decode(nbytes)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source)
    copies = permuted(nbytes, 4)  # 20,000 runs: two segments, many calls
    sender.submit(push(7, copies))
    assert isinstance(reports.ends(1)[0], Pushed)
    assert (decode.arena.bytes == expected(source, nbytes, copies)).all()


def test_several_rooms_and_steps_end_in_order(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    for room in range(4):
        decode.fence.open(Room(room), Generation(1), u64(room << 14), u64(1 << 14), None)
    sender, reports = ends.sender(decode, source)
    for step in range(4):
        for room in range(4):
            sender.submit(push(room, whole(1 << 12, room << 14 | step << 12, room << 14 | step << 12), step))
    ended = reports.ends(16)
    assert [(end.push, end.room) for end in ended] == [(step, room) for step in range(4) for room in range(4)]
    assert all(isinstance(end, Pushed) for end in ended)
    assert (decode.arena.bytes == source.bytes).all()
    landed = [report.nbytes for report in decode.reports.of(Landed) if report.room == 2]
    assert landed == [1 << 12, 2 << 12, 3 << 12, 4 << 12]


def test_an_empty_push_is_acknowledged(ends: Ends) -> None:
    decode = ends.decode()
    decode.open_all(7)
    sender, reports = ends.sender(decode, random_arena(16))
    sender.submit(push(7, Copies(u64(), u64(), u64())))
    assert reports.ends(1) == [Pushed(decode.session, Room(7), Generation(1), 0, 0)]
    assert decode.reports.wait(Landed) == [Landed(Room(7), Generation(1), Rank(0), 0)]


def test_refused_pushes_are_counted_and_cost_no_other(ends: Ends) -> None:
    source, decode = random_arena(4096), ends.decode(4096)
    decode.fence.open(Room(1), Generation(5), u64(0), u64(1024), None)
    decode.fence.open(Room(2), Generation(1), u64(1024), u64(1024), {Rank(0): Life("b" * 32)})
    decode.fence.open(Room(3), Generation(1), u64(2048), u64(1024), {Rank(0): PREFILL_LIFE})
    sender, reports = ends.sender(decode, source)
    sender.submit(push(1, whole(64), generation=4))
    sender.submit(push(2, whole(64, 0, 1024)))
    sender.submit(push(9, whole(64)))
    sender.submit(push(3, whole(64, 0, 2048 - 1)))
    sender.submit(push(3, whole(64, 0, 3072 - 63), number=1))
    sender.submit(push(3, whole(64, 0, 2**64 - 32), number=2))
    sender.submit(push(3, whole(64, 0, 2048), number=3))
    *refused, last = reports.ends(7)
    assert [end.cause for end in refused if isinstance(end, PushFailed)] == [
        "refused: the room's window has another generation",
        "refused: this prefill rank and life may not write into the room",
        "refused: the room's window is closed",
        *["refused: the bytes lie outside the room's window"] * 3,
    ]
    assert isinstance(last, Pushed)
    assert (decode.arena.bytes[2048:2112] == source.bytes[:64]).all()
    assert not decode.arena.bytes[:2048].any()
    assert not decode.arena.bytes[2112:].any()
    snapshot = decode.fence.snapshot()
    assert attrs.astuple(snapshot) == (3, 1, 1, 1, 3, 0)


def test_a_refused_segment_fails_its_push_but_not_its_other_segments(ends: Ends) -> None:
    source, decode = random_arena(1 << 14), ends.decode(1 << 14)
    decode.fence.open(Room(1), Generation(1), u64(4096), u64(8192), None)
    sender, reports = ends.sender(decode, source, options=SMALL_SEGMENTS)
    sender.submit(push(1, whole(1 << 14)))
    assert isinstance(reports.ends(1)[0], PushFailed)
    assert (decode.arena.bytes[4096:12288] == source.bytes[4096:12288]).all()
    assert not decode.arena.bytes[:4096].any()
    assert not decode.arena.bytes[12288:].any()
    assert not decode.reports.of(Landed)


def test_a_repeated_push_counts_once_and_cannot_change_what_landed(ends: Ends) -> None:
    source, decode = random_arena(1 << 14), ends.decode(1 << 14)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=SMALL_SEGMENTS)
    sender.submit(push(7, whole(1 << 14)))
    reports.ends(1)
    before = source.bytes.copy()
    source.bytes[:] = 0
    sender.submit(push(7, whole(1 << 14)))
    assert [type(end) for end in reports.ends(2)] == [Pushed, Pushed]
    assert [report.nbytes for report in decode.reports.of(Landed)] == [1 << 14, 1 << 14]
    assert (decode.arena.bytes == before).all()


def test_a_window_counts_no_more_than_it_holds(ends: Ends) -> None:
    source, decode = random_arena(4096), ends.decode(4096)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source)
    for number in range(2):
        sender.submit(push(7, whole(4096), number))
    assert [type(end) for end in reports.ends(2)] == [Pushed, PushFailed]
    assert [report.nbytes for report in decode.reports.of(Landed)] == [4096]


def test_two_ranks_fill_one_room(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    decode.open_all(7)
    both = [ends.sender(decode, source, rank=rank) for rank in range(2)]
    for rank, (sender, _) in enumerate(both):
        sender.submit(push(7, whole(1 << 15, rank << 15, rank << 15)))
    for _, reports in both:
        assert isinstance(reports.ends(1)[0], Pushed)
    assert {report.prefill_rank: report.nbytes for report in decode.reports.of(Landed)} == {0: 1 << 15, 1: 1 << 15}
    assert (decode.arena.bytes == source.bytes).all()


def test_a_new_connection_of_the_same_writer_ends_the_old_one(ends: Ends) -> None:
    source, decode = random_arena(4096), ends.decode(4096)
    decode.open_all(7)
    _, first = ends.sender(decode, source)
    first.wait(Connected)
    sender, second = ends.sender(decode, source)
    second.wait(Connected)
    first.wait(Disconnected)
    assert "replaced" in decode.reports.wait(WriterCut)[0].text
    sender.submit(push(7, whole(4096)))
    assert isinstance(second.ends(1)[0], Pushed)


def test_another_life_or_rank_does_not_end_the_old_connection(ends: Ends) -> None:
    source, decode = random_arena(64), ends.decode(64)
    decode.open_all(7)
    first, reports = ends.sender(decode, source)
    reports.wait(Connected)
    for rank, life in ((1, PREFILL_LIFE), (0, Life("b" * 32))):
        ends.sender(decode, source, rank=rank, life=life)[1].wait(Connected)
    first.submit(push(7, whole(64)))
    assert isinstance(reports.ends(1)[0], Pushed)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(b"a" * 32, b"b" * 32), (b"a" * 32, None), (None, b"b" * 32)], ids=["other", "only", "none"]
)
def test_secrets_that_differ_connect_nobody(ends: Ends, ours: bytes | None, theirs: bytes | None) -> None:
    decode = ends.decode(secret=Secret(theirs) if theirs else None)
    decode.open_all(7)
    sender, reports = ends.sender(decode, random_arena(64), secret=Secret(ours) if ours else None)
    sender.submit(push(7, whole(64)))
    assert "secret" in reports.wait(ConnectFailed)[0].cause
    assert isinstance(reports.ends(1)[0], PushFailed)
    assert not decode.arena.bytes.any()


def test_a_shared_secret_connects(ends: Ends) -> None:
    decode = ends.decode(secret=Secret(b"s" * 32))
    _, reports = ends.sender(decode, random_arena(64), secret=Secret(b"s" * 32))
    assert reports.wait(Connected) == [Connected(decode.session, DECODE_LIFE, ends.scheme)]


def test_a_greeting_for_another_session_or_life_is_refused(ends: Ends) -> None:
    decode = ends.decode()
    _, reports = ends.sender(decode, random_arena(64), session="10.0.0.1:9")
    assert "10.0.0.1:9" in reports.wait(ConnectFailed)[0].cause
    _, reports = ends.sender(decode, random_arena(64), decode_life=Life("e" * 32))
    assert "life" in reports.wait(ConnectFailed)[0].cause
    assert decode.receiver.snapshot().refused_greetings == 2


def test_nobody_listens(ends: Ends) -> None:
    decode = ends.decode()
    decode.receiver.close()
    sender, reports = ends.sender(decode, random_arena(64))
    sender.submit(push(7, whole(64)))
    reports.wait(ConnectFailed)
    sender.submit(push(7, whole(64), 1))
    assert all(isinstance(end, PushFailed) for end in reports.ends(2))
    assert not reports.of(Connected)


def test_a_closed_receiver_fails_the_pushes_first_and_then_disconnects(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source)
    reports.wait(Connected)
    decode.receiver.close()
    reports.wait(Disconnected)
    sender.submit(push(7, whole(64)))
    assert isinstance(reports.ends(1)[0], PushFailed)
    assert not decode.reports.of(WriterCut)


def test_close_ends_every_push_once_and_says_nothing_else(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=SMALL_SEGMENTS)
    for number in range(200):
        sender.submit(push(7, whole(1 << 16), number))
    reports.wait(Connected)
    sender.close()
    sender.submit(push(7, whole(64), 200))
    ended = reports.ends(201)
    assert sorted(end.push for end in ended) == list(range(201))
    assert not reports.of(Disconnected)
    decode.reports.wait(WriterCut)
    sender.close()


def test_close_before_start_and_start_twice(ends: Ends) -> None:
    decode, reports = ends.decode(), Reports()
    sender = open_sender(
        ends.transport,
        peer=decode.receiver.endpoint,
        session=decode.session,
        prefill_rank=Rank(0),
        prefill_life=PREFILL_LIFE,
        arena=random_arena(64),
        report=reports,
    )
    sender.submit(push(7, whole(64)))
    sender.close()
    assert isinstance(reports.ends(1)[0], PushFailed)
    with pytest.raises(LocalProtocolError):
        sender.start()
    with pytest.raises(LocalProtocolError):
        decode.receiver.start()


def test_our_own_bad_pushes_are_bugs(ends: Ends) -> None:
    decode = ends.decode()
    sender, _ = ends.sender(decode, random_arena(64))
    for copies in (whole(65), whole(64, 1), whole(0), whole(2**63, 2**63), Copies(u64(1), u64(1, 2), u64(1))):
        with pytest.raises(LocalProtocolError):
            sender.submit(push(7, copies))
    with pytest.raises(LocalProtocolError):
        sender.submit(push(7, whole(64), number=2**32))


def test_an_unknown_scheme_names_the_known_ones(ends: Ends) -> None:
    with pytest.raises(ConfigError, match="there are auto, loopback, mooncake, pull, tcp, unix"):
        open_sender(
            "carrier-pigeon",
            peer=Endpoint("127.0.0.1", 1),
            session=ends.decode().session,
            prefill_rank=Rank(0),
            prefill_life=PREFILL_LIFE,
            arena=Arena(np.zeros(1, np.uint8)),
            report=Reports(),
        )


def test_the_port_is_free_at_once(ends: Ends) -> None:
    decode = ends.decode()
    ends.sender(decode, random_arena(64))[1].wait(Connected)
    with pytest.raises(ConfigError, match=str(decode.receiver.endpoint.port)):
        _listen_again(ends, decode)
    decode.receiver.close()
    _listen_again(ends, decode)


def _listen_again(ends: Ends, decode: Decode) -> None:
    listen = decode.receiver.endpoint
    receiver = open_receiver(
        ends.transport, listen=listen, decode_life=DECODE_LIFE, fence=decode.fence, report=Reports()
    )
    try:
        assert receiver.start("example.test") == f"example.test:{listen.port}"
    finally:
        receiver.close()
