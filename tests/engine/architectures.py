"""Every architecture of the installed mlx-lm with a small config, and the table of what pdplane does with it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import attrs
import mlx_lm.models
from mlx_lm.models.cache import make_prompt_cache

from pdplane.engine.batch import why_alone
from pdplane.engine.tiny import FAMILIES
from pdplane.errors import ConfigError
from tests.engine.pair import Pair, options, prompt_of

WINDOW = 32
_LAYERS = 4
_MIXED = ["sliding_attention", "full_attention"] * 2
_LINEAR = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}
_YARN = {"rope_type": "default", "rope_theta": 10000.0}

SMALL: Mapping[str, Any] = {
    "vocab_size": 320, "num_vocab": 320, "embedding_size": 320, "vocab_size_per_layer_input": 320,
    "hidden_size": 128, "n_embd": 128, "model_dim": 128, "d_model": 128, "hidden_dim": 128, "block_dim": 128,
    "num_hidden_layers": _LAYERS, "n_layer": _LAYERS, "n_layers": _LAYERS, "num_layers": _LAYERS,
    "num_transformer_layers": _LAYERS,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "swa_num_attention_heads": 4,
    "num_swa_attention_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "n_kv_heads": 2, "swa_num_key_value_heads": 2,
    "num_swa_key_value_heads": 2, "num_attention_groups": 2, "n_shared_head": 2,
    "head_dim": 32, "v_head_dim": 32, "swa_head_dim": 32, "swa_v_head_dim": 32, "global_head_dim": 32,
    "kv_channels": 32, "hidden_size_per_head": 32,
    "intermediate_size": 64, "n_inner": 64, "mlp_hidden_size": 64, "ffn_hidden_size": 64, "ff_intermediate_size": 64,
    "intermediate_size_mlp": 64, "dense_intermediate_size": 64, "shared_intermediate_size": 64, "block_ff_dim": 64,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 32, "share_expert_dim": 32, "moe_hidden_size": 32,
    "moe_shared_intermediate_size": 32,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "zero_expert_num": 2,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_k": 2, "moe_top_k": 2, "top_k_experts": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "num_shared_expert": 1, "moe_num_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "num_expert_group": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "num_dense_layers": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "moe_routed_scaling_factor": 1.0, "expert_layer_offset": 1, "expert_layer_period": 2,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 16, "o_lora_rank": 16,
    "index_head_dim": 32, "index_n_heads": 2, "index_topk": 16, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "sliding_window": WINDOW, "sliding_window_size": WINDOW, "sliding_window_pattern": 2, "window_size": WINDOW,
    "attention_window_size": WINDOW, "attention_chunk_size": WINDOW, "loop_window_size": WINDOW, "conv_window": 2,
    "sliding_window_layers": [0, 2], "layer_types": _MIXED, "full_attn_idxs": [1, 3], "full_attention_idx": [1, 3],
    "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "post_norm_eps": 1e-5, "group_norm_size": 2,
    "rope_theta": 10000.0, "rotary_emb_base": 10000, "rope_local_base_freq": 10000.0, "swa_rope_theta": 10000.0,
    "rope_parameters": _YARN, "rotary_pct": 0.5, "partial_rotary_factor": 0.5, "rotary_dim": 8,
    "max_position_embeddings": 4096, "n_positions": 512, "n_ctx": 512, "block_size": 4096, "model_max_length": 4096,
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "use_bias": False, "bias": False,
    "use_qk_norm": True, "qk_norm": True, "post_norm": True, "use_conv_bias": True, "conv_bias": False,
    "hidden_act": "silu",
    "conv_L_cache": 3, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
    "conv_kernel": 4, "conv1d_width": 4, "linear_conv_kernel_dim": 4, "short_conv_kernel_size": 4, "n_groups": 1,
    "state_size": 16, "ssm_state_size": 16, "time_step_rank": 4, "time_step_limit": [0.0, 1e9], "time_step_min": 1e-3,
    "time_step_max": 0.1, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_expand": 1, "mamba_d_ssm": 64,
    "mamba_chunk_size": 32, "mamba_proj_bias": False, "mamba_conv_bias": True,
    "attn_layer_offset": 1, "attn_layer_period": 2, "full_attention_interval": 2, "layer_group_size": 2,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_allow_neg_eigval": True, "linear_attn_config": _LINEAR,
    "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16,
    "use_expert_bias": True, "logits_scaling": 1.0, "attention_multiplier": 0.2, "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0, "logits_soft_cap": 30.0, "dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0,
    "final_logit_softcapping": 30.0, "output_multiplier": 1.0, "gegelu_limit": 20.0, "query_pre_attn_scalar": 32,
    "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "num_kv_reuse_layers": 1,
    "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
    "laurel_rank": 16, "activation_sparsity_pattern": [0.0] * _LAYERS,
    "attention_method": "MLA", "zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "emb_neighbor_num": 2, "emb_split_num": 2, "ngram_vocab_size_ratio": 4,
    "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0, 1, 0], "mla_use_nope": False, "use_mixed_mlp_moe": True,
    "use_cla": True, "cla_share_factor": 2, "dense_attention_every_n_layers": 2,
}  # fmt: skip
"""Values by the names of the fields; a field without one keeps its default."""

_L4 = {**_YARN, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
_STATES = ["mamba", "attention"] * 2

SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "baichuan_m1": {"tie_word_embeddings": False},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"is_moe_layer": [False, True] * 2},
    "gemma3n": {"model_type": "gemma3n_text"},
    "granitemoehybrid": {"layer_types": _STATES},
    "hunyuan": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "kimi_k3": {"hidden_act": "situ", "mla_use_nope": True},
    "llama": {"layer_types": None},
    "pixtral": {"layer_types": None, "model_type": "llama"},
    "llama4": {"model_type": "llama4_text", "rope_scaling": None, "num_experts_per_tok": 1},
    "mellum": {"rope_parameters": dict.fromkeys(_MIXED, _YARN)},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0] * 2, "moe_layer_freq": [0, 1] * 2},
    "minicpm3": {"rope_scaling": {"short_factor": [1.0] * 16, "long_factor": [1.0] * 16}},
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1] * 2, "index_block_size": 8, "index_topk_blocks": 4, "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
    },
    "ministral3": {"rope_parameters": _L4},
    "mistral3": {"model_type": "ministral3", "rope_parameters": _L4},
    "mistral4": {"rope_parameters": _L4},
    "muse_spark": {"num_shared_experts": 0, "layer_rope_theta": [1e4, 0.0] * 2},
    "nemotron-nas": {
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * _LAYERS,
    },
    "nemotron_h": {"layer_types": None, "hybrid_override_pattern": ["M", "*", "E", "-"], "moe_latent_size": None},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "prism_hadamard_qwen35": {
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [{"path": "model.layers.0.mlp.up_proj", "embedding": False, "dtype": "float16", "block": 0}],
    },
    "spark2_5": {"hidden_act": "gelu", "rope_parameters": dict.fromkeys(_MIXED, _YARN)},
    "openelm": {
        "num_query_heads": [4] * _LAYERS, "num_kv_heads": [2] * _LAYERS, "ffn_multipliers": [1.0] * _LAYERS,
        "ffn_dim_divisor": 16,
    },
}  # fmt: skip
"""What an architecture needs beside or in place of `SMALL`."""

INNER: Mapping[str, str] = {
    "gemma3": "gemma3_text", "gemma4": "gemma4_text", "lfm2-vl": "lfm2", "mistral3": "ministral3", "pixtral": "llama",
    "qwen2_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_5_moe": "qwen3_5",
}  # fmt: skip
"""Where the fields of `text_config` stand, if in another module."""

_TEXTS = ("TextArgs", "TextConfig", "TextModelArgs")


def architectures() -> list[str]:
    """Return the names of mlx-lm's modules that have a model."""
    files = Path(next(iter(mlx_lm.models.__path__))).glob("*.py")
    return sorted(file.stem for file in files if "\nclass Model(" in file.read_text())


