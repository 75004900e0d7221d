"""Tiny models as files."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from pdplane.engine.model import Model, load_model
from pdplane.engine.untyped import parameters


def save_directory(folder: Path, name: str = "llama") -> Model:
    """A tiny model as an mlx-lm directory."""
    model = load_model(f"tiny:{name}")
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(parameters(model.network)), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(dict(model.config)))
    model.tokenizer._inner.save_pretrained(folder)
    return model


def save_gguf(file: Path) -> Model:
    """A tiny llama as a GGUF file: other names, and rotary rows interleaved."""
    model = load_model("tiny:llama")
    config = model.config
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "model.layers.": "blk.",
    }  # fmt: skip
    tensors = {}
    for name, weight in parameters(model.network):
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for projection, count in heads.items():
            if projection in name:
                halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = weight
    inner = model.tokenizer._inner
    fast = json.loads(inner.backend_tokenizer.to_str())["model"]
    texts = sorted(fast["vocab"], key=fast["vocab"].get)
    integer = lambda value: mx.array(value, dtype=mx.uint32)  # noqa: E731
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": integer(config["hidden_size"]),
        "llama.attention.head_count": integer(config["num_attention_heads"]),
        "llama.attention.head_count_kv": integer(config["num_key_value_heads"]),
        "llama.attention.key_length": integer(config["head_dim"]),
        "llama.attention.layer_norm_rms_epsilon": mx.array(config["rms_norm_eps"]),
        "llama.rope.freq_base": mx.array(config["rope_theta"]),
        "llama.block_count": integer(config["num_hidden_layers"]),
        "llama.feed_forward_length": integer(config["intermediate_size"]),
        "llama.context_length": integer(config["max_position_embeddings"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": mx.array([3, 3] + [1] * (len(texts) - 2), dtype=mx.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in fast["merges"]],
        "tokenizer.ggml.bos_token_id": integer(0),
        "tokenizer.ggml.eos_token_id": integer(1),
        "tokenizer.chat_template": inner.chat_template,
    }
    mx.save_gguf(str(file), tensors, metadata)
    return model
