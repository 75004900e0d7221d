"""Calls of mlx, mlx-lm and transformers that have no types there, with types."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn
import mlx.utils
from jinja2 import TemplateError
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper, _byte_decoder
from mlx_lm.utils import _get_classes, load_config, load_model, load_tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template

from pdplane.errors import ConfigError

Cache: TypeAlias = Any
"""One of mlx-lm's cache objects."""
Network: TypeAlias = Any
"""An `mlx.nn.Module`, called with (tokens, cache=...) it gives logits."""
HuggingFaceTokenizer: TypeAlias = Any
Wrapper: TypeAlias = Any
"""mlx-lm's wrapper around a tokenizer."""
Processor: TypeAlias = Callable[[mx.array, mx.array], mx.array]
"""One of mlx-lm's logits processors: tokens and logits of shape (1, vocabulary) to other logits."""

_nn: Any = mlx.nn
_utils: Any = mlx.utils
_mx: Any = mx
_maybe_quantize: Any = maybe_quantize_kv_cache
_load_model: Any = load_model
_load_config: Any = load_config
_classes: Any = _get_classes
_load_tokenizer: Any = load_tokenizer
_wrapper: Any = TokenizerWrapper
_plain_tokenizer: Any = PreTrainedTokenizerBase
_compiled_template: Any = _compile_jinja_template
_LONGEST_CHAT = 1 << 25
_bytes_of_letters: Any = _byte_decoder
_BAD_CONVERSATION = (
    TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""The errors of templates: raised on purpose, or by messages that they were not made for."""


def make_network(model_type: str, config: Mapping[str, object]) -> Network:
    """Return a new network of one of mlx-lm's families."""
    family: Any = importlib.import_module(f"mlx_lm.models.{model_type}")
    return family.Model(family.ModelArgs.from_dict(dict(config)))


def parameters(network: Network) -> Iterator[tuple[str, mx.array]]:
    """Yield every weight by its dotted name."""
    yield from _utils.tree_flatten(network.parameters())


def replace_parameters(network: Network, replace: Callable[[str, mx.array], mx.array]) -> None:
    """Replace every weight by `replace(name, weight)`."""
    network.update(_utils.tree_map_with_path(replace, network.parameters()))


def save_weights(file: Path, network: Network) -> None:
    """Write every weight to a file that mlx-lm loads."""
    mx.save_safetensors(str(file), dict(parameters(network)), {"format": "mlx"})


def quantise_network(network: Network, *, group_size: int, bits: int) -> None:
    """Quantise every layer that can be. Raises ValueError when a width does not divide."""
    _nn.quantize(network, group_size=group_size, bits=bits)


def check_config(folder: Path) -> None:
    """Read a folder's config as mlx-lm does. Raises what mlx-lm raises."""
    config = _load_config(folder)
    if "model_file" not in config:  # else the network's loader refuses the program
        _classes(config)[1].from_dict(config)


def load_network(folder: Path) -> tuple[Network, dict[str, Any]]:
    """Return the network and its config; the weights stay in their files until first used. Raises as mlx-lm."""
    network, config = _load_model(folder, lazy=True)
    return network, config


def load_folder_tokenizer(folder: Path, eos_ids: object = None) -> Wrapper:
    """Return mlx-lm's tokenizer wrapper. Raises what mlx-lm raises."""
    return _load_tokenizer(folder, eos_token_ids=eos_ids)


def wrap_tokenizer(inner: HuggingFaceTokenizer, eos_ids: Sequence[int]) -> Wrapper:
    """Return mlx-lm's wrapper around a tokenizer that comes from no folder."""
    return _wrapper(inner, eos_token_ids=list(eos_ids))


def render_chat(
    wrapper: Wrapper,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    settings: Mapping[str, Any],
) -> str:
    """Return a conversation as the model's template writes it, up to the next answer. Raises ConfigError."""
    given = {"tools": list(tools) if tools else None, **settings}
    try:
        if not _written_by_program(wrapper):
            text = wrapper._tokenizer.get_chat_template(None, given["tools"])
            _compiled_template(text).environment.concat = _joined
        return str(wrapper.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **given))
    except _BAD_CONVERSATION as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"messages: the model's chat template refuses them: {reason}") from error


