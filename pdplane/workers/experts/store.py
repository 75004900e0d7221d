"""Where the weights of a MoE model's experts come from, one expert at a time.

A checkpoint's safetensors files are mapped and only the bytes of the experts that are asked for are read; a tiny
model's experts are cut out of its network. Both kinds of names are known: stacked tensors, as mlx-lm writes them
(`...switch_mlp.gate_proj.weight`, one row an expert), and single ones, as qwen3_moe and mixtral were published.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs
import mlx.core as mx
import numpy as np

from pdplane.engine.model import TINY, Model, model_folder
from pdplane.engine.options import Progress, no_progress
from pdplane.engine.tiny import build_tiny
from pdplane.engine.untyped import Network
from pdplane.engine.views import Numbers, bits_of, carrier
from pdplane.errors import ConfigError
from pdplane.workers.cache.saved import DTYPES
from pdplane.workers.experts.switch import Quantization, switch_modules

Tensors = Mapping[str, Numbers]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_STACKED = re.compile(r"(.*layers\.(\d+)\..*switch_mlp)\.(gate_proj|up_proj|down_proj)\.(\w+)\Z")
_SINGLE = re.compile(r"(.*layers\.(\d+)\..*)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases)\Z")
_SINGLE_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen3_moe": {name: name for name in PROJECTIONS},
    "mixtral": {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
}
_PARTS = {"weight", "scales", "biases"}
_FILE_DTYPES: Mapping[str, str] = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "U32": "uint32", "U8": "uint8",
}  # fmt: skip
_MAX_HEADER_BYTES = 256 << 20


@attrs.frozen
class Part:
    """One tensor of one expert, such as `gate_proj.weight`."""

    shape: tuple[int, ...]
    dtype: str


@attrs.frozen
class ExpertLayer:
    """One layer's experts; all of them look alike. `width` is the model's hidden size."""

    layer: int
    num_experts: int
    width: int
    parts: Mapping[str, Part]
    quantization: Quantization | None


class ExpertStore(Protocol):
    """A source of experts; `read` is called by one thread at a time."""

    @property
    def model_type(self) -> str: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def layers(self) -> Mapping[int, ExpertLayer]: ...

    @property
    def identity(self) -> str:
        """A hash that two stores share when their experts give the same numbers."""

    def read(self, layer: int, expert: int) -> Tensors:
        """Return an expert's tensors by part, as bits. Raises OSError when its file cannot be read."""


class NetworkStore:
    """The experts of a network in memory."""

    def __init__(self, network: Network, config: Mapping[str, Any]) -> None:
        self._modules = {layer: module for layer, _, module in switch_modules(network)}
        self.model_type = str(config["model_type"])
        self.num_layers = int(config["num_hidden_layers"])
        self.layers = {layer: _describe(layer, module) for layer, module in self._modules.items()}
        named = f"{config.get('tiny')}:{config.get('seed')}"
        if not self.layers:
            raise ConfigError(f"a {self.model_type} has no experts")
        self.identity = _identity(self.model_type, self.layers, [named])

    def read(self, layer: int, expert: int) -> Tensors:
        module = self._modules[layer]
        return {
            name: bits_of(mx.contiguous(module[projection][part][expert]))
            for name in self.layers[layer].parts
            for projection, part in [name.split(".")]
        }


def open_store(name: str, *, seed: int = 0, progress: Progress = no_progress) -> ExpertStore:
    """Return the experts of a model by any of its names; the model itself is not loaded. Raises ConfigError."""
    if name.startswith(TINY):
        tiny = build_tiny(name.removeprefix(TINY), seed)
        return NetworkStore(tiny.network, tiny.config)
    return FileStore(model_folder(name, progress))


def store_of(model: Model) -> ExpertStore:
    """Return the experts of a loaded model, before anything takes their place in its network. Raises ConfigError."""
    return NetworkStore(model.network, model.config) if model.path is None else FileStore(model.path)


@attrs.frozen
class _Place:
    """A tensor in a file: its bytes lie at `offset`, one expert after the other when it is stacked."""

    file: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    path: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size


