"""Windows that close in mid-push, with their blocks in other hands at once: no stale byte, ever."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from pdplane.ids import Generation, Room
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.transport.reports import Pushed, PushFailed, TransportOptions
from tests.transport.ends import Decode, Ends, permuted, push

NBYTES = 8 << 20
BLOCKS = (4096, 1 << 16)
MOST_ROUNDS = 1000  # a busy machine may let many pushes finish before they are stopped
OPTIONS = TransportOptions(segment_bytes=1 << 20, call_bytes=1 << 18)


@pytest.fixture(autouse=True)
def _eager_threads() -> Iterator[None]:
    """Let threads take turns often: loopback copies under the GIL, and would finish within one turn."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("block", BLOCKS)
def test_aborts_with_immediate_reuse(ends: Ends, block: int) -> None:
    _abort(ends, 20, block)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_hundreds_of_aborts_with_immediate_reuse(ends: Ends, block: int) -> None:
    _abort(ends, 400, block)


def _abort(ends: Ends, rounds: int, block: int) -> None:
    decode = ends.decode(NBYTES)
    arenas = [Arena.zeros(NBYTES), Arena.zeros(NBYTES)]
    arenas[0].bytes[:] = 0xAA
    arenas[1].bytes[:] = 0x55
    senders = [ends.sender(decode, arena, rank=rank, options=OPTIONS) for rank, arena in enumerate(arenas)]
    stopped = 0
    for turn in range(MOST_ROUNDS):
        if turn >= rounds and stopped:
            break
        copies = permuted(NBYTES, block, turn)
        decode.arena.bytes[:] = 0
        decode.open_all(2 * turn)
        (doomed, doomed_reports), (heir, heir_reports) = senders
        doomed.submit(push(2 * turn, copies))
        _until_begun(decode, copies, turn)
        assert decode.fence.close(Room(2 * turn), Generation(1))
        decode.arena.bytes[:] = 0
        decode.open_all(2 * turn + 1)
        heir.submit(push(2 * turn + 1, copies))
        assert isinstance(heir_reports.ends(turn + 1)[-1], Pushed)
        stopped += isinstance(doomed_reports.ends(turn + 1)[-1], PushFailed)
        assert (decode.arena.bytes == 0x55).all()
        decode.fence.close(Room(2 * turn + 1), Generation(1))
    assert stopped, "no push was ever stopped in its middle"
    assert decode.fence.snapshot().open_rooms == 0


def _until_begun(decode: Decode, copies: Copies, turn: int) -> None:
    """Until some block of the push's first quarter has landed: another one each turn, so that the cut moves about."""
    at = int(copies.destination[turn * 7919 % (len(copies.destination) // 4)])
    while not decode.arena.bytes[at]:
        pass
