"""Several connections for one sender: each byte once, each push ends once, and all of them end together."""

from __future__ import annotations

from contextlib import closing

import attrs
import pytest

from pdplane.errors import LocalProtocolError
from pdplane.ids import Generation, Life, Rank, Room
from pdplane.messages import Landed
from pdplane.transport.fence import Writer
from pdplane.transport.greeting import Bundle, SenderGreeting
from pdplane.transport.line import StreamLine
from pdplane.transport.receiver import Writers
from pdplane.transport.reports import (
    Connected,
    ConnectFailed,
    Disconnected,
    Pushed,
    PushFailed,
    Resumed,
    TransportOptions,
)
from pdplane.transport.striped import StripedSender
from tests.transport.ends import PREFILL_LIFE, Ends, Reports, counted, expected, permuted, push, random_arena, whole
from tests.transport.proxy import Proxy

NBYTES = 8 << 20
STREAMS = 3
OPTIONS = TransportOptions(streams=STREAMS, segment_bytes=1 << 19)


@pytest.mark.parametrize("block", [4096, 1 << 20, NBYTES])
def test_a_large_push_is_striped_and_lands_once(ends: Ends, block: int) -> None:
    source, decode = random_arena(NBYTES), ends.decode(NBYTES)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=OPTIONS)
    copies = permuted(NBYTES, block)
    sender.submit(push(7, copies))
    assert reports.ends(1) == [Pushed(decode.session, Room(7), Generation(1), 0, NBYTES)]
    assert (decode.arena.bytes == expected(source, NBYTES, copies)).all()
    assert len(reports.wait(Connected)) == 1
    assert decode.receiver.snapshot().ways == {ends.scheme: STREAMS}
    assert counted(decode.fence) == NBYTES
    assert decode.reports.of(Landed)[-1].nbytes == NBYTES
    sender.submit(push(7, copies))  # as after a cut: the same parts have the same numbers
    assert isinstance(reports.ends(2)[1], Pushed)
    assert counted(decode.fence) == NBYTES


def test_small_pushes_go_whole(ends: Ends) -> None:
    source, decode = random_arena(1 << 16), ends.decode(1 << 16)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=OPTIONS)
    for number in range(16):
        sender.submit(push(7, whole(1 << 12, number << 12, number << 12), number))
    assert all(isinstance(end, Pushed) for end in reports.ends(16))
    assert (decode.arena.bytes == source.bytes).all()


def test_a_part_that_is_refused_fails_the_push_once(ends: Ends) -> None:
    source, decode = random_arena(NBYTES), ends.decode(NBYTES)
    decode.fence.open(Room(7), Generation(1), *_most(), None)
    sender, reports = ends.sender(decode, source, options=OPTIONS)
    sender.submit(push(7, whole(NBYTES)))
    ended = reports.ends(1)
    assert [type(end) for end in ended] == [PushFailed]
    sender.submit(push(7, whole(64), 1))
    assert isinstance(reports.ends(2)[1], Pushed)
    with pytest.raises(LocalProtocolError):
        sender.submit(push(7, whole(NBYTES, 1)))


def _most() -> tuple[object, object]:
    copies = whole(NBYTES - 4096)
    return copies.destination, copies.length


def test_all_streams_end_with_the_receiver(ends: Ends) -> None:
    source, decode = random_arena(NBYTES), ends.decode(NBYTES)
    sender, reports = ends.sender(decode, source, options=OPTIONS)
    reports.wait(Connected)
    decode.receiver.close()
    reports.wait(Disconnected)
    sender.submit(push(7, whole(NBYTES)))
    assert isinstance(reports.ends(1)[0], PushFailed)
    sender.close()
    assert sender.ended
    assert len(reports.of(Disconnected)) == 1


def test_nobody_listens_to_any_stream(ends: Ends) -> None:
    decode = ends.decode()
    decode.receiver.close()
    sender, reports = ends.sender(decode, random_arena(NBYTES), options=OPTIONS)
    sender.submit(push(7, whole(NBYTES)))
    assert isinstance(reports.ends(1)[0], PushFailed)
    assert len(reports.wait(ConnectFailed)) == 1


def test_close_and_cancel_end_every_push_once(ends: Ends) -> None:
    source, decode = random_arena(NBYTES), ends.decode(NBYTES)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=OPTIONS)
    for number in range(20):
        sender.submit(push(7, whole(NBYTES), number))
    sender.cancel(Room(7), Generation(1))
    reports.ends(20)
    for number in range(20):
        sender.submit(push(8, whole(NBYTES), number))
    sender.close()
    assert len(reports.ends(40)) == 40


@pytest.mark.parametrize("cut_after", [600, 300_000, 2_000_000])
@pytest.mark.parametrize("cut_stream", range(STREAMS))
def test_a_push_survives_the_cut_of_one_of_its_streams(tcp: Ends, cut_stream: int, cut_after: int) -> None:
    """The others go on meanwhile; what the cut stream sent whole counts once."""
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    reports = Reports()
    options = attrs.evolve(OPTIONS, segment_bytes=1 << 17, resume_pause_s=0.01)
    with Proxy(decode.receiver.endpoint, cut_after=cut_after) as proxy:

        def make_line(bundle: Bundle) -> StreamLine:
            peer = proxy.endpoint if bundle.stream == cut_stream else decode.receiver.endpoint
            greeting = SenderGreeting(decode.session, Writer(Rank(0), PREFILL_LIFE), None, None, bundle)
            return StreamLine(peer, greeting, source, options)

        with closing(StripedSender(make_line, decode.session, source, reports, options)) as sender:
            sender.start()
            copies = permuted(NBYTES, 1 << 16)
            sender.submit(push(7, copies))
            assert reports.ends(1) == [Pushed(decode.session, Room(7), Generation(1), 0, NBYTES)]
            assert len(reports.of(Resumed)) == 1
            assert not reports.of(Disconnected)
    assert (decode.arena.bytes == expected(source, NBYTES, copies)).all()
    assert counted(decode.fence) == NBYTES
    assert decode.reports.of(Landed)[-1].nbytes == NBYTES


class _Line:
    def __init__(self) -> None:
        self.cause = ""

    def end(self, cause: str) -> None:
        self.cause = cause


def test_a_bundle_lives_together_and_a_new_one_ends_it() -> None:
    writers, writer = Writers(), Writer(Rank(0), Life("a"))
    first, second, again, other = (_Line() for _ in range(4))
    writers.enter(writer, Bundle("x", 0), first)
    writers.enter(writer, Bundle("x", 1), second)
    assert not first.cause
    writers.enter(writer, Bundle("x", 1), again)
    assert (bool(first.cause), bool(second.cause)) == (False, True)
    writers.enter(writer, Bundle("y", 0), other)
    assert first.cause
    assert again.cause
    assert not other.cause


def test_too_many_streams_are_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="streams"):
        TransportOptions(streams=65)
