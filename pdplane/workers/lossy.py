"""Keys and values in 8 or 4 bits, for who asks by name: smaller, and not the same cache any more.

Each row of a float tensor is cut into groups of up to 64 numbers along its last axis; a group is its minimum and its
step as float32, and whole numbers of 8 or 4 bits. What is no float of a key or value stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.engine.saved_caches import SavedCache, SavedTensor
from pdplane.errors import IncompatibleCache
from pdplane.workers.activations import Bits, bfloat16_bits

LOSSY: Mapping[str, int] = {"q8": 8, "q4": 4}

_GROUP = 64
_ROUNDED = ("keys", "values")
_PARTS = ("codes", "low", "step")
_FLOATS = ("float32", "float16", "bfloat16")


def shrink(caches: Sequence[SavedCache], codec: str) -> tuple[SavedCache, ...]:
    """The caches with their keys and values rounded; codec is `q8` or `q4`."""
    bits = LOSSY[codec]
    return tuple(_with_tensors(cache, (part for t in cache.tensors for part in _shrunk(t, bits))) for cache in caches)


def expand(caches: Sequence[SavedCache], codec: str) -> tuple[SavedCache, ...]:
    """Caches of the original dtypes and shapes. Raises IncompatibleCache when the parts do not fit together."""
    bits = LOSSY[codec]
    return tuple(_with_tensors(cache, _expanded(cache, bits)) for cache in caches)


def _shrunk(tensor: SavedTensor, bits: int) -> Iterator[SavedTensor]:
    if tensor.name not in _ROUNDED or tensor.dtype not in _FLOATS or tensor.bits.shape[-1] % 2:
        yield tensor
        return
    numbers = _floats(tensor)
    group = _group(numbers.shape[-1])
    grouped = numbers.reshape(*numbers.shape[:-1], -1, group)
    low = grouped.min(-1, keepdims=True, initial=np.inf)
    step = (grouped.max(-1, keepdims=True, initial=-np.inf) - low) / np.float32(2**bits - 1)
    safe = np.where(step > 0, step, np.float32(1))
    codes = np.rint((grouped - low) / safe).astype(np.uint8).reshape(numbers.shape)
    if bits == 4:
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    # The dtype of the original is told by an empty tensor: safetensors has no other place for it.
    yield SavedTensor(f"{tensor.name}.codes", "uint8", codes)
    yield SavedTensor(f"{tensor.name}.low", "float32", low[..., 0].view(np.uint32))
    yield SavedTensor(f"{tensor.name}.step", "float32", step[..., 0].view(np.uint32))
    yield SavedTensor(f"{tensor.name}.like", tensor.dtype, tensor.bits.reshape(-1)[:0])


def _expanded(cache: SavedCache, bits: int) -> Iterator[SavedTensor]:
    named = {tensor.name: tensor for tensor in cache.tensors}
    for tensor in cache.tensors:
        name, dot, part = tensor.name.partition(".")
        if not dot or f"{name}.like" not in named:
            yield tensor
        elif part == "like":
            yield _whole(cache.place, name, tensor.dtype, named, bits)


def _whole(place: str, name: str, dtype: str, named: Mapping[str, SavedTensor], bits: int) -> SavedTensor:
    parts = [named.get(f"{name}.{part}") for part in _PARTS]
    if any(part is None for part in parts) or dtype not in _FLOATS:
        raise IncompatibleCache(f"{place}.{name}", " ".join(_PARTS), "a part is missing")
    codes, low, step = (part.bits for part in parts if part is not None)
    if bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)
    wanted = (*codes.shape[:-1], codes.shape[-1] // _group(codes.shape[-1]))
    if codes.dtype != np.uint8 or any(p.shape != wanted or p.dtype != np.uint32 for p in (low, step)):
        raise IncompatibleCache(f"{place}.{name}", str(wanted), f"{low.shape} {step.shape}")
    grouped = codes.reshape(*wanted, -1).astype(np.float32)
    numbers = grouped * step.view(np.float32)[..., None] + low.view(np.float32)[..., None]
    return SavedTensor(name, dtype, _bits(numbers.reshape(codes.shape), dtype))


def _group(width: int) -> int:
    return _GROUP if width and width % _GROUP == 0 else max(width, 1)


def _floats(tensor: SavedTensor) -> npt.NDArray[np.float32]:
    if tensor.dtype == "bfloat16":
        return (tensor.bits.astype(np.uint32) << 16).view(np.float32)
    kind = np.float16 if tensor.dtype == "float16" else np.float32
    return np.ascontiguousarray(tensor.bits).view(kind).astype(np.float32)


def _bits(numbers: npt.NDArray[np.float32], dtype: str) -> Bits:
    if dtype == "float32":
        return numbers.view(np.uint32)
    if dtype == "float16":
        return numbers.astype(np.float16).view(np.uint16)
    return bfloat16_bits(numbers)


def _with_tensors(cache: SavedCache, tensors: Iterator[SavedTensor]) -> SavedCache:
    return attrs.evolve(cache, tensors=tuple(tensors))
