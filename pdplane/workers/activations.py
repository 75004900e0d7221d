"""Activations for peers that know float16 only: bits of one dtype as bits of another, rounded to the nearest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]


def to_half(bits: Bits, dtype: str) -> Bits:
    """Bits of float32, float16 or bfloat16 as bits of float16."""
    return bits if dtype == "float16" else _wide(bits, dtype).astype(np.float16).view(np.uint16)


def from_half(bits: Bits, dtype: str) -> Bits:
    """Bits of float16 as bits of `dtype`; float16 has more digits than bfloat16, which rounds to even."""
    if dtype == "float16":
        return bits
    numbers = bits.view(np.float16).astype(np.float32)
    return numbers.view(np.uint32) if dtype == "float32" else bfloat16_bits(numbers)


def bfloat16_bits(numbers: npt.NDArray[np.float32]) -> Bits:
    """float32 as bits of bfloat16, rounded to nearest, ties to even."""
    wide = numbers.view(np.uint32).astype(np.uint64)
    return ((wide + 0x7FFF + (wide >> 16 & 1)) >> 16).astype(np.uint16)


def _wide(bits: Bits, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float32)
