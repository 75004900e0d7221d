"""The one registered buffer of a rank, and which of its blocks are free."""

from __future__ import annotations

import ctypes
import heapq
import math
import mmap
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pdplane.errors import ConfigError, LocalProtocolError, PoolExhausted
from pdplane.ids import GroupId
from pdplane.kv.layout import Layout

PAGE_BYTES = mmap.PAGESIZE
_MADV_COLLAPSE = 25


def _huge_page_setting() -> str | None:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return None


_HUGE_PAGES = _huge_page_setting()


class BufferHost(Protocol):
    """What memoryview takes: collections.abc.Buffer, which came with Python 3.12."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


class DlpackHost(Protocol):
    """Memory of another library that speaks DLPack: a torch, jax or tensorflow tensor."""

    def __dlpack__(self) -> Any: ...  # noqa: ANN401  (a PyCapsule, which has no type)

    def __dlpack_device__(self) -> tuple[Any, int]: ...


ArenaMemory: TypeAlias = BufferHost | DlpackHost
"""What an arena can be made of: numpy arrays, anything that memoryview takes, CPU tensors of any dtype."""


class Arena:
    """One writable, contiguous buffer seen as bytes; keeps the buffer's owner alive.

    `base` is the address of the first byte, `bytes` a one-dimensional uint8 view of shape (nbytes,). `parts` are the
    offsets and sizes of what belongs to the arena: all of it, unless it spans several allocations.
    """

    __slots__ = ("_owners", "base", "bytes", "nbytes", "parts")

    def __init__(self, buffer: ArenaMemory) -> None:
        """Wrap memory without a copy. Raises ConfigError if it is read-only, not contiguous, or a device's."""
        self.bytes: npt.NDArray[np.uint8] = _as_bytes(buffer)
        self.nbytes = self.bytes.nbytes
        if self.nbytes == 0:
            raise ConfigError("the arena's buffer is empty")
        self.base = int(self.bytes.ctypes.data)
        self.parts: tuple[tuple[int, int], ...] = ((0, self.nbytes),)
        self._owners: tuple[Arena, ...] = ()

    @classmethod
    def spanning(cls, allocations: Iterable[ArenaMemory]) -> Self:
        """Return one arena from the lowest to the highest address of several allocations, without a copy.

        What lies between them is never touched: each plane has to lie in one allocation, which the planes check.
        `offset_of` tells a plane's offset. Not for transports that write one-sided. Raises ConfigError as the
        constructor.
        """
        owners = sorted((cls(allocation) for allocation in allocations), key=lambda owner: owner.base)
        if not owners:
            raise ConfigError("an arena needs a buffer: there is no allocation")
        base, parts = owners[0].base, list[tuple[int, int]]()
        for owner in owners:
            start, end = owner.base - base, owner.base - base + owner.nbytes
            if parts and start <= sum(parts[-1]):  # it touches the one before, or is a view of the same memory
                start, end = parts[-1][0], max(end, sum(parts.pop()))
            parts.append((start, end - start))
        memory = (ctypes.c_uint8 * sum(parts[-1])).from_address(base)
        arena = cls(memory)
        arena.parts, arena._owners = tuple(parts), tuple(owners)
        return arena

    def offset_of(self, memory: ArenaMemory) -> int:
        """Return where a tensor's memory begins in this arena. Raises ConfigError when it lies outside."""
        found = Arena(memory)
        offset = found.base - self.base
        self._check_inside(offset, found.nbytes, "the memory")
        return offset

    def check(self, layout: Layout) -> None:
        """Raise ConfigError unless every plane of the layout lies in the arena."""
        if len(self.parts) == 1 and layout.end_bytes > self.nbytes:
            raise ConfigError(f"the layout needs {layout.end_bytes} bytes, the arena has {self.nbytes}")
        for plane in layout.planes:
            nbytes = plane.bytes_per_lcm_block * (layout.num_lcm_blocks + 1)
            self._check_inside(plane.arena_offset_bytes, nbytes, f"plane {plane.plane_id!r}")

    def _check_inside(self, offset: int, nbytes: int, what: str) -> None:
        if not any(start <= offset and offset + nbytes <= start + length for start, length in self.parts):
            raise ConfigError(f"{what}, {nbytes} bytes at offset {offset}, does not lie in one allocation of the arena")

    @classmethod
    def zeros(cls, nbytes: int) -> Self:
        """Return a fresh arena at a page's border, its pages touched, so that no page fault falls into a transfer."""
        if nbytes < 1:
            raise ConfigError(f"an arena cannot have {nbytes} bytes")
        try:
            memory = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"no memory for an arena of {nbytes} bytes") from error
        memory.fill(0)
        return cls.within(memory, nbytes)

    @classmethod
    def within(cls, buffer: ArenaMemory, nbytes: int) -> Self:
        """Return the first `nbytes` from a page's border on in a buffer that is at least PAGE_BYTES larger.

        The kernel copies between two arenas up to four times faster when their blocks lie alike in their pages.
        Raises ConfigError as the constructor, and for a buffer that is too small.
        """
        whole = cls(buffer)
        start = -whole.base % PAGE_BYTES
        if start + nbytes > whole.nbytes:
            raise ConfigError(f"an arena of {nbytes} bytes at a page's border does not fit into {whole.nbytes}")
        return cls(whole.bytes[start : start + nbytes])

    def gather_pages(self) -> bool:
        """Ask the kernel for huge pages under the arena, which copies by small blocks pay for least.

        For memory that did not come from numpy, which asks by itself. Takes as long as copying the arena; False
        where the kernel has none to give or its owner wants none (Linux only).
        """
        if _HUGE_PAGES is None or "[never]" in _HUGE_PAGES or len(self.parts) > 1:
            return False
        start = -self.base % PAGE_BYTES
        length = (self.nbytes - start) // PAGE_BYTES * PAGE_BYTES
        address = ctypes.c_void_p(self.base + start)
        return length > 0 and ctypes.CDLL(None).madvise(address, ctypes.c_size_t(length), _MADV_COLLAPSE) == 0

    def __repr__(self) -> str:
        return f"Arena({self.nbytes} bytes at {self.base:#x})"


