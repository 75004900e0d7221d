"""Token-major layouts equal what legacy engines publish for the same model, every byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdplane import wire
from pdplane.errors import ConfigError
from pdplane.kv.planning import AttentionLayer, CacheLayer, LatentLayer, token_major_layout

CASES = json.loads((Path(__file__).parents[1] / "vectors/legacy/model_layouts.json").read_text())


def _layers(model: dict[str, Any]) -> list[CacheLayer]:
    count, dtype = model["num_layers"], model["dtype"]
    if model["kind"] == "mla":
        width = model["kv_lora_rank"] + model["qk_rope_head_dim"]
        return [LatentLayer(layer, width, dtype) for layer in range(count)]
    kinds = model["layer_types"] or ["full_attention"] * count
    windows = {"full_attention": None, "sliding_attention": model["sliding_window"]}
    return [
        AttentionLayer(layer, model["num_kv_heads"], model["head_dim"], dtype, windows[kind])
        for layer, kind in enumerate(kinds)
    ]


def test_there_are_nine_cases() -> None:
    assert len(CASES) == 9


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_every_byte_equals_the_legacy_contract(case: dict[str, Any]) -> None:
    model = case["input"]
    layout = token_major_layout(
        _layers(model),
        block_tokens=model["block_tokens"],
        num_lcm_blocks=model["num_lcm_blocks"],
        tp_size=model["tp_size"],
    )
    assert wire.encode_layout(layout) == json.dumps(case["expected"], separators=(",", ":")).encode()


def _attention(layer: int, *, heads: int = 2, window: int | None = None) -> AttentionLayer:
    return AttentionLayer(layer, heads, 4, "float32", window)


def test_more_ranks_than_heads_repeat_them() -> None:
    layout = token_major_layout([_attention(0)], block_tokens=4, num_lcm_blocks=1, tp_size=4)
    assert [field.shape for field in layout.fields] == [(4, 1, 4), (4, 1, 4)]


def test_each_of_several_windows_is_a_group() -> None:
    layers = [_attention(layer, window=window) for layer, window in enumerate([16, None, 8, 16])]
    layout = token_major_layout(layers, block_tokens=4, num_lcm_blocks=1)
    specs = [(spec.group_id, spec.retention, spec.sliding_window_tokens) for spec in layout.group_specs]
    assert specs == [
        ("sliding_attention_16", "sliding_window", 16),
        ("full_attention", "full_history", None),
        ("sliding_attention_8", "sliding_window", 8),
    ]
    keys = [(field.group_id, field.field_id, field.plane_id) for field in layout.fields if field.field_id.endswith("k")]
    assert keys == [
        ("full_attention", "layer.1.k", "unit.0.k"),
        ("sliding_attention_16", "layer.0.k", "unit.0.k"),
        ("sliding_attention_8", "layer.2.k", "unit.0.k"),
        ("sliding_attention_16", "layer.3.k", "unit.1.k"),
    ]


@pytest.mark.parametrize(
    ("layers", "tp_size", "reason"),
    [
        ([_attention(0, heads=3)], 2, "3 KV heads cannot be split over 2 ranks"),
    ],
    ids=["uneven heads"],
)
def test_what_legacy_engines_cannot_have(layers: list[CacheLayer], tp_size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        token_major_layout(layers, block_tokens=4, num_lcm_blocks=1, tp_size=tp_size)
