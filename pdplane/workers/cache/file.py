"""Saved caches as safetensors: one header with a manifest, then the tensors' bytes.

    u64 header length (little-endian) | header JSON | tensors, in the header's order, without gaps

Any safetensors reader can open it. The manifest stands in `__metadata__`, whose values are texts:

    format model_revision config_hash weight_hash prefix_hash document_id token_count dtype mlx mlx_lm lossy caches

`caches` is a JSON list of [place, class, numbers]; tensor `<place>:<name>` belongs to the cache at `place`. A reader
checks every length and shape against the bytes that are there before it makes an array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from pdplane.errors import IncompatibleCache, WireError
from pdplane.net import JsonValue, parse_json
from pdplane.workers.cache.saved import SavedCache, SavedTensor

FORMAT = "pdplane-cache/1"
MAX_HEADER_BYTES = 16 << 20

_ALIGNMENT = 8
_NAMES: Mapping[str, str] = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint32": "U32", "int32": "I32", "int64": "I64",
    "uint8": "U8", "int8": "I8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_BITS: Mapping[str, str] = {"F32": "<u4", "F16": "<u2", "BF16": "<u2", "U32": "<u4", "I32": "<u4", "I64": "<i8",
                            "U8": "<u1", "I8": "<u1", "BOOL": "<u1"}  # fmt: skip


@attrs.frozen
class CacheManifest:
    """Where a saved cache comes from and what it holds; `lossy` is `none`, `q8` or `q4`."""

    model_revision: str
    config_hash: str
    weight_hash: str
    prefix_hash: str
    document_id: str
    token_count: int
    dtype: str
    mlx: str
    mlx_lm: str
    lossy: str = "none"

    def check(self, ours: CacheManifest) -> None:
        """Raise IncompatibleCache naming the first field that differs from `ours`; the document's name may differ."""
        for name in (field.name for field in attrs.fields(CacheManifest) if field.name != "document_id"):
            mine, other = getattr(ours, name), getattr(self, name)
            if mine != other:
                raise IncompatibleCache(name, str(mine), str(other))


