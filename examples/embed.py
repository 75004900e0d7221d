"""Move blocks of a numpy arena from a prefill plane to a decode plane: the library in one file, without MLX.

    python examples/embed.py

Prefill and decode would be two processes, usually on two machines; here both live in one.
"""

import numpy as np
import numpy.typing as npt

from pdplane import (
    Arena,
    DecodeConfig,
    DecodePlane,
    FieldId,
    FieldSpec,
    GroupId,
    GroupSpec,
    Pool,
    PrefillConfig,
    PrefillPlane,
    blocks_needed,
    build_manifest,
    new_room,
    plan_layout,
)

BLOCK_TOKENS, PROMPT_LEN = 16, 100
KV = GroupId("kv")

# One block: the keys and values of 16 tokens in two layers, 4 heads of 64 numbers each. The arena holds 64 blocks.
layout = plan_layout(
    [GroupSpec(KV, "full_history", BLOCK_TOKENS, 1, transfer_policy="full_suffix")],
    [
        FieldSpec(KV, FieldId(f"layer.{layer}.{name}"), "arena", (4, BLOCK_TOKENS, 64), "float16")
        for layer in range(2)
        for name in ("k", "v")
    ],
    num_lcm_blocks=64,
    prefix_granularity=BLOCK_TOKENS,
)


def pages(arena: Arena, blocks: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """The bytes of some blocks, field by field."""
    ids = np.array(blocks, np.uint64)
    return np.concatenate(
        [
            arena.bytes[int(offset) :][: field.payload_bytes]
            for field in layout.fields
            for offset in layout.page_offsets(field.field_id, ids)
        ]
    )


def main() -> None:
    source, target = Arena.zeros(layout.arena_bytes), Arena.zeros(layout.arena_bytes)
    source.bytes[:] = np.random.default_rng(1).integers(0, 256, source.nbytes, np.uint8)  # "the computed cache"
    need = blocks_needed(layout, PROMPT_LEN)
    with (
        PrefillPlane(PrefillConfig(bootstrap_port=0), layout=layout, arena=source) as prefill,
        DecodePlane(DecodeConfig(), layout=layout, arena=target) as decode,
    ):
        room = new_room()
        # Decode lends blocks to the room and asks the prefill behind this rendezvous to fill them.
        blocks = Pool(layout).allocate(need)
        manifest = build_manifest(layout, blocks, prefix_len=0, prompt_len=PROMPT_LEN)
        waiting = decode.open(room, prefill=prefill.rendezvous, manifest=manifest)

        # Prefill hears what decode wants, computes, pushes, and says what the first token is.
        work = prefill.open(room, prompt_len=PROMPT_LEN)
        window = work.wait_window(timeout_s=30)
        print(f"decode wants tokens {window.prefix_len} to {window.prompt_len}")
        computed = {KV: tuple(range(50, 50 + need[KV]))}
        work.push(computed, steps=range(1))  # layer 0 ...
        work.push(computed, steps=range(1, 2))  # ... and layer 1
        work.finish(first_token=42, logprob=-0.12)

        # Every byte has landed, and none will land any more: the blocks are decode's again.
        delivered = waiting.wait(timeout_s=30)
        same = bool((pages(source, computed[KV]) == pages(target, blocks[KV])).all())
        print(f"first token {delivered.first_token}, logprob {delivered.logprob}, bytes equal: {same}")


if __name__ == "__main__":
    main()
