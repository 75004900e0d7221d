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


@pytest.mark.parametrize(
    ("layers", "tp_size", "reason"),
    [
        ([_attention(0, heads=3)], 2, "3 KV heads cannot be split over 2 ranks"),
        ([_attention(0, window=8), _attention(1, window=16)], 1, "one sliding window"),
    ],
    ids=["uneven heads", "two windows"],
)
def test_what_legacy_engines_cannot_have(layers: list[CacheLayer], tp_size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        token_major_layout(layers, block_tokens=4, num_lcm_blocks=1, tp_size=tp_size)
