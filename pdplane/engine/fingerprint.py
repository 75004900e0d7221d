"""What two engines must share for equal tokens, as texts; all of it cheap to compute."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json

import mlx.core as mx

from pdplane.engine.blas import blas_in_use
from pdplane.engine.model import Model
from pdplane.engine.options import EngineOptions
from pdplane.engine.untyped import mlx_version, parameters
from pdplane.engine.weights import weights_hash
from pdplane.messages import Fingerprint

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