def small_config(name: str) -> dict[str, Any]:
    """Return a small config of an architecture."""
    special = SPECIAL.get(name, {})
    made = _filled(_module(name).ModelArgs, special)
    if "text_config" in made:
        module = _module(INNER.get(name, name))
        kind = next(found for found in (getattr(module, text, None) for text in (*_TEXTS, "ModelArgs")) if found)
        made["text_config"] = {"model_type": INNER.get(name, name), **_filled(kind, special)}
    return {**made, "model_type": name}


def _filled(kind: type, special: Mapping[str, Any]) -> dict[str, Any]:
    assert is_dataclass(kind)
    made: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in special:
            made[field.name] = special[field.name]
        elif field.name in SMALL:
            made[field.name] = SMALL[field.name]
        elif field.name == "text_config":
            made[field.name] = None
        elif field.default is MISSING and field.default_factory is MISSING and field.name != "model_type":
            made[field.name] = False
    return made


def _module(name: str) -> Any:  # noqa: ANN401
    return importlib.import_module(f"mlx_lm.models.{name}")


# ---- What pdplane does with each


LENGTHS = (1, 8, 9, 25, WINDOW + 1, 3 * WINDOW + 1)
"""At the borders of blocks (8) and chunks (24), behind a window and behind three of them."""
_SHOWN = 110  # letters of a reason
_LONG = 45  # new tokens: rings wrap, states go on


