"""Tiny random models of many families, built in memory: for tests, trials and machines without a model.

The same name and seed give the same weights in every process, so two daemons agree without a file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import mlx.core as mx

from pdplane.engine.text import MlxTokenizer
from pdplane.engine.untyped import (
    HuggingFaceTokenizer,
    Network,
    make_network,
    parameters,
    quantise_network,
    replace_parameters,
    wrap_tokenizer,
)
from pdplane.errors import ConfigError

VOCAB_SIZE = 320
BOS_ID, EOS_ID = 0, 1
_SPREAD = 0.3  # wide enough that greedy output varies instead of repeating one token

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 4096, "tie_word_embeddings": True, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID,
}  # fmt: skip

_MOE: Mapping[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    # Heads of 64, so that the KV cache can be quantised in groups of 64 or 32.
    "llama": {"model_type": "llama", "head_dim": 64},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe", **_MOE},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2,
                "tie_word_embeddings": False},
    # A sliding and a full layer in turn; the window is small enough for short prompts to wrap it.
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 2,
               "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 16},
    "mamba2": {"model_type": "mamba2", "num_heads": 4, "head_dim": 32, "state_size": 16, "ssm_state_size": 16,
               "conv_kernel": 4, "n_groups": 1, "expand": 2, "use_bias": False, "use_conv_bias": True,
               "time_step_limit": [0.0, 1e9], "time_step_rank": "auto", "time_step_min": 0.001, "time_step_max": 0.1,
               "layer_norm_epsilon": 1e-5, "chunk_size": 32},
    "lfm2": {"model_type": "lfm2", "num_hidden_layers": 4, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
             "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
             "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3],
             "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "qwen3_next": {"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 2, **_MOE,
                   "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
                   "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "head_dim": 32,
                   "shared_expert_intermediate_size": 64, "partial_rotary_factor": 0.5},
    # Latent attention: one head, and keys and values of unequal widths.
    "deepseek_v3": {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_shared_experts": 1,
                    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 32,
                    "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    # An attention cache and a state-space cache side by side in each layer.
    "falcon_h1": {"model_type": "falcon_h1", "attention_bias": False, "mamba_d_ssm": 64, "mamba_n_heads": 4,
                  "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4,
                  "mamba_chunk_size": 32, "mamba_expand": 1},
}  # fmt: skip

_WEIGHTS: Mapping[str, tuple[mx.Dtype, Mapping[str, int] | None]] = {
    "f32": (mx.float32, None),
    "bf16": (mx.bfloat16, None),
    "q4": (mx.float32, {"group_size": 32, "bits": 4}),
}
_SENTENCE = "the quick brown fox jumps over the lazy dog and the cat; prefill sends blocks to decode."
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@attrs.frozen(eq=False)
class Tiny:
    """A tiny model in memory."""

    network: Network
    config: Mapping[str, Any]
    tokenizer: MlxTokenizer


def build_tiny(name: str, seed: int = 0) -> Tiny:
    """Build `FAMILY`, `FAMILY-f32`, `FAMILY-bf16` or `FAMILY-q4` on the MLX thread; `@N` behind it gives it N layers.

    Raises ConfigError, which lists the families.
    """
    kind, _, layers = name.partition("@")
    family, _, weights = kind.partition("-")
    if family not in FAMILIES:
        raise ConfigError(f"unknown tiny family {family!r}; known: {', '.join(sorted(FAMILIES))}")
    if (weights or "f32") not in _WEIGHTS:
        raise ConfigError(f"unknown tiny weights {weights!r}; known: {', '.join(_WEIGHTS)}")
    dtype, quantization = _WEIGHTS[weights or "f32"]
    config = {**_COMMON, **FAMILIES[family], "tiny": name, "seed": seed} | _depth(family, layers)
    if quantization is not None:
        config["quantization"] = dict(quantization)
    mx.random.seed(seed)  # some families draw their time constants while they are made
    network = make_network(config["model_type"], config)
    _draw_weights(network, dtype, seed)
    if quantization is not None:
        _quantise(name, network, quantization)
    network.eval()
    mx.eval(network.parameters())
    return Tiny(network, config, _tokenizer())


def _depth(family: str, layers: str) -> dict[str, int]:
    if not layers:
        return {}
    if "layer_types" in FAMILIES[family] or not re.fullmatch(r"[1-9][0-9]{0,2}", layers):
        raise ConfigError(f"tiny model {family!r} cannot have {layers!r} layers")
    return {"num_hidden_layers": int(layers)}


def _quantise(name: str, network: Network, quantization: Mapping[str, int]) -> None:
    try:
        quantise_network(network, group_size=quantization["group_size"], bits=quantization["bits"])
    except ValueError as error:
        raise ConfigError(f"tiny model {name!r} cannot be quantised: {' '.join(str(error).split())}") from error


def _draw_weights(network: Network, dtype: mx.Dtype, seed: int) -> None:
    names = sorted(name for name, _ in parameters(network))
    order = {name: number for number, name in enumerate(names)}

    def draw(name: str, weight: mx.array) -> mx.array:
        if not mx.issubdtype(weight.dtype, mx.floating):
            return weight
        if weight.ndim < 2:
            return weight.astype(dtype)
        key = mx.random.key(seed * 1_000_003 + order[name])  # a key a tensor: the order does not matter
        return (mx.random.normal(weight.shape, key=key) * _SPREAD).astype(dtype)

    replace_parameters(network, draw)


@functools.cache
def _tokenizer() -> MlxTokenizer:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    make: Callable[..., HuggingFaceTokenizer] = PreTrainedTokenizerFast

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator([_SENTENCE] * 3, trainer)
    inner = make(tokenizer_object=fast, bos_token="<s>", eos_token="</s>", chat_template=_TEMPLATE)
    return MlxTokenizer(wrap_tokenizer(inner, [EOS_ID]))
