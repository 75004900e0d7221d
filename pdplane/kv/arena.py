"""The one registered buffer of a rank."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pdplane.errors import ConfigError


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
        """A fresh arena whose pages are touched, so that no page fault falls into a transfer."""
        if nbytes < 1:
            raise ConfigError(f"an arena cannot have {nbytes} bytes")
        try:
            memory = np.empty(nbytes, dtype=np.uint8)
        except (MemoryError, ValueError) as error:
            raise ConfigError(f"no memory for an arena of {nbytes} bytes") from error
        memory.fill(0)
        return cls(memory)

    def __repr__(self) -> str:
        return f"Arena({self.nbytes} bytes at {self.base:#x})"