def encode_chat(wrapper: Wrapper, text: str) -> Sequence[int]:
    """Return the tokens of a conversation that `render_chat` wrote, made as mlx-lm's wrapper makes them."""
    inner = wrapper._tokenizer
    if _written_by_program(wrapper):
        encoded: Sequence[int] = inner.encode(text, add_special_tokens=False)
    else:  # some tokenizers' `encode` is not what a template's text goes through
        encoded = inner(text, add_special_tokens=False)["input_ids"]
    return encoded


def _written_by_program(wrapper: Wrapper) -> bool:
    """Return whether a program of mlx-lm's, or of the tokenizer's class, stands in for the template."""
    own: object = type(wrapper._tokenizer).apply_chat_template
    return wrapper._chat_template is not None or own is not _plain_tokenizer.apply_chat_template


def _joined(pieces: Iterable[str]) -> str:
    """Return what a template writes, as Jinja joins it. Raises TemplateError once it is too long for any model."""
    written, length = [], 0
    for piece in pieces:
        written.append(piece)
        length += len(piece)
        if length > _LONGEST_CHAT:
            raise TemplateError(f"they become more than {_LONGEST_CHAT} characters")
    return "".join(written)


def plain_chat(messages: Sequence[Mapping[str, Any]], roles: Mapping[str, str] | None) -> str:
    """Return a conversation as mlx-lm's server writes it for a model without a template."""
    from mlx_lm.server import convert_chat  # two seconds, for few models

    convert: Any = convert_chat
    return str(convert(list(messages), dict(roles) if roles else None))


def special_tokens(inner: HuggingFaceTokenizer) -> dict[int, str]:
    """Return tokens that mark places and are no text, by id."""
    return {int(token): str(added.content) for token, added in inner.added_tokens_decoder.items() if added.special}


def spelling(inner: HuggingFaceTokenizer) -> Callable[[int], bytes]:
    """Return how this vocabulary spells its tokens in bytes: by letters for bytes, or as SentencePiece does."""
    added = {int(token): str(found.content).encode() for token, found in inner.added_tokens_decoder.items()}
    decoder = getattr(getattr(inner, "backend_tokenizer", None), "decoder", None)
    letters: Mapping[str, int] = _bytes_of_letters() if decoder and b"ByteLevel" in decoder.__getstate__() else {}

    def spell(token: int) -> bytes:
        if token in added:
            return added[token]
        piece = inner.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""  # the model has more rows than the tokenizer has tokens
        if letters and all(letter in letters for letter in piece):
            return bytes(letters[letter] for letter in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()

    return spell


def load_gguf(file: Path) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Return tensors and metadata of a GGUF file. Raises RuntimeError or ValueError when it is damaged."""
    tensors, metadata = _mx.load(str(file), format="gguf", return_metadata=True)
    return tensors, metadata


def evaluate_later(*arrays: mx.array) -> None:
    """Start computing without waiting."""
    _mx.async_eval(*arrays)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run mlx-lm's compiled functions without compiling them, with the same result.

    A compiled function makes a new kernel for each new value of its numbers (a temperature, a bound): on the CPU that
    takes a C++ compiler seconds, during which no sequence gets a token.
    """
    if "MLX_DISABLE_COMPILE" in os.environ:
        yield
        return
    _mx.disable_compile()
    try:
        yield
    finally:
        _mx.enable_compile()


def queue_depth() -> int:
    """Return how many parts of a graph this device works on without its caller: 2 on a GPU, 1 on the CPU."""
    return 1 if _mx.default_device().type == _mx.DeviceType.cpu else 2


def number(array: mx.array) -> int | float:
    """Wait for a scalar array and return its value."""
    value = array.item()
    if isinstance(value, complex):
        raise TypeError("a complex scalar")
    return value


def numbers_in(array: mx.array) -> list[float]:
    """Wait for an array of one axis and return its values."""
    values = array.tolist()
    if not isinstance(values, list):
        raise TypeError("a scalar")
    return [float(value) for value in values if isinstance(value, (int, float))]


def quantise_caches(caches: list[Cache], *, group_size: int, bits: int | None) -> None:
    """Replace every plain cache by a quantised one, as mlx-lm does after each step; nothing when `bits` is None."""
    _maybe_quantize(caches, quantized_kv_start=0, kv_group_size=group_size, kv_bits=bits)


def clear_streams() -> None:
    """End the calling thread's streams; its arrays can be read afterwards, but nothing more be computed from them."""
    _mx.clear_streams()


def mlx_version() -> str:
    return str(_mx.__version__)
