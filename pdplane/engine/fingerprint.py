"""What two engines must share for equal tokens, as texts, the content of the weights among them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx

from pdplane.engine.blas import blas_in_use
from pdplane.engine.folders import cache_folder
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import mlx_version, parameters
from pdplane.errors import ConfigError
from pdplane.messages import Fingerprint

SAMPLES = 16
PIECE_BYTES = 4096
_HEADER_BYTES = 100 << 20  # the most that the safetensors format allows


def weights_hash(folder: Path) -> str:
    """Return SHA-256 over all tensors of `model*.safetensors` in a folder, as hex digits.

    The result is kept in the cache folder for as long as names, sizes and times of the files stay. Raises ConfigError
    for a file that is no safetensors file.
    """
    files = sorted(folder.glob("model*.safetensors"))
    facts = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    kept = cache_folder() / "weights" / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(kept.read_text())
        if found["files"] == facts:
            return str(found["hash"])
    digest = _hash_of(files)
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the reads again
        _keep(kept, json.dumps({"files": facts, "hash": digest}))
    return digest


def _hash_of(files: Sequence[Path]) -> str:
    tensors: dict[str, bytes] = {}
    for file in files:
        with file.open("rb") as opened:
            tensors.update(_tensors(file, opened))
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def _tensors(file: Path, opened: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Yield each tensor's name and the digest of what it is."""
    length = int.from_bytes(opened.read(8), "little")
    if not 0 < length <= _HEADER_BYTES:
        raise ConfigError(f"{file} is no safetensors file: its header would have {length} bytes")
    try:
        header: Mapping[str, Any] = json.loads(opened.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
            for offset, nbytes in _pieces(end - begin):
                opened.seek(8 + length + begin + offset)
                digest.update(opened.read(nbytes))
            yield name, digest.digest()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is no safetensors file: {error}") from error


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what is read of a tensor: its first and its last bytes, and as many between."""
    if nbytes <= SAMPLES * PIECE_BYTES:
        yield 0, nbytes
        return
    for piece in range(SAMPLES):
        yield (nbytes - PIECE_BYTES) * piece // (SAMPLES - 1), PIECE_BYTES


def _keep(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent)
    with os.fdopen(handle, "w") as opened:
        opened.write(text)
    os.replace(name, file)


# ---- What two engines must share for equal tokens, as texts; all of it cheap to compute


_DIGITS = 32  # of a hash: 128 bits
_NOTES = frozenset({"_name_or_path", "transformers_version", "use_cache"})


def fingerprint(model: Model, options: EngineOptions, tp_size: int = 1) -> Fingerprint:
    """Describe a loaded model and its options.

    Other BLAS libraries, kernels, numbers of threads and sizes of split add up in another order, which costs last bits.
    """
    quantised = options.kv_bits is not None
    required = (
        ("config", _config_hash(model)),
        ("weights", _weights(model)),
        ("tokenizer", model.tokenizer.fingerprint()[:_DIGITS]),
        ("dtype", _dtypes(model)),
        ("prefill_step_size", str(options.prefill_step_size)),
        ("kv_bits", str(options.kv_bits) if quantised else "none"),
        ("kv_group_size", str(options.kv_group_size) if quantised else "none"),
        ("mlx", mlx_version()),
        ("mlx_lm", importlib.metadata.version("mlx-lm")),
    )
    advisory = (("backend", _backend()), ("blas", str(blas_in_use())), ("tp_size", str(tp_size)))
    return Fingerprint(required, advisory)


def _config_hash(model: Model) -> str:
    """Return a hash of the config without names and notes that no computation reads."""
    told = {key: value for key, value in model.config.items() if key not in _NOTES}
    return _hash(json.dumps(told, sort_keys=True, default=str).encode())


def _weights(model: Model) -> str:
    if model.path is None:
        return _hash(f"{model.config.get('tiny')}:{model.config.get('seed')}".encode())
    return weights_hash(model.path)[:_DIGITS]


def _dtypes(model: Model) -> str:
    names = {str(array.dtype).removeprefix("mlx.core.") for _, array in parameters(model.network)}
    return "+".join(sorted(names))


def _backend() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "gpu"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
