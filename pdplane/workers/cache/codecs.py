"""Codecs of a cache on the wire: bytes to fewer bytes and back, without loss.

`none` and `zlib` (its default level, as peers send it) are always there; `lz4`, `zstd` and `bp-zstd` need the `zstd`
extra. `bp-zstd` puts the bytes of equal significance side by side before zstd: the high bytes of floats are alike, the
low ones are noise.

    bp-zstd = u8 element width | zstd of the planes        (a rest shorter than an element follows the planes as it is)

The lossy names `q8` and `q4` are not here: they change the cache's tensors (`shrink`, below) and are sent as
`none`. Whatever a stream declares, decoding stops at `limit` bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.errors import ConfigError, IncompatibleCache, WireError
from pdplane.workers.cache.saved import SavedCache, SavedTensor
from pdplane.workers.experts.requests import Bits, bfloat16_bits

LOSSLESS = ("none", "zlib", "lz4", "zstd", "bp-zstd")

_LEVEL = 1
_MAX_WIDTH = 8
_ZSTD_RLE, _ZSTD_CHECKSUM = 1, 4
_LEAST_BLOCK, _SPARE_BLOCKS = 256, 4096  # bytes of a zstd block on the average; encoders make them of 128 KiB

Buffer = bytes | bytearray | memoryview
_Untyped: TypeAlias = Any  # the codecs' modules ship no types


@attrs.frozen
class _Codec:
    encode: Callable[[Buffer, int], Buffer]
    decode: Callable[[Buffer, int], Buffer]


def encode(codec: str, data: Buffer, width: int = 2) -> Buffer:
    """Compress; `width` is the bytes of most elements. Raises ValueError for an unknown name, ConfigError."""
    return _codec(codec).encode(data, width)


def decode(codec: str, data: Buffer, limit: int) -> Buffer:
    """Expand to `limit` bytes at most.

    Raises ValueError for an unknown name, ConfigError for a codec that is not installed, WireError for a damaged or
    larger stream.
    """
    return _codec(codec).decode(data, limit)


def is_installed(codec: str) -> bool:
    """Return whether a known codec can be used here."""
    module = {"lz4": "lz4", "zstd": "zstandard", "bp-zstd": "zstandard"}.get(codec)
    return module is None or importlib.util.find_spec(module) is not None


def to_planes(data: Buffer, width: int) -> bytes:
    """Return the first bytes of all elements, then the second ones, and so on; a rest at the end stays as it is."""
    array = np.frombuffer(data, np.uint8)
    whole = len(array) // width * width
    return array[:whole].reshape(-1, width).T.tobytes() + array[whole:].tobytes()


def from_planes(planes: Buffer, width: int) -> bytes:
    """Return the inverse of `to_planes`."""
    array = np.frombuffer(planes, np.uint8)
    whole = len(array) // width * width
    return array[:whole].reshape(width, -1).T.tobytes() + array[whole:].tobytes()


def _codec(name: str) -> _Codec:
    if not isinstance(name, str) or name not in _CODECS:
        raise ValueError(f"codec {name}")
    return _CODECS[name]


def _need(module: str, codec: str) -> _Untyped:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"codec {codec} is not installed here: pip install 'pdplane[zstd]'") from None


def _decode_none(data: Buffer, limit: int) -> Buffer:
    if len(data) > limit:
        raise WireError("payload", f"the payload has {len(data)} bytes, allowed are {limit}")
    return data


def _decode_zlib(data: Buffer, limit: int) -> Buffer:
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, limit + 1)
    except zlib.error as error:
        raise _damaged("zlib", error) from None
    if len(found) <= limit and not stream.eof:
        raise _damaged("zlib", "the stream is cut short")
    return _bounded(found, limit, stream.unused_data)


def _encode_lz4(data: Buffer, _width: int) -> Buffer:
    found: bytes = _need("lz4.frame", "lz4").compress(data)
    return found


def _decode_lz4(data: Buffer, limit: int) -> Buffer:
    frames = _need("lz4.frame", "lz4")
    try:
        declared = _checked_size(int(frames.get_frame_info(data)["content_size"]), limit)
        stream = frames.LZ4FrameDecompressor()
        found: bytes = stream.decompress(data, max_length=(declared or limit) + 1)
    except RuntimeError as error:
        raise _damaged("lz4", error) from None
    if len(found) <= (declared or limit) and not stream.eof:
        raise _damaged("lz4", "the stream is cut short")
    return _bounded(found, limit, stream.unused_data or b"")


def _encode_zstd(data: Buffer, _width: int) -> Buffer:
    found: bytes = _need("zstandard", "zstd").ZstdCompressor(level=_LEVEL).compress(data)
    return found


def _decode_zstd(data: Buffer, limit: int) -> Buffer:
    zstandard = _need("zstandard", "zstd")
    try:
        declared = _checked_size(zstandard.frame_content_size(data), limit)  # -1 when the frame does not declare one
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            found: bytes = reader.read((limit if declared < 0 else declared) + 1)
        header = zstandard.frame_header_size(data)
    except zstandard.ZstdError as error:
        raise _damaged("zstd", error) from None
    if declared >= 0 and len(found) != declared:
        raise _damaged("zstd", "the stream is cut short")
    if len(found) > limit:
        return _bounded(found, limit, b"")
    end = _zstd_end(memoryview(data), header, len(found) // _LEAST_BLOCK + _SPARE_BLOCKS)
    return _bounded(found, limit, memoryview(data)[end:])


def _zstd_end(data: memoryview, start: int, most: int) -> int:
    """Return where a frame ends whose first block header stands at `start`; the decoder does not tell.

    Raises WireError for a frame that is cut short, or has more than `most` blocks.
    """
    for _ in range(most):
        block = int.from_bytes(data[start : start + 3], "little")
        start += 3 + (1 if block >> 1 & 3 == _ZSTD_RLE else block >> 3)
        if block & 1 and data[4] & _ZSTD_CHECKSUM:
            start += 4
        if start > len(data):
            raise _damaged("zstd", "the stream is cut short")
        if block & 1:
            return start
    raise _damaged("zstd", "its blocks are too small")


def _checked_size(declared: int, limit: int) -> int:
    """Return the size that a stream declares, checked before anything is allocated for it."""
    if declared > limit:
        raise WireError("payload", f"the payload declares {declared} bytes, allowed are {limit}")
    return declared


def _encode_planes(data: Buffer, width: int) -> Buffer:
    return bytes([width]) + bytes(_encode_zstd(to_planes(data, width), width))


def _decode_planes(data: Buffer, limit: int) -> Buffer:
    view = memoryview(data)
    if not len(view) or not 1 <= view[0] <= _MAX_WIDTH:
        raise _damaged("bp-zstd", f"no element width of 1..{_MAX_WIDTH}")
    return from_planes(_decode_zstd(view[1:], limit), view[0])


def _bounded(found: bytes, limit: int, rest: Buffer) -> bytes:
    if len(found) > limit:
        raise WireError("payload", f"the payload expands to more than {limit} bytes")
    if rest:
        raise WireError("payload", f"{len(rest)} bytes follow the compressed payload")
    return found


def _damaged(codec: str, reason: object) -> WireError:
    return WireError("payload", f"the {codec} payload cannot be expanded: {reason}")


_CODECS: Mapping[str, _Codec] = {
    "none": _Codec(lambda data, width: data, _decode_none),
    "zlib": _Codec(lambda data, width: zlib.compress(data), _decode_zlib),
    "lz4": _Codec(_encode_lz4, _decode_lz4),
    "zstd": _Codec(_encode_zstd, _decode_zstd),
    "bp-zstd": _Codec(_encode_planes, _decode_planes),
}


# ---- Keys and values in 8 or 4 bits, on request: smaller, and not the same cache any more
#
# Each row of a float tensor is cut into groups of up to 64 numbers along its last axis; a group is its minimum and its
# step as float32, and whole numbers of 8 or 4 bits. All other tensors stay as they are.


LOSSY: Mapping[str, int] = {"q8": 8, "q4": 4}

_GROUP = 64
_ROUNDED = ("keys", "values")
_PARTS = ("codes", "low", "step")
_FLOATS = ("float32", "float16", "bfloat16")


def shrink(caches: Sequence[SavedCache], codec: str) -> tuple[SavedCache, ...]:
    """Return the caches with their keys and values rounded; codec is `q8` or `q4`."""
    bits = LOSSY[codec]
    return tuple(_with_tensors(cache, (part for t in cache.tensors for part in _shrunk(t, bits))) for cache in caches)


def expand(caches: Sequence[SavedCache], codec: str) -> tuple[SavedCache, ...]:
    """Return caches of the original dtypes and shapes. Raises IncompatibleCache when the parts do not fit together."""
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
    # An empty tensor carries the original's dtype: safetensors has no other place for it.
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
