"""What two engines must share for equal tokens, as texts; all of it cheap to compute."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx

from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import mlx_version, parameters
from pdplane.messages import Fingerprint

_DIGITS = 32  # of a hash: 128 bits


def fingerprint(model: Model, options: EngineOptions, tp_size: int = 1) -> Fingerprint:
    """Describe a loaded model and its options; other sizes of split add up in another order, which costs last bits."""
    quantised = options.kv_bits is not None
    required = (
        ("config", _hash(json.dumps(dict(model.config), sort_keys=True, default=str).encode())),
        ("weights", _weights_hash(model)),
        ("dtype", _dtypes(model)),
        ("prefill_step_size", str(options.prefill_step_size)),
        ("kv_bits", str(options.kv_bits) if quantised else "none"),
        ("kv_group_size", str(options.kv_group_size) if quantised else "none"),
        ("mlx", mlx_version()),
        ("mlx_lm", importlib.metadata.version("mlx-lm")),
    )
    return Fingerprint(required, (("backend", _backend()), ("blas", _blas()), ("tp_size", str(tp_size))))


def _weights_hash(model: Model) -> str:
    """Sizes and headers (names, dtypes, shapes, offsets) of the weight files; the weights themselves are not read."""
    if model.path is None:
        return _hash(f"{model.config.get('tiny')}:{model.config.get('seed')}".encode())
    digest = hashlib.sha256()
    for file in sorted(model.path.glob("model*.safetensors")):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        digest.update(_header(file))
    return digest.hexdigest()[:_DIGITS]


def _header(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(int.from_bytes(opened.read(8), "little"))


def _dtypes(model: Model) -> str:
    names = {str(array.dtype).removeprefix("mlx.core.") for _, array in parameters(model.network)}
    return "+".join(sorted(names))


def _backend() -> str:
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "gpu"


def _blas() -> str:
    if sys.platform == "darwin":
        return "accelerate"
    return "+".join(sorted(set(_mapped_blas()))) or "none"


def _mapped_blas() -> Iterator[str]:
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        name = Path(line.split()[-1]).name
        if "blas" in name and "mlx" not in name and "numpy" not in line:
            yield name


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
