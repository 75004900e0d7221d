"""Where a use of a room's number stands: the table of `standing`, row by row."""

from __future__ import annotations

import pytest

from pdplane.errors import Cause, Why
from pdplane.ids import Generation, Life, SessionId
from pdplane.machine.uses import DecodeLife, Known, RankUse, Standing, Tombstone, standing

ME, OTHER, RAW = ((SessionId(name), Life(life)) for name, life in (("me:1", "a"), ("other:1", "b"), ("raw:1", "")))
FAILED = Why(Cause.PEER_LOST, "gone")


def live(generation: int | None, *, requested: bool = True, stone: Tombstone | None = None) -> Known:
    """A live room, with this rank's generation in it or without it."""
    ranks = {OTHER: Generation(9)} | ({ME: Generation(generation)} if generation is not None else {})
    return Known(ranks, requested, {ME: Generation(2)}, stone)


def ended(why: Why | None, *ranks: tuple[DecodeLife, int], requested: bool = True) -> Known:
    """No live room, and a use that these decode ranks had a part in."""
    uses = {rank: Generation(generation) for rank, generation in ranks}
    return Known(stone=Tombstone(why, 10.0, requested=requested, ended=uses, members=frozenset(uses)))


MISSED = ended(FAILED, (OTHER, 9))
TABLE = [
    (live(5), 5, True, Standing.LIVE),
    (live(0), 0, True, Standing.LIVE),
    (live(5), 4, True, Standing.OVER),
    (live(None), 2, True, Standing.OVER),
    (live(None, stone=MISSED.stone), 3, False, Standing.LATE),
    (live(None, stone=MISSED.stone), 3, True, Standing.NEW),
    (live(None), 3, False, Standing.NEW),
    (live(5, stone=MISSED.stone), 6, False, Standing.NEW),
    (live(5), 6, True, Standing.NEW),
    (ended(None, (ME, 4)), 0, True, Standing.UNCLEAR),
    (ended(FAILED, (ME, 4)), 4, True, Standing.OVER),
    (ended(None, (ME, 4)), 3, True, Standing.OVER),
    (MISSED, 3, True, Standing.LATE),
    (ended(None, (OTHER, 9)), 3, True, Standing.NEW),
    (ended(FAILED, (OTHER, 9), requested=False), 3, True, Standing.NEW),
    (ended(FAILED, (ME, 4)), 5, True, Standing.NEW),
    (Known(), 0, True, Standing.NEW),
    (live(5), None, True, Standing.LIVE),
    (live(5, requested=False), None, True, Standing.NEW),
    (ended(None, (RAW, 0)), None, True, Standing.UNCLEAR),
    (ended(FAILED, (RAW, 0), requested=False), None, True, Standing.NEW),
    (ended(FAILED, (ME, 4)), None, True, Standing.NEW),
    (Known(), None, True, Standing.NEW),
]


@pytest.mark.parametrize(("known", "generation", "fits", "found"), TABLE)
def test_where_a_use_stands(known: Known, generation: int | None, fits: bool, found: Standing) -> None:
    use = None if generation is None else RankUse(ME, Generation(generation))
    assert standing(known, use, fits=fits) is found
