"""Legacy pages carry the same cache: the same ids and bits, tokens in their order, refusals with their reasons."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pdplane.engine.prefill import MlxPrefillEngine
from pdplane.engine.token_pages import ring_of
from pdplane.errors import ConfigError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import Layout
from tests.engine.pair import BLOCK_TOKENS, STEP_SIZE, Pair, options, prompt_of

WINDOW = 32  # of the tiny gemma3
LENGTHS = [1, BLOCK_TOKENS - 3, STEP_SIZE + 1, WINDOW, WINDOW + 1, 3 * WINDOW, 257]
MODELS = ["tiny:llama", "tiny:llama-bf16", "tiny:gemma3", "tiny:gemma3-bf16", "tiny:deepseek_v3"]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(options(request.param, page_layout="nhd"))
    yield found
    found.close()


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_one_process(pair: Pair, length: int) -> None:
    pair.check(prompt_of(length), max_tokens=WINDOW + 3 if length == 3 * WINDOW else 4)


def test_the_groups_are_those_of_legacy_engines() -> None:
    with MlxPrefillEngine(options("tiny:gemma3", page_layout="nhd")) as engine:
        layout = engine.layout
    assert [spec.group_id for spec in layout.group_specs] == ["sliding_attention", "full_attention"]
    assert [spec.sliding_window_tokens for spec in layout.group_specs] == [WINDOW, None]
    assert {field.shape for field in layout.fields} == {(BLOCK_TOKENS, 2, 16)}
    assert {field.group_id: field.field_id for field in reversed(layout.fields)} == {
        "sliding_attention": "layer.0.k",
        "full_attention": "layer.1.k",
    }


def test_a_latent_lies_beside_its_rotary_keys() -> None:
    with MlxPrefillEngine(options("tiny:deepseek_v3", page_layout="nhd")) as engine:
        assert [(f.field_id, f.plane_id, f.shape) for f in engine.layout.fields] == [
            ("layer.0.latent_kv", "slot.0", (BLOCK_TOKENS, 1, 48)),
            ("layer.1.latent_kv", "slot.1", (BLOCK_TOKENS, 1, 48)),
        ]


@pytest.mark.parametrize("model", ["tiny:llama", "tiny:gemma3"])
def test_a_page_holds_the_tokens_of_its_slot_in_order(model: str) -> None:
    """Both page layouts of one prompt, compared where a token must be."""
    length = 2 * WINDOW + 5
    prompt = prompt_of(length)
    pages = {}
    for layout in ("hnd", "nhd"):
        with MlxPrefillEngine(options(model, page_layout=layout)) as engine:
            blocks = {group: tuple(range(1, count + 1)) for group, count in engine.blocks_needed(length).items()}
            blocks = _apart(engine.layout, blocks)
            engine.prefill(prompt, blocks, lambda steps, chunk: None).result(60)
            pages[layout] = engine.layout, blocks, engine.arena.bytes.copy()
    full = 1 if model == "tiny:gemma3" else 0
    ours = _rows(*pages["nhd"], GroupId("full_attention"), FieldId(f"layer.{full}.k"))
    native = _rows(*pages["hnd"], GroupId("kv"), FieldId(f"layer.{full}.k"), head_major=True)
    assert np.array_equal(ours[:length], native[:length])
    if model == "tiny:gemma3":
        ours = _rows(*pages["nhd"], GroupId("sliding_attention"), FieldId("layer.0.v"))
        layout, blocks, arena = pages["hnd"]
        offset = int(layout.page_offsets(FieldId("layer.0.ring_v"), np.array(blocks[GroupId("state")], np.uint64))[0])
        ring = arena[offset : offset + 4 * 2 * WINDOW * 16].view(np.float32).reshape(2, WINDOW, 16)
        first = (length - WINDOW + 1) // BLOCK_TOKENS * BLOCK_TOKENS
        for row, token in enumerate(ring_of(length, WINDOW, STEP_SIZE).tokens):
            if token >= first:
                assert np.array_equal(ours[token - first], ring[:, row])


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("tiny:mamba2", "layer 0 keeps a recurrent state"),
        ("tiny:qwen3_next", "layer 0 keeps a recurrent state"),
        ("tiny:falcon_h1", "layer 0 keeps several caches"),
    ],
)
def test_what_legacy_pages_cannot_express(model: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MlxPrefillEngine(options(model, page_layout="nhd")).start()


def test_a_quantised_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantised"):
        options("tiny:llama", page_layout="nhd", kv_bits=8)


def test_an_unknown_page_layout() -> None:
    with pytest.raises(ConfigError, match="hnd, nhd"):
        options("tiny:llama", page_layout="dhn")


def _apart(layout: Layout, blocks: dict[GroupId, tuple[int, ...]]) -> dict[GroupId, tuple[int, ...]]:
    """Ids of other parents for each group: equal ids of two groups may be the same bytes."""
    shifted, parents = {}, 0
    for group, ids in blocks.items():
        packing = layout.group(group).cache_blocks_per_lcm_block
        shifted[group] = tuple(block + parents * packing for block in ids)
        parents += -(-len(ids) // packing)
    return shifted


def _rows(
    layout: Layout,
    blocks: dict[GroupId, tuple[int, ...]],
    arena: np.ndarray,
    group: GroupId,
    name: FieldId,
    *,
    head_major: bool = False,
) -> np.ndarray:
    """All rows of a float32 field in token order, shape (tokens, heads, width)."""
    field, found = layout.field(name), []
    for offset in layout.page_offsets(name, np.array(blocks[group], np.uint64)).tolist():
        page = arena[offset : offset + field.payload_bytes].view(np.float32).reshape(field.shape)
        found.append(page.swapaxes(0, 1) if head_major else page)
    return np.concatenate(found)
