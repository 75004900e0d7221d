"""The registered buffer."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt
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
        ([bytearray(8), bytearray(8)], r"not a list of 2: Arena.spanning\(...\) joins them"),
    ],
    ids=["read_only", "strided", "transposed", "empty", "number", "list"],
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


class Tensor:
    """Another library's tensor: it speaks DLPack and nothing else."""

    def __init__(self, memory: npt.NDArray[Any], device: int = 1) -> None:
        self._memory, self._device = memory, device

    def __dlpack__(self) -> object:
        return self._memory.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


def test_tensors_of_other_libraries_are_arenas_and_stay_alive() -> None:
    memory = np.arange(24, dtype=np.float16).reshape(2, 3, 1, 4)
    before = sys.getrefcount(memory)
    arena = Arena(Tensor(memory))
    assert (arena.nbytes, arena.base) == (48, memory.ctypes.data)
    arena.bytes[:] = 0
    assert not memory.any()
    assert sys.getrefcount(memory) == before + 1
    del arena
    assert sys.getrefcount(memory) == before


def test_what_dlpack_cannot_share_is_refused() -> None:
    memory = np.zeros((4, 4), np.float32)
    readonly = memory.copy()
    readonly.flags.writeable = False
    for wrong, text in (
        (Tensor(memory.T[1:]), "not contiguous"),
        (Tensor(memory[:, ::2]), "not contiguous"),
        (Tensor(readonly), "cannot be shared"),
        (Tensor(memory, device=2), "memory of a device .CUDA."),
        (Tensor(memory, device=99), "memory of a device .number 99."),
    ):
        with pytest.raises(ConfigError, match=text):
            Arena(wrong)


def test_torch_tensors_of_any_dtype_are_arenas() -> None:
    torch = pytest.importorskip("torch", reason="torch is not among the dependencies; where it is, it is tried")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8):
        tensor = torch.ones((4, 8), dtype=dtype)
        arena = Arena(tensor)
        assert (arena.nbytes, arena.base) == (tensor.nbytes, tensor.data_ptr())
        arena.bytes[:] = 0
        assert not tensor.any()
    with pytest.raises(ConfigError, match="not contiguous"):
        Arena(torch.ones((4, 8)).T)
    with pytest.raises(ConfigError, match="device"):
        Arena(torch.empty(4, device="meta"))


def test_several_allocations_span_one_arena() -> None:
    memory = np.zeros(100, np.uint8)
    one, two, three = memory[60:80], memory[10:30], memory[30:40]
    arena = Arena.spanning([one, two, three])
    assert (arena.nbytes, arena.base) == (70, memory.ctypes.data + 10)
    assert arena.parts == ((0, 30), (50, 20))  # two of them touch
    assert [arena.offset_of(part) for part in (one, two, three)] == [50, 0, 20]
    arena.bytes[50] = 7
    assert memory[60] == 7
    assert not arena.gather_pages()
    with pytest.raises(ConfigError, match="does not lie in one allocation"):
        arena.offset_of(memory[30:50])
    with pytest.raises(ConfigError, match="no allocation"):
        Arena.spanning([])


def test_allocations_far_from_each_other_span_an_arena_too() -> None:
    mapped, on_the_heap = mmap.mmap(-1, 1 << 20), bytearray(100)
    arena = Arena.spanning([mapped, on_the_heap])
    assert len(arena.parts) == 2
    arena.bytes[arena.offset_of(on_the_heap)] = 9
    assert on_the_heap[0] == 9
