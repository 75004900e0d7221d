"""Loading a model by any of its names. Runs on the MLX thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import mlx.core as mx

from pdplane.engine.options import Progress, no_progress
from pdplane.engine.sources import Form, converted_folder, smollm2_folder
from pdplane.engine.text import MlxTokenizer
from pdplane.engine.tiny import build_tiny
from pdplane.engine.untyped import Network, check_config, load_folder_tokenizer, load_network, parameters
from pdplane.errors import ConfigError

logger = logging.getLogger(__name__)

TINY = "tiny:"
SMOLLM2: Mapping[str, Form] = {"smollm2": "packed", "smollm2-f32": "float32"}


_LENGTHS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "max_context_length", "n_ctx",
)  # fmt: skip
_STRETCHING = frozenset({"linear", "dynamic", "yarn", "deepseek_yarn"})
"""Kinds of rope scaling that make the config's length longer; the others' lengths are told as they are at the end."""
_STRETCHED_ALREADY = ("gemma3",)
"""Families whose configs tell the length behind such a scaling."""


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
    asked_context: int | None = None
    """The longest sequence to take, if not the config's."""
    agree: Callable[[mx.array], mx.array] = _as_it_is
    """Makes one step's token the same on every rank that the model is split over."""

    @property
    def context_length(self) -> int | None:
        """The longest sequence to take: as asked, else as the config says, rope scaling included, else None."""
        if self.asked_context is not None:
            return self.asked_context
        for config in self._configs:
            if length := _first_number(config, _LENGTHS):
                return _stretched(config, length)
        return None

    @property
    def vocab_size(self) -> int:
        """The number that all token ids are below."""
        found = (_first_number(config, ("vocab_size",)) for config in self._configs)
        return next((size for size in found if size), None) or self.tokenizer.vocab_size

    @property
    def _configs(self) -> tuple[Mapping[str, Any], ...]:
        inner = self.config.get("text_config")
        return (self.config, inner) if isinstance(inner, Mapping) else (self.config,)

    def limited(self, context_length: int | None) -> Model:
        """Return the model with another longest sequence. Raises ConfigError where it has no positions for it."""
        if context_length is not None:
            for name, array in parameters(self.network):
                if name.endswith("wpe.weight") and array.shape[0] < context_length:
                    raise ConfigError(
                        f"model {self.name!r} has learned positions for {array.shape[0]} tokens, "
                        f"not for {context_length} (--context-length)"
                    )
        return attrs.evolve(self, asked_context=context_length)


def _first_number(config: Mapping[str, Any], keys: Sequence[str]) -> int | None:
    return next((config[key] for key in keys if isinstance(config.get(key), int) and config[key] > 0), None)


def _stretched(config: Mapping[str, Any], length: int) -> int:
    """Return a config's length after its rope scaling, which families write in two ways and for all layers or some."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, Mapping) or str(config.get("model_type", "")).startswith(_STRETCHED_ALREADY):
        return length
    for told in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        factor = told.get("factor")
        if told.get("rope_type", told.get("type")) in _STRETCHING and isinstance(factor, int | float):
            begun = told.get("original_max_position_embeddings")
            length = max(length, int((begun if isinstance(begun, int | float) else length) * factor))
    return length


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
    with _reading(name, folder / "tokenizer*.json"):
        return MlxTokenizer(load_folder_tokenizer(folder))


def _download(name: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    progress(f"download {name}", 0, 0)
    try:
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot download model {name!r} from the hub: {one_line(error)}") from error


def _load_folder(name: str, path: Path, progress: Progress, prepare: Prepare | None) -> Model:
    progress(f"load {name}", 0, 1)
    weights = path / "model*.safetensors"
    with _reading(name, path / "config.json"):
        check_config(path)
    with _reading(name, weights):
        network, config = load_network(path)
    with _reading(name, path / "tokenizer*.json"):
        tokenizer = MlxTokenizer(load_folder_tokenizer(path, config.get("eos_token_id")))
    model = Model(name, network, tokenizer, config, path)
    if prepare is not None:
        prepare(model)
    with _reading(name, weights):
        mx.eval(network.parameters())
    progress(f"load {name}", 1, 1)
    return model


@contextlib.contextmanager
def _reading(name: str, part: Path) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:  # files may make the libraries raise anything, one family ends the process
        raise ConfigError(f"cannot load model {name!r} from {part}: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Return what an error of a library says; its traceback is logged at debug."""
    logger.debug("%s", error, exc_info=error)
    text = " ".join(str(error).split())
    if not text or not isinstance(error, OSError | RuntimeError | ValueError):
        text = f"{type(error).__name__}: {text}"  # a KeyError's text alone says nothing
    return text if len(text) <= 300 else text[:297] + "..."
