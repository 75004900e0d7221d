"""Codecs of a cache on the wire: bytes to fewer bytes and back, without loss.

`none` and `zlib` (its default level, as peers send it) are always there; `lz4`, `zstd` and `bp-zstd` need the `zstd`
extra. `bp-zstd` puts the bytes of equal significance side by side before zstd: the high bytes of floats are alike, the
low ones noise.

    bp-zstd = u8 element width | zstd of the planes        (a rest shorter than an element follows the planes as it is)

The lossy names `q8` and `q4` are not here: they change the cache's tensors (pdplane.workers.lossy) and are sent as
`none`. Whatever a stream declares, decoding stops at `limit` bytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import numpy as np

from pdplane.errors import ConfigError, WireError

LOSSLESS = ("none", "zlib", "lz4", "zstd", "bp-zstd")

_LEVEL = 1
_MAX_WIDTH = 8

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
    """Whether a known codec can be used here."""
    module = {"lz4": "lz4", "zstd": "zstandard", "bp-zstd": "zstandard"}.get(codec)
    return module is None or importlib.util.find_spec(module) is not None


def to_planes(data: Buffer, width: int) -> bytes:
    """The first bytes of all elements, then the second ones, and so on; a rest at the end stays as it is."""
    array = np.frombuffer(data, np.uint8)
    whole = len(array) // width * width
    return array[:whole].reshape(-1, width).T.tobytes() + array[whole:].tobytes()


def from_planes(planes: Buffer, width: int) -> bytes:
    """The inverse of `to_planes`."""
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
        declared = _checked_size(zstandard.frame_content_size(data), limit)  # -1 when the frame does not tell
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            found: bytes = reader.read((limit if declared < 0 else declared) + 1)
    except zstandard.ZstdError as error:
        raise _damaged("zstd", error) from None
    if declared >= 0 and len(found) != declared:
        raise _damaged("zstd", "the stream is cut short")
    return _bounded(found, limit, b"")


def _checked_size(declared: int, limit: int) -> int:
    """A size that a stream declares, looked at before anything is allocated for it."""
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


def _bounded(found: bytes, limit: int, rest: bytes) -> bytes:
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
