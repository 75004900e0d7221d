"""Which blocks of a room are ready after a chunk of the prompt, and where they stand in decode's manifest.

A *producer step* is a layer of the target model; the layers behind it (a draft model's) are produced together, as
one last step. A chunk completes the blocks that its end has passed; the last one also completes the block that the
prompt ends in, and every snapshot. Source of the rules: legacy_peer.md section 9.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdplane.errors import LocalProtocolError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import FULL_SUFFIX, GroupSpec, Layout
from pdplane.kv.manifest import check_window, logical_slots

COUNTER_MODULUS = 2**62


def producer_steps(layout: Layout, target_layers: int) -> tuple[tuple[FieldId, ...], ...]:
    """Field ids by producer step: one step a target layer, one more for all layers behind them.

    Raises LocalProtocolError unless the layout has that many layers.
    """
    steps = layout.steps
    if not 1 <= target_layers <= len(steps):
        raise LocalProtocolError(f"{target_layers} target layers are outside 1..{len(steps)}, those of the layout")
    rest = tuple(field for step in steps[target_layers:] for field in step)
    return steps[:target_layers] + ((rest,) if rest else ())


def chunk_positions(spec: GroupSpec, prefix_len: int, prompt_len: int, chunk: range) -> range:
    """Which of a group's blocks in the manifest are complete with the tokens of `chunk` and were not before.

    Positions count from the manifest's first block of the group. A room's first chunk begins at `prefix_len` at
    the latest: what came before it in a cache of ours belongs to it. Lengths as in a valid manifest.
    """
    slots = logical_slots(spec, prefix_len, prompt_len)
    count, final = max(0, slots.stop - slots.start), chunk.stop == prompt_len
    if spec.transfer_policy != FULL_SUFFIX:
        return range(count if final else 0)
    tokens = spec.block_granularity
    end = -(-chunk.stop // tokens) if final else chunk.stop // tokens
    first = min(count, max(0, chunk.start // tokens - slots.start))
    return range(first, max(first, min(count, end - slots.start)))


def chunk_blocks(
    layout: Layout, blocks: Mapping[GroupId, Sequence[int]], prefix_len: int, prompt_len: int, chunk: range
) -> dict[GroupId, Sequence[int]]:
    """The part of each group's blocks (all of a manifest's, in slot order) that this chunk completes.

    Raises LocalProtocolError for a window that no manifest has, or a chunk outside it.
    """
    check_chunk(layout, prefix_len, prompt_len, chunk)
    found: dict[GroupId, Sequence[int]] = {}
    for spec in layout.group_specs:
        positions = chunk_positions(spec, prefix_len, prompt_len, chunk)
        found[spec.group_id] = blocks[spec.group_id][positions.start : positions.stop]
    return found


def check_chunk(layout: Layout, prefix_len: int, prompt_len: int, chunk: range) -> None:
    """Raise LocalProtocolError unless `chunk` is a part of the prompt of a possible window."""
    check_window(layout, prefix_len, prompt_len)
    if not 0 <= chunk.start < chunk.stop <= prompt_len or chunk.step != 1:
        raise LocalProtocolError(f"the tokens {chunk.start}..{chunk.stop} are no chunk of a prompt of {prompt_len}")


def is_past(counter: int, step: int) -> bool:
    """Whether a step counter that wraps around at `COUNTER_MODULUS` is strictly past a step."""
    return 0 < (counter - step) % COUNTER_MODULUS < COUNTER_MODULUS // 2