@attrs.frozen
class Verdict:
    """One architecture's line of the table."""

    identical: str
    quantised: str = ""
    batched: str = ""
    reuse: str = ""
    split: str = ""

    def line(self, name: str) -> str:
        return f"| `{name}` | {self.identical} | {self.quantised} | {self.batched} | {self.reuse} | {self.split} |"


def small_pair(name: str, **changes: int) -> Pair:
    """Return two engines with a small model of an architecture. Raises ConfigError for one that is refused."""
    family = f"all_{re.sub('[^a-z0-9]', '_', name.lower())}"
    FAMILIES[family] = {"tie_word_embeddings": True} | small_config(name)  # type: ignore[index]
    return Pair(attrs.evolve(options(f"tiny:{family}"), kv_group_size=32, **changes))


def judge(name: str) -> Verdict:
    """Compare two engines with one mlx-lm process, bit for bit. Raises AssertionError where a bit differs."""
    try:
        pair = small_pair(name)
    except ConfigError as error:
        return Verdict(_reason(error))
    except SystemExit:
        return Verdict("refused: mlx-lm's module ends the process, since it needs another package")
    try:
        _compare(pair)
        opened = pair.decode.opened
        alone = why_alone(pair.decode.thread.call(lambda: make_prompt_cache(opened.model.network)))
        plain = {leaf.cache_class.__name__ for leaf in opened.leaves} == {"KVCache"}
        shard = hasattr(opened.model.network, "shard")
        states = not all(leaf.kind.is_history for leaf in opened.leaves)
        split = "no: mlx-lm cannot" if not shard else "no: states" if states else "yes"
        return Verdict(
            "yes", _quantised(name), f"no: {alone}" if alone else "yes", "yes" if plain else "no: states", split
        )
    finally:
        pair.close()


def _quantised(name: str) -> str:
    try:
        pair = small_pair(name, kv_bits=8)
    except ConfigError as error:
        return _reason(error)
    try:
        _compare(pair, (25, 3 * WINDOW + 1))
    finally:
        pair.close()
    return "yes"


def _compare(pair: Pair, lengths: Sequence[int] = LENGTHS) -> None:
    for length in lengths:
        pair.check(prompt_of(length), max_tokens=3)
    pair.check(prompt_of(30), max_tokens=_LONG)


def _reason(error: ConfigError) -> str:
    text = re.sub(r"model 'tiny:all_\w+' ", "", str(error)).replace("|", "/")
    return f"refused: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"


def main() -> None:
    """Write the table into the page, an architecture a process, since one of them may crash it."""
    page = Path(__file__).parents[2] / "docs/models.md"
    text = page.read_text()
    begin = text.index("| --- |")
    head = text[: text.index("\n", begin) + 1]
    lines = []
    for name in architectures():
        code = f"from tests.engine.architectures import judge; print(judge({name!r}).line({name!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        lines.append(done.stdout.splitlines()[-1])
        sys.stderr.write(f"{name}\n")
    page.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
