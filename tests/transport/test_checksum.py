"""xxh3 over each segment: verified before the acknowledgement, demanded by a receiver that was told to."""

from __future__ import annotations

import pytest

from pdplane.errors import ConfigError
from pdplane.messages import Landed
from pdplane.transport.framing import checksum_of
from pdplane.transport.reports import Pushed, PushFailed, TransportOptions
from tests.transport.ends import Ends, counted, expected, permuted, push, random_arena, u64, whole
from tests.transport.proxy import Proxy

xxhash = pytest.importorskip("xxhash")
NBYTES = 1 << 16
CHECKED = TransportOptions(checksum="xxh3", segment_bytes=1 << 14)


@pytest.mark.parametrize("block", [64, 4096])
def test_good_bytes_land(ends: Ends, block: int) -> None:
    source, decode = random_arena(NBYTES), ends.decode(NBYTES, options=CHECKED)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source, options=CHECKED)
    copies = permuted(NBYTES, block)
    for count in (1, 2):  # the second time nothing lands: what is there already is not looked at again
        sender.submit(push(7, copies))
        assert isinstance(reports.ends(count)[-1], Pushed)
    assert (decode.arena.bytes == expected(source, NBYTES, copies)).all()


def test_a_receiver_that_demands_checksums_refuses_segments_without(ends: Ends) -> None:
    source, decode = random_arena(NBYTES), ends.decode(NBYTES, options=CHECKED)
    decode.open_all(7)
    sender, reports = ends.sender(decode, source)
    sender.submit(push(7, whole(NBYTES)))
    ended = reports.ends(1)[0]
    assert isinstance(ended, PushFailed)
    assert "checksum" in ended.cause
    assert decode.fence.snapshot().refused_checksum == 1
    assert not decode.arena.bytes.any()


def test_a_receiver_that_demands_none_verifies_what_it_gets(tcp: Ends) -> None:
    source, decode = random_arena(NBYTES), tcp.decode(NBYTES)
    decode.open_all(7)
    with Proxy(decode.receiver.endpoint, flip_at=NBYTES // 2) as proxy:
        sender, reports = tcp.sender(decode, source, peer=proxy.endpoint, options=CHECKED)
        sender.submit(push(7, whole(NBYTES)))
        ended = reports.ends(1)[0]
        assert isinstance(ended, PushFailed)
        assert "damaged" in ended.cause
        assert decode.fence.snapshot().refused_checksum == 1
        assert not decode.reports.of(Landed)
        assert counted(decode.fence) == NBYTES - (1 << 14)
        sender.submit(push(7, whole(NBYTES)))
        assert isinstance(reports.ends(2)[1], Pushed), "the damaged segment alone lands again"
    assert (decode.arena.bytes == source.bytes).all()


def test_the_checksum_is_of_the_runs_in_their_order() -> None:
    arena = random_arena(64)
    data = arena.bytes.tobytes()
    assert checksum_of(arena, u64(32, 0, 16), u64(8, 16, 4)) == xxhash.xxh3_64_intdigest(data[32:40] + data[:20])
    assert checksum_of(arena, u64(), u64()) == xxhash.xxh3_64_intdigest(b"")


def test_an_unknown_checksum_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="md5"):
        TransportOptions(checksum="md5")
