"""MLX arrays as numpy views: the one place where array types are cast.

numpy has no bfloat16, and the layout has no uint32, so both travel as integers of the same width. A view shares the
array's memory and keeps the array alive; other threads may read and write it, since the array is evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from pdplane.errors import ConfigError

Numbers = npt.NDArray[Any]

LAYOUT_DTYPES: Mapping[mx.Dtype, str] = {
    mx.float32: "float32",
    mx.float16: "float16",
    mx.bfloat16: "bfloat16",
    mx.int64: "int64",
    mx.int32: "int32",
    mx.uint32: "int32",
    mx.int8: "int8",
    mx.uint8: "uint8",
    mx.bool_: "uint8",
}
_CARRIERS: Mapping[int, tuple[mx.Dtype, npt.DTypeLike]] = {
    1: (mx.uint8, np.uint8),
    2: (mx.uint16, np.uint16),
    4: (mx.uint32, np.uint32),
    8: (mx.int64, np.int64),
}


def layout_dtype(dtype: mx.Dtype, where: str) -> str:
    """Return the layout's name for an MLX dtype. Raises ConfigError that names the tensor."""
    name = LAYOUT_DTYPES.get(dtype)
    if name is None:
        raise ConfigError(f"{where} has dtype {dtype}, which no cache layout can carry")
    return name


def carrier(dtype: mx.Dtype) -> npt.DTypeLike:
    """Return the numpy integer type whose bits stand for elements of this MLX dtype."""
    return _CARRIERS[dtype.size][1]


def bits_of(array: mx.array) -> Numbers:
    """Return the bits of an array as numpy integers of its element width, without a copy where its strides allow."""
    return numbers_of(bits_later(array))


def bits_later(array: mx.array) -> mx.array:
    """Return the bits of an array as integers of its element width; not computed yet."""
    return array.view(_CARRIERS[array.dtype.size][0])


def numbers_of(bits: mx.array) -> Numbers:
    """Wait for an array of a type that numpy has, and return a view of it."""
    mx.eval(bits)
    return np.array(bits, copy=False)


class Buffer:
    """A fresh zeroed MLX array that is filled through a numpy view before MLX first reads it."""

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self._dtype = dtype
        self._bits = mx.zeros(shape, dtype=_CARRIERS[dtype.size][0])
        mx.eval(self._bits)
        self.view: Numbers = np.array(self._bits, copy=False)

    def take(self) -> mx.array:
        """Return the filled array; the view is dropped, so that MLX may later write in place."""
        bits = self._bits
        del self._bits, self.view
        return bits.view(self._dtype)


def row_of(logprobs: mx.array) -> Numbers:
    """Return a row of log-probabilities as float32, shape (vocabulary,); exact for narrower types."""
    return np.array(logprobs.astype(mx.float32))
