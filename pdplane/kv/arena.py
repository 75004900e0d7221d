"""The one registered buffer of a rank."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pdplane.errors import ConfigError

PAGE_BYTES = mmap.PAGESIZE
_MADV_COLLAPSE = 25


def _huge_page_setting() -> str | None:
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return None


_HUGE_PAGES = _huge_page_setting()


class Arena:
    """One writable, contiguous buffer seen as bytes; keeps the buffer's owner alive.

    `base` is the address of the first byte, `bytes` a one-dimensional uint8 view of shape (nbytes,).
    """

    __slots__ = ("base", "bytes", "nbytes")

    def __init__(self, buffer: Any) -> None:  # noqa: ANN401  (collections.abc.Buffer came with Python 3.12)
        """Wrap a numpy array or anything that memoryview takes; ConfigError if read-only or not contiguous."""
        try:
            view = memoryview(buffer)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"an arena needs a buffer: {error}") from error
        if view.readonly:
            raise ConfigError("the arena's buffer is read-only")
        if not view.c_contiguous:
            raise ConfigError("the arena's buffer is not contiguous")
        if view.nbytes == 0:
            raise ConfigError("the arena's buffer is empty")
        self.bytes: npt.NDArray[np.uint8] = np.frombuffer(view, dtype=np.uint8)
        self.nbytes = view.nbytes
        self.base = int(self.bytes.ctypes.data)

    @classmethod
    def zeros(cls, nbytes: int) -> Self:
        """A fresh arena at a page's border, its pages touched, so that no page fault falls into a transfer."""
        if nbytes < 1:
            raise ConfigError(f"an arena cannot have {nbytes} bytes")
        try:
            memory = np.empty(nbytes + PAGE_BYTES, dtype=np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"no memory for an arena of {nbytes} bytes") from error
        memory.fill(0)
        return cls.within(memory, nbytes)

    @classmethod
    def within(cls, buffer: Any, nbytes: int) -> Self:  # noqa: ANN401  (as above)
        """The first `nbytes` from a page's border on in a buffer that is at least PAGE_BYTES larger.

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
        if _HUGE_PAGES is None or "[never]" in _HUGE_PAGES:
            return False
        start = -self.base % PAGE_BYTES
        length = (self.nbytes - start) // PAGE_BYTES * PAGE_BYTES
        address = ctypes.c_void_p(self.base + start)
        return length > 0 and ctypes.CDLL(None).madvise(address, ctypes.c_size_t(length), _MADV_COLLAPSE) == 0

    def __repr__(self) -> str:
        return f"Arena({self.nbytes} bytes at {self.base:#x})"