class FileStore:
    """The experts of a model directory. Raises ConfigError when it has none that pdplane can run."""

    def __init__(self, folder: Path) -> None:
        config = _read_config(folder)
        self.model_type = str(config.get("model_type"))
        self.num_layers = int(config.get("num_hidden_layers") or 0)
        self._maps: dict[Path, mmap.mmap] = {}
        self._places: dict[tuple[int, int | None, str], _Place] = {}
        files = sorted(folder.glob("model*.safetensors"))
        headers = {file: _read_header(file) for file in files}
        for file, header in headers.items():
            self._places.update(_find(file, header, self.model_type))
        self.layers = dict(_group(self._places, config))
        if not self.layers:
            raise ConfigError(f"{folder} has no experts that pdplane knows how to find")
        self.identity = _identity(self.model_type, self.layers, _sizes(headers))

    def read(self, layer: int, expert: int) -> Tensors:
        return {name: self._read_part(layer, expert, name) for name in self.layers[layer].parts}

    def close(self) -> None:
        """Unmap the files; harmless twice. Nothing read from them is used afterwards."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def _read_part(self, layer: int, expert: int, name: str) -> Numbers:
        part = self.layers[layer].parts[name]
        stacked = self._places.get((layer, None, name))
        place = stacked or self._places[layer, expert, name]
        nbytes = place.nbytes // (place.shape[0] if stacked else 1)
        offset = place.offset + (expert * nbytes if stacked else 0)
        # A slice of a map is a copy of just these bytes; a view would keep the map from being closed.
        data = self._mapped(place.file)[offset : offset + nbytes]
        return np.frombuffer(data, carrier(DTYPES[part.dtype])).reshape(part.shape)

    def _mapped(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as opened:
                self._maps[file] = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def _describe(layer: int, module: Network) -> ExpertLayer:
    parts = {}
    for projection in PROJECTIONS:
        linear = module[projection]
        for name in _PARTS:
            if linear.get(name) is not None:
                array = linear[name]
                parts[f"{projection}.{name}"] = Part(tuple(array.shape[1:]), _dtype_name(array.dtype))
    gate = module["gate_proj"]
    packed = Quantization(gate.group_size, gate.bits, gate.mode) if hasattr(gate, "bits") else None
    return _layer(layer, int(gate.num_experts), dict(sorted(parts.items())), packed)


def _layer(layer: int, num_experts: int, parts: Mapping[str, Part], packed: Quantization | None) -> ExpertLayer:
    gate = parts["gate_proj.weight"].shape[-1]
    width = gate if packed is None else parts["gate_proj.scales"].shape[-1] * packed.group_size
    return ExpertLayer(layer, num_experts, width, parts, packed)


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {folder / 'config.json'}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{folder / 'config.json'} is no JSON object")
    return found


def _read_header(file: Path) -> dict[str, Any]:
    """Return a safetensors header, with `data` where its tensors begin. Raises ConfigError."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ConfigError(f"cannot read {file}: its header is longer than the file")
        text = opened.read(length)
    try:
        return {"data": 8 + length, "size": size, "tensors": json.loads(text)}
    except ValueError as error:
        raise ConfigError(f"cannot read {file}: {error}") from error


def _find(
    file: Path, header: Mapping[str, Any], model_type: str
) -> Iterator[tuple[tuple[int, int | None, str], _Place]]:
    for name, described in header["tensors"].items():
        key = _key(name, model_type)
        if key is None:
            continue
        start, end = described["data_offsets"]
        dtype = _FILE_DTYPES.get(described["dtype"])
        if dtype is None:
            raise ConfigError(f"{file}: {name} has dtype {described['dtype']}, which no expert can have")
        path = name.rpartition(".")[0]
        place = _Place(file, header["data"] + start, tuple(described["shape"]), dtype, path)
        if place.nbytes != end - start or header["data"] + end > header["size"]:
            raise ConfigError(f"{file}: {name} does not fit in its file")
        yield key, place


def _key(name: str, model_type: str) -> tuple[int, int | None, str] | None:
    """Return (layer, expert or None for a stacked tensor, part) of an expert's tensor, None for any other."""
    if found := _STACKED.match(name):
        if found[4] not in _PARTS:
            raise ConfigError(f"{name}: experts with a {found[4]} cannot run remotely")
        return int(found[2]), None, f"{found[3]}.{found[4]}"
    found = _SINGLE.match(name)
    projection = _SINGLE_NAMES.get(model_type, {}).get(found[4]) if found else None
    return (int(found[2]), int(found[3]), f"{projection}.{found[5]}") if found and projection else None


def _group(
    places: Mapping[tuple[int, int | None, str], _Place], config: Mapping[str, Any]
) -> Iterator[tuple[int, ExpertLayer]]:
    for layer in sorted({layer for layer, _, _ in places}):
        own = {key: place for key, place in places.items() if key[0] == layer}
        parts, experts = {}, set()
        for (_, expert, name), place in sorted(own.items(), key=lambda item: item[0][2]):
            parts[name] = Part(place.shape[1:] if expert is None else place.shape, place.dtype)
            experts |= set(range(place.shape[0])) if expert is None else {expert}
        missing = [name for name in PROJECTIONS if f"{name}.weight" not in parts]
        if missing or experts != set(range(len(experts))):
            raise ConfigError(f"layer {layer} has an incomplete set of experts ({', '.join(missing) or 'a gap'})")
        path = next(place.path for (_, _, name), place in own.items() if name == "gate_proj.weight")
        yield layer, _layer(layer, len(experts), parts, _quantization(parts, path, config))


def _quantization(parts: Mapping[str, Part], path: str, config: Mapping[str, Any]) -> Quantization | None:
    if "gate_proj.scales" not in parts:
        return None
    settings = config.get("quantization") or config.get("quantization_config") or {}
    own = settings.get(path)
    chosen = own if isinstance(own, dict) else settings
    if "bits" not in chosen or "group_size" not in chosen:
        raise ConfigError(f"config.json does not say how {path} is quantised")
    return Quantization(int(chosen["group_size"]), int(chosen["bits"]), str(chosen.get("mode", "affine")))


def _sizes(headers: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    return [
        f"{file.name}:{header['size']}:{json.dumps(header['tensors'], sort_keys=True)}"
        for file, header in sorted(headers.items())
    ]


def _identity(model_type: str, layers: Mapping[int, ExpertLayer], weights: list[str]) -> str:
    described = [str(attrs.asdict(layer)) for _, layer in sorted(layers.items())]
    return hashlib.sha256("\n".join([model_type, *described, *weights]).encode()).hexdigest()[:32]
