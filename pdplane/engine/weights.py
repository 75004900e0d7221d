"""The content of a model's weights as one text, from samples of every tensor: cheap for a hundred gigabytes.

Two fine-tunes of one model have the same file sizes, names and shapes; their numbers differ in every matrix that was
trained. So each tensor takes part with its name, dtype, shape and `SAMPLES` pieces spread over its bytes, whole when
it is small. How tensors are spread over files takes no part: the same weights in other shards are the same model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from pdplane.engine.folders import cache_folder
from pdplane.errors import ConfigError

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
