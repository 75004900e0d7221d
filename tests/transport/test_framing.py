"""Frames, greetings and segments: whatever is written reads back, and any other bytes are a WireError."""

from __future__ import annotations

import contextlib
import itertools

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import WireError
from pdplane.ids import Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.security import Secret
from pdplane.transport import greeting
from pdplane.transport.fence import Writer
from pdplane.transport.framing import (
    HEADER_BYTES,
    MAX_RUNS,
    MAX_SEGMENT_BYTES,
    FrameKind,
    Header,
    decode_header,
    decode_sources,
    decode_tables,
    encode_header,
    encode_segment,
    segment_number,
    segments,
)
from pdplane.transport.greeting import GreetingKind, ReceiverGreeting, SenderGreeting
from pdplane.transport.vector import merge
from tests.transport.ends import u64

U64_NUMBER = st.integers(0, 2**64 - 1)
SEGMENT = Header(FrameKind.SEGMENT, 5, Room(1), Generation(2), segment_number(3, 4), count=2, nbytes=30, last=True)


def headers() -> st.SearchStrategy[Header]:
    common = {
        "session_number": st.just(5),
        "room": st.integers(0, 2**63 - 1).map(Room),
        "generation": U64_NUMBER.map(Generation),
        "segment": U64_NUMBER,
    }
    counts = st.integers(1, MAX_RUNS).flatmap(
        lambda count: st.tuples(st.just(count), st.integers(count, MAX_SEGMENT_BYTES))
    )
    segment = st.tuples(counts, st.booleans()).flatmap(
        lambda drawn: st.builds(
            Header,
            kind=st.sampled_from([FrameKind.SEGMENT, FrameKind.PULL]),
            count=st.just(drawn[0][0]),
            nbytes=st.just(drawn[0][1]),
            last=st.just(drawn[1]),
            checksum=st.none() | U64_NUMBER,
            **common,
        )
    )
    ack = st.builds(
        Header, kind=st.just(FrameKind.ACK), count=st.integers(0, 5), nbytes=U64_NUMBER, last=st.just(True), **common
    )
    abandon = st.builds(Header, kind=st.just(FrameKind.ABANDON), last=st.booleans(), **common)
    return st.one_of(segment, ack, abandon, st.builds(Header, kind=st.just(FrameKind.TAKEN), **common))


@given(headers())
def test_headers_read_back(header: Header) -> None:
    data = encode_header(header)
    assert len(data) == HEADER_BYTES
    assert decode_header(data, 5) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_other_64_bytes_are_a_wire_error(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_header(data, 5)


@given(headers(), st.integers(0, HEADER_BYTES - 1), st.integers(1, 255))
def test_a_changed_byte_is_another_header_or_a_wire_error(header: Header, at: int, change: int) -> None:
    data = bytearray(encode_header(header))
    data[at] ^= change
    with contextlib.suppress(WireError):
        assert encode_header(decode_header(data, 5)) == data


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"session_number": 6}, "session number"),
        ({"room": 2**63}, "room"),
        ({"count": MAX_RUNS + 1, "nbytes": MAX_SEGMENT_BYTES}, "count"),
        ({"nbytes": MAX_SEGMENT_BYTES + 1}, "nbytes"),
        ({"nbytes": 1}, "nbytes"),
        ({"count": 0}, "count"),
        ({"count": 0, "nbytes": 0, "last": False}, "count"),
        ({"kind": FrameKind.ACK, "count": 6}, "status"),
        ({"kind": FrameKind.ACK, "count": 0, "last": False}, "flags"),
        ({"kind": FrameKind.ABANDON}, "nbytes"),
        ({"kind": FrameKind.TAKEN, "count": 0, "nbytes": 0}, "flags"),
        ({"kind": FrameKind.ACK, "count": 0, "checksum": 1}, "checksum"),
    ],
)
def test_absurd_headers_name_their_field(changes: dict[str, object], field: str) -> None:
    with pytest.raises(WireError) as caught:
        decode_header(encode_header(attrs.evolve(SEGMENT, **changes)), 5)
    assert caught.value.field == field


def test_a_kind_in_the_wrong_direction_is_refused() -> None:
    with pytest.raises(WireError):
        decode_header(encode_header(SEGMENT), 5, (FrameKind.ACK,))
    with pytest.raises(WireError):
        decode_header(encode_header(SEGMENT)[:-1], 5)