@attrs.frozen(eq=False)
class CacheFile:
    """A manifest with the caches that it describes."""

    manifest: CacheManifest
    caches: tuple[SavedCache, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    @property
    def width(self) -> int:
        """The element width in bytes that most of the tensors' bytes have."""
        weights: dict[int, int] = {}
        for tensor in _tensors(self.caches):
            weights[tensor.bits.itemsize] = weights.get(tensor.bits.itemsize, 0) + tensor.nbytes
        return max(weights, key=lambda width: weights[width], default=1)


def encode_cache_file(file: CacheFile) -> bytes:
    """Return the file's bytes."""
    header: dict[str, object] = {"__metadata__": _metadata(file)}
    offset, parts = 0, []
    for cache in file.caches:
        for tensor in cache.tensors:
            end = offset + tensor.nbytes
            header[f"{cache.place}:{tensor.name}"] = {
                "dtype": _NAMES[tensor.dtype], "shape": list(tensor.bits.shape), "data_offsets": [offset, end],
            }  # fmt: skip
            parts.append(np.ascontiguousarray(tensor.bits).data)
            offset = end
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join((len(text).to_bytes(8, "little"), text, *parts))


def decode_cache_file(data: bytes | bytearray | memoryview) -> CacheFile:
    """Read a file; the tensors share memory with `data`.

    Raises WireError for bytes that are no such file and IncompatibleCache for one of another format.
    """
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(len(view) - 8, MAX_HEADER_BYTES):
        raise WireError("cache", f"a cache header of {length} bytes in a payload of {len(view)}")
    header = parse_json(bytes(view[8 : 8 + length]), "cache", MAX_HEADER_BYTES)
    metadata = header.member("__metadata__")
    _check_format(metadata)
    tensors = _read_tensors(header, view[8 + length :])
    caches = tuple(_read_cache(entry, tensors) for entry in _entries(metadata))
    if tensors:
        raise WireError("cache", f"tensor {next(iter(tensors))[:80]!r} belongs to no cache")
    return CacheFile(_read_manifest(metadata), caches)


def _check_format(metadata: JsonValue) -> None:
    found = metadata.optional("format")
    if found is None or found.json != FORMAT:
        raise IncompatibleCache("format", FORMAT, "none" if found is None else str(found.json)[:80])


def _metadata(file: CacheFile) -> dict[str, str]:
    facts = {name: str(value) for name, value in attrs.asdict(file.manifest).items()}
    caches = [[cache.place, cache.class_name, dict(cache.numbers)] for cache in file.caches]
    return {"format": FORMAT, **facts, "caches": json.dumps(caches, separators=(",", ":"))}


def _read_manifest(metadata: JsonValue) -> CacheManifest:
    texts = {
        field.name: metadata.member(field.name).text(4096, low=0)
        for field in attrs.fields(CacheManifest)
        if field.name != "token_count"
    }
    count = metadata.member("token_count")
    number = count.text(18)
    if not (number.isascii() and number.isdecimal()):
        count.refuse("must be a whole number")
    return CacheManifest(token_count=int(number), **texts)


def _entries(metadata: JsonValue) -> list[JsonValue]:
    text = metadata.member("caches").text(MAX_HEADER_BYTES)
    return parse_json(f'{{"caches":{text}}}'.encode(), "cache", MAX_HEADER_BYTES + 16).member("caches").items()


def _read_cache(entry: JsonValue, tensors: dict[str, SavedTensor]) -> SavedCache:
    parts = entry.items()
    if len(parts) != 3:
        entry.refuse("must hold a place, a class and numbers")
    place, class_name = parts[0].text(), parts[1].text()
    numbers = parts[2].json
    if not isinstance(numbers, dict):
        parts[2].refuse("must be an object")
    counts = {name: parts[2].member(name).whole() for name in numbers}
    own = [name for name in tensors if name.partition(":")[0] == place]
    return SavedCache(place, class_name, counts, tuple(tensors.pop(name) for name in own))


def _read_tensors(header: JsonValue, body: memoryview) -> dict[str, SavedTensor]:
    if not isinstance(header.json, dict):
        header.refuse("must be an object")
    found: dict[str, SavedTensor] = {}
    end = 0
    for name in header.json:
        if name == "__metadata__":
            continue
        described = header.member(name)
        start, end = _span(described, end, len(body))
        found[name] = _read_tensor(name, described, body[start:end])
    if end != len(body):
        raise WireError("cache", f"the tensors end at byte {end} of {len(body)}")
    return found


def _span(described: JsonValue, start: int, limit: int) -> tuple[int, int]:
    offsets = described.member("data_offsets")
    pair = offsets.wholes()
    if len(pair) != 2 or pair[0] != start or not start <= pair[1] <= limit:
        offsets.refuse(f"must begin at {start} and end by {limit}")
    return pair[0], pair[1]


def _read_tensor(name: str, described: JsonValue, body: memoryview) -> SavedTensor:
    dtype = described.member("dtype")
    code = dtype.text()
    if code not in _BITS:
        dtype.refuse("is not a dtype that a cache has")
    shape = described.member("shape").wholes()
    bits = np.dtype(_BITS[code])
    if len(shape) > 8 or math.prod(shape) * bits.itemsize != len(body):
        described.refuse(f"has the shape {shape[:8]} for {len(body)} bytes")
    array = np.frombuffer(body, bits).reshape(shape) if len(body) else np.zeros(shape, bits)
    return SavedTensor(name.partition(":")[2], _DTYPES[code], array)


def _tensors(caches: Sequence[SavedCache]) -> Iterable[SavedTensor]:
    return (tensor for cache in caches for tensor in cache.tensors)