# ---- Other libraries' memory as bytes


_CPU = 1  # DLPack's kDLCPU; pinned host memory has numbers of its own
_HOST_DEVICES = (_CPU, 3, 11)
_DEVICE_NAMES = {2: "CUDA", 4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed", 14: "oneAPI"}


class _DlTensor(ctypes.Structure):
    """DLPack's DLTensor: where a tensor lies, whatever its dtype."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _as_bytes(buffer: object) -> npt.NDArray[np.uint8]:
    """Return a writable uint8 view of the whole memory. Raises ConfigError, which says what prevents it."""
    if isinstance(buffer, list | tuple):
        raise ConfigError(f"an arena is one allocation, not a list of {len(buffer)}: Arena.spanning(...) joins them")
    if isinstance(buffer, np.ndarray):  # memoryview refuses dtypes of other packages, bfloat16 for one
        _check_memory(readonly=not buffer.flags.writeable, contiguous=buffer.flags.c_contiguous)
        return buffer.reshape(-1).view(np.uint8)
    if hasattr(buffer, "__dlpack_device__"):
        return _dlpack_bytes(buffer)
    try:
        view = memoryview(buffer)  # type: ignore[arg-type]  # that it may be none is what is tested
    except (TypeError, ValueError) as error:
        raise ConfigError(f"an arena needs a buffer: {error}") from error
    _check_memory(readonly=view.readonly, contiguous=view.c_contiguous)
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _check_memory(*, readonly: bool, contiguous: bool) -> None:
    if readonly:
        raise ConfigError("the arena's buffer is read-only")
    if not contiguous:
        raise ConfigError("the arena's buffer is not contiguous")


def _dlpack_bytes(host: Any) -> npt.NDArray[np.uint8]:  # noqa: ANN401  (whatever speaks DLPack)
    try:
        device = int(host.__dlpack_device__()[0])
        capsule = host.__dlpack__() if device in _HOST_DEVICES else None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"the arena's buffer cannot be shared: {error}") from error
    if capsule is None:
        name = _DEVICE_NAMES.get(device, f"number {device}")
        raise ConfigError(f"the arena's buffer lies in the memory of a device ({name}): an arena is the host's memory")
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DlTensor.from_address(pointer(capsule, b"dltensor"))
    _check_memory(readonly=False, contiguous=_is_contiguous(tensor))
    nbytes = math.prod(tensor.shape[: tensor.ndim]) * (tensor.bits * tensor.lanes // 8)
    memory = (ctypes.c_uint8 * nbytes).from_address((tensor.data or 0) + tensor.byte_offset)
    memory.owner = capsule  # not consumed: with the capsule the tensor lives
    return np.frombuffer(memory, dtype=np.uint8) if nbytes else np.empty(0, np.uint8)


def _is_contiguous(tensor: _DlTensor) -> bool:
    """Return whether elements follow each other as in C; an extent of one may have any stride."""
    expected = 1
    for axis in reversed(range(tensor.ndim if tensor.strides else 0)):
        if tensor.shape[axis] != 1 and tensor.strides[axis] != expected:
            return False
        expected *= tensor.shape[axis]
    return True


# ---- Which blocks are free. A parent serves one group at a time, so groups that share planes never alias


class Pool:
    """Thread-safe allocator of a layout's block ids; the lowest free ids go first, so that runs stay long."""

    def __init__(self, layout: Layout) -> None:
        self._packs = {group.group_id: group.cache_blocks_per_lcm_block for group in layout.groups}
        self._lock = threading.Lock()
        self._free = list(range(layout.num_lcm_blocks))  # ascending, hence a heap
        self._spare: dict[GroupId, dict[int, list[int]]] = {group_id: {} for group_id in self._packs}
        self._used: dict[GroupId, set[int]] = {group_id: set() for group_id in self._packs}
        self.total_parents = layout.num_lcm_blocks

    @property
    def free_parents(self) -> int:
        """Parents of which no block is used."""
        with self._lock:
            return len(self._free)

    def used_blocks(self) -> dict[GroupId, int]:
        """Return how many blocks are handed out and not released, by group."""
        with self._lock:
            return {group_id: len(used) for group_id, used in self._used.items()}

    def fits(self, counts: Mapping[GroupId, int]) -> bool:
        """Return whether an empty pool could serve the request: False means that waiting is pointless."""
        return self.parents(counts) <= self.total_parents

    def parents(self, counts: Mapping[GroupId, int]) -> int:
        """Return how many parents an empty pool takes for a request."""
        self._check(counts)
        return sum(-(-count // self._packs[group_id]) for group_id, count in counts.items())

    def allocate(self, counts: Mapping[GroupId, int]) -> dict[GroupId, tuple[int, ...]]:
        """Take `counts` blocks of each group, or none.

        Raises PoolExhausted, which names the first group that is short.
        """
        self._check(counts)
        with self._lock:
            free = len(self._free)
            for group_id, count in counts.items():
                spare = sum(map(len, self._spare[group_id].values()))
                if count > spare + free * self._packs[group_id]:
                    raise PoolExhausted(count, spare + free * self._packs[group_id])
                free -= -(-max(0, count - spare) // self._packs[group_id])
            return {group_id: self._take(group_id, count) for group_id, count in counts.items()}

    def release(self, blocks: Mapping[GroupId, Sequence[int]]) -> None:
        """Give blocks back. Raises LocalProtocolError, with nothing changed, if one of them is not in use."""
        with self._lock:
            for group_id, ids in blocks.items():
                if len(set(ids)) != len(ids) or not self._used.get(group_id, set()).issuperset(ids):
                    raise LocalProtocolError(f"blocks of group {group_id!r} released that are not in use")
            for group_id, ids in blocks.items():
                self._give_back(group_id, ids)

    def _check(self, counts: Mapping[GroupId, int]) -> None:
        for group_id, count in counts.items():
            if group_id not in self._packs:
                raise LocalProtocolError(f"the layout has no group {group_id!r}")
            if count < 0:
                raise LocalProtocolError(f"{count} blocks of group {group_id!r} wanted")

    def _take(self, group_id: GroupId, count: int) -> tuple[int, ...]:
        packs, spare = self._packs[group_id], self._spare[group_id]
        taken: list[int] = []
        for parent in sorted(spare) if count else ():
            ids = spare[parent]
            wanted = count - len(taken)
            taken += ids[:wanted]
            if wanted < len(ids):
                spare[parent] = ids[wanted:]
                break
            del spare[parent]
        while len(taken) < count:
            parent = heapq.heappop(self._free)
            ids = list(range(parent * packs + 1, (parent + 1) * packs + 1))
            wanted = count - len(taken)
            taken += ids[:wanted]
            if wanted < packs:
                spare[parent] = ids[wanted:]
        self._used[group_id].update(taken)
        return tuple(taken)

    def _give_back(self, group_id: GroupId, ids: Sequence[int]) -> None:
        packs, spare = self._packs[group_id], self._spare[group_id]
        self._used[group_id].difference_update(ids)
        touched: set[int] = set()
        for block in ids:
            parent = (block - 1) // packs
            spare.setdefault(parent, []).append(block)
            touched.add(parent)
        for parent in touched:
            if len(spare[parent]) == packs:
                del spare[parent]
                heapq.heappush(self._free, parent)
            else:
                spare[parent].sort()