def test_tables_read_back() -> None:
    frame = encode_segment(SEGMENT, u64(1, 2**64 - 1), u64(10, 20))
    offsets, lengths = decode_tables(SEGMENT, np.frombuffer(frame, "<u8", offset=HEADER_BYTES))
    assert (offsets.tolist(), lengths.tolist()) == ([1, 2**64 - 1], [10, 20])
    assert len(frame) == HEADER_BYTES + SEGMENT.table_bytes


@pytest.mark.parametrize("lengths", [(10, 21), (30, 0), (2**64 - 10, 40), (2**63 + 15, 2**63 + 15)])
def test_lengths_that_contradict_the_header_are_refused(lengths: tuple[int, int]) -> None:
    with pytest.raises(WireError):
        decode_tables(SEGMENT, u64(0, 0, *lengths))


PULL = attrs.evolve(SEGMENT, kind=FrameKind.PULL)


def test_a_pull_names_its_sources_inside_the_senders_arena() -> None:
    frame = encode_segment(PULL, u64(1, 2), u64(10, 20), u64(90, 0))
    tables = np.frombuffer(frame, "<u8", offset=HEADER_BYTES)
    assert decode_tables(PULL, tables)[1].tolist() == [10, 20]
    assert decode_sources(PULL, tables, 100).tolist() == [90, 0]
    for nbytes in (0, 19, 99):
        with pytest.raises(WireError, match="source"):
            decode_sources(PULL, tables, nbytes)


@given(st.lists(U64_NUMBER, min_size=2, max_size=2), st.integers(0, 2**64 - 1))
def test_no_source_leaves_the_senders_arena(sources: list[int], nbytes: int) -> None:
    inside = all(start + length <= nbytes for start, length in zip(sources, (10, 20), strict=True))
    with contextlib.nullcontext() if inside else pytest.raises(WireError):
        decode_sources(PULL, u64(0, 0, 10, 20, *sources), nbytes)


def test_tables_of_another_size_are_refused() -> None:
    with pytest.raises(WireError):
        decode_tables(PULL, u64(0, 0, 10, 20))
    with pytest.raises(WireError):
        decode_tables(SEGMENT, u64(0, 10))


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 300)), max_size=30),
    st.integers(1, 200),
    st.integers(1, 8),
)
def test_segments_cover_every_byte_once_in_order(
    rows: list[tuple[int, int, int]], max_bytes: int, max_runs: int
) -> None:
    copies = Copies(*(u64(*column) for column in zip(*rows, strict=True))) if rows else Copies(u64(), u64(), u64())
    parts = list(segments(copies, max_bytes, max_runs))
    assert parts
    assert all(part.nbytes <= max_bytes and len(part.length) <= max_runs for part in parts)
    assert all(len(part.length) for part in parts) or not rows
    assert _bytes_of(parts) == _bytes_of([copies])


def _bytes_of(parts: list[Copies]) -> list[tuple[int, int]]:
    return [
        (source + step, to + step)
        for part in parts
        for source, to, length in zip(
            part.source.tolist(), part.destination.tolist(), part.length.tolist(), strict=True
        )
        for step in range(length)
    ]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), max_size=20))
def test_merging_keeps_the_bytes_and_leaves_no_neighbours(runs: list[tuple[int, int]]) -> None:
    addresses, lengths = merge(u64(*[run[0] for run in runs]), u64(*[run[1] for run in runs]))
    merged = list(zip(addresses.tolist(), lengths.tolist(), strict=True))
    assert [a + i for a, n in merged for i in range(n)] == [a + i for a, n in runs for i in range(n)]
    assert all(a + n != b for (a, n), (b, _) in itertools.pairwise(merged))


def greet(sender: SenderGreeting, receiver: ReceiverGreeting) -> greeting.Accepted:
    welcome = receiver.hello(*read(sender.hello()))
    receiver.proof(*read(sender.welcome(*read(welcome))))
    return sender.accepted(*read(receiver.accepted(2**64 - 1, "/a/b")))


def read(data: bytes) -> tuple[GreetingKind, tuple[str, ...]]:
    kind, length = greeting.decode_prefix(data[:8])
    assert length == len(data) - 8
    return kind, greeting.decode_body(kind, data[8:])


@pytest.mark.parametrize("secret", [None, Secret(b"0123456789abcdef")])
def test_a_greeting_tells_both_sides_what_they_need(secret: Secret | None) -> None:
    writer = Writer(Rank(3), Life("a" * 32))
    receiver = ReceiverGreeting(SessionId("[::1]:9"), Life("d" * 32), secret)
    accepted = greet(SenderGreeting(SessionId("[::1]:9"), writer, secret, Life("d" * 32)), receiver)
    assert receiver.writer == writer
    assert (accepted.session_number, accepted.decode_life, accepted.unix_path) == (2**64 - 1, "d" * 32, "/a/b")
    assert accepted.boot_id == greeting.boot_id()


