"""An engine's own memory as the arena: one allocation a layer, pages sent layer by layer in the caller's order."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt
import pytest

from pdplane import (
    Arena,
    ConfigError,
    DecodeConfig,
    DecodePlane,
    FieldId,
    FieldSpec,
    GroupId,
    GroupSpec,
    Layout,
    Plane,
    PrefillConfig,
    PrefillPlane,
    build_manifest,
    plan_layout,
)
from tests.plane.conftest import SHORT
from tests.waiting import PATIENCE_S, until

KV = GroupId("kv")
LAYERS, BLOCKS, TOKENS, WIDTH = 12, 6, 4, 8  # as text, layer 10 comes before layer 2
IDS = [FieldId(f"layer.{number}.kv") for number in range(LAYERS)]

Tensor = npt.NDArray[np.float32]


def tensors(fill: bool) -> list[Tensor]:
    """One allocation a layer, [block, token, width]; a layer's numbers are its own."""
    shape = (BLOCKS, TOKENS, WIDTH)
    return [np.full(shape, 100.0 + number if fill else 0.0, np.float32) for number in range(LAYERS)]


def spread(caches: list[Tensor]) -> tuple[Arena, Layout]:
    """The layers where they lie, without a copy; their block 0 is the null block."""
    arena = Arena.spanning(caches)
    planes = [Plane(name, cache[0].nbytes, arena.offset_of(cache)) for name, cache in zip(IDS, caches, strict=True)]
    return arena, _plan(planes)


def _plan(planes: list[Plane]) -> Layout:
    return plan_layout(
        [GroupSpec(KV, "full_history", TOKENS, 1, transfer_policy="full_suffix")],
        [FieldSpec(KV, name, name, (TOKENS, WIDTH), "float32") for name in IDS],
        num_lcm_blocks=BLOCKS - 1,
        prefix_granularity=TOKENS,
        planes=planes,
    )


@pytest.mark.parametrize("transport", ["tcp", "unix", "pull"])
def test_layers_of_several_allocations_arrive_step_by_step(transport: str, opened: contextlib.ExitStack) -> None:
    ours, theirs = tensors(fill=True), tensors(fill=False)
    (source, source_layout), (target, target_layout) = spread(ours), spread(theirs)
    settings = SHORT | {"transport": transport}
    prefill = PrefillPlane(PrefillConfig(bootstrap_port=0, **settings), layout=source_layout, arena=source)
    decode = DecodePlane(DecodeConfig(**settings), layout=target_layout, arena=target)
    for plane in (prefill, decode):
        opened.enter_context(plane)
    manifest = build_manifest(target_layout, {KV: (2, 4)}, prefix_len=0, prompt_len=7)
    waiting = decode.open(1, prefill=prefill.rendezvous, manifest=manifest)
    work = prefill.open(1)
    work.wait_window(PATIENCE_S)
    for step in range(LAYERS):
        work.push({KV: (5, 1)}, steps=range(step, step + 1))
        until(lambda: prefill.statistics()["pushes"] == 0, "the acknowledgement")
        assert [bool(cache.any()) for cache in theirs] == [number <= step for number in range(LAYERS)]
    work.finish(first_token=1)
    waiting.wait(PATIENCE_S)
    for mine, yours in zip(ours, theirs, strict=True):
        assert (yours[[2, 4]] == mine[[5, 1]]).all()
        assert not yours[[0, 1, 3, 5]].any()


def test_a_plane_that_leaves_its_allocation_is_refused() -> None:
    caches = tensors(fill=False)
    arena, layout = spread(caches)
    beyond = [Plane(p.plane_id, p.bytes_per_lcm_block, p.arena_offset_bytes) for p in layout.planes]
    last = max(beyond, key=lambda plane: plane.arena_offset_bytes)
    beyond[beyond.index(last)] = Plane(last.plane_id, last.bytes_per_lcm_block, last.arena_offset_bytes + 4)
    with pytest.raises(ConfigError, match=f"plane '{last.plane_id}', .* does not lie in one allocation"):
        DecodePlane(DecodeConfig(), layout=_plan(beyond), arena=arena)


def test_one_sided_transports_need_one_allocation() -> None:
    arena, layout = spread(tensors(fill=False))
    for config in ({"transport": "mooncake"}, {"legacy_transport": "mooncake"}):
        with pytest.raises(ConfigError, match="mooncake needs an arena of one allocation"):
            DecodePlane(DecodeConfig(**config), layout=layout, arena=arena)
