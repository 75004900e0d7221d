"""Loading a model by any of its names. Runs on the MLX thread."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from pdplane.engine.options import Progress, no_progress
from pdplane.engine.sources import Form, converted_folder, smollm2_folder
from pdplane.engine.text import MlxTokenizer
from pdplane.engine.tiny import build_tiny
from pdplane.engine.untyped import Network, load_folder, load_folder_tokenizer
from pdplane.errors import ConfigError

TINY = "tiny:"
SMOLLM2: Mapping[str, Form] = {"smollm2": "packed", "smollm2-f32": "float32"}


def _as_it_is(token: mx.array) -> mx.array:
    return token


@attrs.frozen(eq=False)
class Model:
    """A loaded model; `path` is None for a tiny one, which has no files."""

    name: str
    network: Network
    tokenizer: MlxTokenizer
    config: Mapping[str, Any]
    path: Path | None
    agree: Callable[[mx.array], mx.array] = _as_it_is
    """Makes one step's token the same on every rank that the model is split over."""

    @property
    def context_length(self) -> int | None:
        """The longest sequence the model was made for; None when its config does not say."""
        return self._number("max_position_embeddings")

    @property
    def vocab_size(self) -> int:
        """The number that all token ids are below."""
        return self._number("vocab_size") or self.tokenizer.vocab_size

    def _number(self, key: str) -> int | None:
        for config in (self.config, self.config.get("text_config") or {}):
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        return None


Prepare = Callable[[Model], None]
"""Changes a model's network before its weights are read; called on the MLX thread."""


def load_model(name: str, *, seed: int = 0, progress: Progress = no_progress, prepare: Prepare | None = None) -> Model:
    """Load a directory, hub id, `.gguf` file, `smollm2`, `smollm2-f32` or `tiny:FAMILY[-f32|-bf16|-q4]`.

    `prepare` is called with the model before its weights are read; what it removes from the network is never read.
    Raises ConfigError with one line that says what is wrong.
    """
    if name.startswith(TINY):
        tiny = build_tiny(name.removeprefix(TINY), seed)
        model = Model(name, tiny.network, tiny.tokenizer, tiny.config, None)
        if prepare is not None:
            prepare(model)
        return model
    return _load_folder(name, model_folder(name, progress), progress, prepare)


def model_folder(name: str, progress: Progress = no_progress) -> Path:
    """Return the folder of a model that is not a tiny one, fetched or converted first where that is needed.

    Raises ConfigError.
    """
    if name in SMOLLM2:
        return smollm2_folder(progress, SMOLLM2[name])
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        return converted_folder(path, progress)
    if path.is_dir():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ConfigError(f"model {name!r} is no directory, .gguf file, hub id (owner/name), smollm2 or tiny:FAMILY")
    return _download(name, progress)


def load_tokenizer(name: str, *, progress: Progress = no_progress) -> MlxTokenizer:
    """Return a model's tokenizer without its weights. Raises ConfigError."""
    if name.startswith(TINY):
        return build_tiny(name.removeprefix(TINY)).tokenizer
    folder = model_folder(name, progress)
    try:
        wrapper = load_folder_tokenizer(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot load the tokenizer of model {name!r}: {_one_line(error)}") from error
    return MlxTokenizer(wrapper)


def _download(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    progress(f"download {name}", 0, 0)
    try:
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot download model {name!r} from the hub: {_one_line(error)}") from error


def _load_folder(name: str, path: Path, progress: Progress, prepare: Prepare | None) -> Model:
    progress(f"load {name}", 0, 1)
    try:
        network, wrapper, config = load_folder(path, lazy=prepare is not None)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot load model {name!r} from {path}: {_one_line(error)}") from error
    model = Model(name, network, MlxTokenizer(wrapper), config, path)
    if prepare is not None:
        prepare(model)
    mx.eval(network.parameters())
    progress(f"load {name}", 1, 1)
    return model


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