RANK, STREAM = 2, 7  # places in a HELLO


@pytest.mark.parametrize(
    ("texts", "field"),
    [
        ({RANK: str(2**31 - 1), STREAM: "63"}, None),
        ({RANK: "0", STREAM: "0"}, None),
        ({RANK: str(2**31)}, "rank"),
        ({RANK: "-1"}, "rank"),
        ({RANK: "01"}, "rank"),
        ({RANK: "9" * 21}, "rank"),
        ({STREAM: "64"}, "stream"),
        ({STREAM: "1 "}, "stream"),
    ],
    ids=str,
)
def test_numbers_of_a_hello_have_bounds(texts: dict[int, str], field: str | None) -> None:
    kind, said = read(SenderGreeting(SessionId("s"), Writer(Rank(3), Life("a")), None).hello())
    changed = tuple(texts.get(place, text) for place, text in enumerate(said))
    receiver = ReceiverGreeting(SessionId("s"), Life("d"), None)
    if field is None:
        receiver.hello(kind, changed)
        assert (receiver.writer.prefill_rank, receiver.bundle.stream) == (int(changed[RANK]), int(changed[STREAM]))
    else:
        with pytest.raises(WireError, match=f"greeting's {field} is"):
            receiver.hello(kind, changed)


def test_a_session_number_beyond_64_bits_is_refused() -> None:
    sender = SenderGreeting(SessionId("s"), Writer(Rank(3), Life("a")), None)
    with pytest.raises(WireError, match="session number is above"):
        sender.accepted(GreetingKind.ACCEPTED, (str(2**64), "", "", ""))


def test_a_recorded_greeting_proves_nothing_later() -> None:
    secret, writer = Secret(b"0123456789abcdef"), Writer(Rank(3), Life("a"))
    sender = SenderGreeting(SessionId("s"), writer, secret)
    first = ReceiverGreeting(SessionId("s"), Life("d"), secret)
    proof = sender.welcome(*read(first.hello(*read(sender.hello()))))
    again = ReceiverGreeting(SessionId("s"), Life("d"), secret)
    welcome = again.hello(*read(sender.hello()))
    with pytest.raises(WireError, match="secret"):
        again.proof(*read(proof))
    with pytest.raises(WireError, match="secret"):  # nor may a receiver's own proof be sent back to it
        again.proof(*read(greeting.encode(GreetingKind.PROOF, read(welcome)[1][2])))


@pytest.mark.parametrize("theirs", [None, Secret(b"fedcba9876543210")])
def test_a_sender_trusts_no_receiver_without_its_secret(theirs: Secret | None) -> None:
    ours = Secret(b"0123456789abcdef")
    sender = SenderGreeting(SessionId("s"), Writer(Rank(3), Life("a")), ours)
    proof = theirs.answer("receiver", sender.hello(), b"d", b"0" * 64).hex() if theirs else ""
    with pytest.raises(WireError, match="does not know our secret"):
        sender.welcome(GreetingKind.WELCOME, ("d", "0" * 64, proof))
    right = ours.answer("receiver", sender.hello(), b"d", b"0" * 64).hex()
    assert sender.welcome(GreetingKind.WELCOME, ("d", "0" * 64, right))


@given(st.binary(min_size=8, max_size=8), st.binary(max_size=100), st.sampled_from(GreetingKind))
def test_any_bytes_are_a_greeting_message_or_a_wire_error(prefix: bytes, body: bytes, kind: GreetingKind) -> None:
    for decode in (lambda: greeting.decode_prefix(prefix), lambda: greeting.decode_body(kind, body)):
        with contextlib.suppress(WireError):
            decode()


@given(st.lists(st.text(max_size=20), min_size=8, max_size=8))
def test_any_texts_of_a_hello_are_taken_or_refused(texts: list[str]) -> None:
    receiver = ReceiverGreeting(SessionId("s"), Life("d"), None)
    with pytest.raises(WireError):
        receiver.hello(GreetingKind.HELLO, tuple(texts))
    for at, value in enumerate(texts):
        good = ["s", "", "0", "life", "0" * 64, "0", "bundle", "0"]
        good[at] = value
        with contextlib.suppress(WireError):
            receiver.hello(GreetingKind.HELLO, tuple(good))
