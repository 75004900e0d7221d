"""The soak: it finds what it is for, and a short one finds nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from pdplane.bench.soak import _complaints
from pdplane.bench.soak_side import DecodeSide, coded
from pdplane.net import JsonLines

GOOD: dict[str, Any] = {
    "rooms": 100_000,
    "wrong_bytes": 0,
    "hung": 0,
    "stray": {},
    "left": {},
    "threads": {"decode 0": (9, 9)},
    "descriptors": {"decode 0": (30, 29)},
    "growth": {"decode 0": 0.009},
}


def test_a_byte_in_a_block_that_nobody_has_borrowed_is_found() -> None:
    side = DecodeSide(JsonLines(), "tcp", 0)
    (page, *_others) = (page for _field, _place, page in side.pages(dict.fromkeys(side.pool.used_blocks(), (1,))))
    page[7] = 1
    side.borrow(1)
    assert side.stray == 1


def test_the_bytes_of_a_page_are_its_own() -> None:
    pages = [coded(room, field, place, 3072) for room in (1, 2) for field in (0, 1) for place in (0, 1)]
    assert len({page.tobytes() for page in pages}) == len(pages)
    assert all(np.count_nonzero(page == np.roll(page, 1)) < page.size // 50 for page in pages)


@pytest.mark.parametrize(
    "wrong",
    [
        {"wrong_bytes": 1},
        {"hung": 1},
        {"stray": {"decode 1": 1}},
        {"left": {"prefill 0": {"blocks": 2}}},
        {"threads": {"decode 0": (9, 10)}},
        {"descriptors": {"decode 0": (30, 31)}},
        {"growth": {"decode 0": 0.011}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_each_fault_is_complained_of(wrong: dict[str, Any]) -> None:
    assert list(_complaints(GOOD)) == []
    assert len(list(_complaints(GOOD | wrong))) == 1


@pytest.mark.slow
def test_half_a_minute_leaves_nothing() -> None:
    words = [sys.executable, "-m", "pdplane.cli.main", "bench", "soak", "--minutes", "0.5", "--seed", "3", "--json"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=110, check=False)
    found = json.loads(told.stdout)
    assert (told.returncode, found["complaints"]) == (0, []), told.stderr
    assert found["faults"]["stops"] > 0
    assert found["faults"]["kills"] > 0
    assert found["ends"]["decode"]["done"] > 100
