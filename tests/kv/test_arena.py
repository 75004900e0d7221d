"""The registered buffer."""

from __future__ import annotations

import numpy as np
import pytest

from pdplane.errors import ConfigError
from pdplane.kv.arena import PAGE_BYTES, Arena


def test_wraps_without_a_copy() -> None:
    memory = np.arange(24, dtype=np.uint32).reshape(2, 3, 4)
    arena = Arena(memory)
    assert (arena.nbytes, arena.base, arena.bytes.shape) == (96, memory.ctypes.data, (96,))
    arena.bytes[0] = 7
    assert memory[0, 0, 0] == 7


def test_keeps_the_owner_alive() -> None:
    arena = Arena(bytearray(b"abc"))
    assert bytes(arena.bytes) == b"abc"


def test_zeros() -> None:
    arena = Arena.zeros(4096)
    assert arena.nbytes == 4096
    assert not arena.bytes.any()
    assert repr(arena).startswith("Arena(4096 bytes at 0x")


@pytest.mark.parametrize(
    ("buffer", "text"),
    [
        (b"read-only", "read-only"),
        (np.zeros((4, 4), dtype=np.uint8)[:, ::2], "not contiguous"),
        (np.zeros((4, 4), dtype=np.uint8).T[1:], "not contiguous"),
        (bytearray(), "empty"),
        (7, "needs a buffer"),
    ],
    ids=["read_only", "strided", "transposed", "empty", "number"],
)
def test_buffers_that_cannot_be_an_arena(buffer: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Arena(buffer)


@pytest.mark.parametrize("nbytes", [0, -1, 2**62])
def test_sizes_that_cannot_be_had(nbytes: int) -> None:
    with pytest.raises(ConfigError, match=str(nbytes)):
        Arena.zeros(nbytes)


def test_an_arena_begins_at_a_pages_border() -> None:
    for nbytes in (1, 4096, 5 << 20):
        arena = Arena.zeros(nbytes)
        assert (arena.base % PAGE_BYTES, arena.nbytes) == (0, nbytes)
        assert not arena.bytes.any()
    memory = np.arange(3 * PAGE_BYTES, dtype=np.uint32).view(np.uint8)
    for start in (0, 1, 8, 100):
        arena = Arena.within(memory[start : start + 2 * PAGE_BYTES], PAGE_BYTES)
        assert (arena.base % PAGE_BYTES, arena.nbytes) == (0, PAGE_BYTES)
        arena.bytes[:] = start
        assert (memory == start).sum() >= PAGE_BYTES
    with pytest.raises(ConfigError, match="does not fit"):
        Arena.within(memory[: PAGE_BYTES - 1], PAGE_BYTES)


def test_huge_pages_change_no_byte() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 5 << 20, dtype=np.uint8)
    before = memory.copy()
    assert Arena(memory).gather_pages() in (True, False)
    assert (memory == before).all()
    assert not Arena(memory[1:100]).gather_pages()
