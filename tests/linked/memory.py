"""A rank's arena as linked machines see it: who owns a block, which windows are open, what has landed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from pdplane.ids import FieldId, Generation, GroupId, Life, Rank, Room
from pdplane.kv.arena import Pool
from pdplane.kv.copies import Copies, window_runs
from pdplane.kv.layout import FULL_HISTORY, FULL_SUFFIX, LATEST_SNAPSHOT, STATE, U64, GroupSpec, Layout, Partition
from pdplane.kv.manifest import Manifest, blocks_needed
from pdplane.kv.planning import FieldSpec, plan_layout

KV, STATES = GroupId("kv"), GroupId("state")
BLOCK_TOKENS = 4
HEADS = 2

Blocks = Mapping[GroupId, Sequence[int]]


def linked_layout(tp_size: int, *, num_blocks: int = 12) -> Layout:
    """A small layout of one rank of `tp_size`: two layers of two heads, and a replicated state snapshot.

    With more ranks than heads the heads are held several times, so that some prefill ranks have nothing to send.
    """
    heads = max(1, HEADS // tp_size)
    specs = (
        GroupSpec(KV, FULL_HISTORY, BLOCK_TOKENS, 1, transfer_policy=FULL_SUFFIX),
        GroupSpec(
            STATES, FULL_HISTORY, family=STATE, transfer_policy=LATEST_SNAPSHOT, checkpoint_granularity=BLOCK_TOKENS
        ),
    )
    pages = [
        FieldSpec(KV, FieldId(f"layer.{layer}.{part}"), "main", (BLOCK_TOKENS, heads, 1), "uint8")
        for layer in range(2)
        for part in "kv"
    ]
    state = FieldSpec(STATES, FieldId("layer.1.ssm"), "main", (3,), "uint8")
    return plan_layout(
        specs,
        [*pages, state],
        num_lcm_blocks=num_blocks,
        prefix_granularity=BLOCK_TOKENS,
        partitions=tuple((page.field_id, Partition(1, HEADS)) for page in pages),
    )


@attrs.define
class Window:
    """What may land, and what has."""

    generation: Generation
    writers: Mapping[Rank, Life]
    open_bytes: np.ndarray[tuple[int], np.dtype[np.bool_]]
    landed: dict[Rank, int] = attrs.field(factory=dict)


class Memory:
    """One rank's arena. A landing outside an open window is refused; one into another's block is an AssertionError."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.bytes = np.zeros(layout.arena_bytes, np.uint8)
        self.pool = Pool(layout)
        self.windows: dict[Room, Window] = {}
        self._owned: dict[int, tuple[Blocks, U64]] = {}

    @property
    def owners(self) -> tuple[int, ...]:
        """The tickets that hold blocks."""
        return tuple(self._owned)

    def allocate(self, ticket: int, prefix_len: int, prompt_len: int) -> Blocks:
        """Blocks for the window's slots; PoolExhausted when there are too few."""
        blocks = self.pool.allocate(blocks_needed(self.layout, prompt_len, prefix_len))
        self._owned[ticket] = blocks, self._offsets(blocks)
        return blocks

    def fill(self, ticket: int, value: int) -> None:
        self.bytes[self._owned[ticket][1]] = value

    def values(self, ticket: int) -> set[int]:
        """Every byte that stands in the ticket's blocks."""
        return set(self.bytes[self._owned[ticket][1]].tolist())

    def release(self, ticket: int) -> None:
        """Give the ticket's blocks back, wiped; KeyError when it holds none."""
        blocks, offsets = self._owned.pop(ticket)
        self.bytes[offsets] = 0
        self.pool.release(blocks)

    def open(self, room: Room, generation: Generation, manifest: Manifest, writers: Mapping[Rank, Life]) -> None:
        assert room not in self.windows, f"room {room} has a window already"
        mask = np.zeros(len(self.bytes), np.bool_)
        for start, length in zip(*window_runs(self.layout, manifest), strict=True):
            mask[int(start) : int(start + length)] = True
        self.windows[room] = Window(generation, writers, mask)

    def close(self, room: Room, generation: Generation) -> None:
        window = self.windows.pop(room, None)
        assert window is not None, f"room {room} has no window to close"
        assert window.generation == generation, f"room {room} closes another generation's window"

    def admits(self, room: Room, generation: Generation, rank: Rank, life: Life, copies: Copies) -> bool:
        """Whether the fence lets these bytes of this writer in."""
        window = self.windows.get(room)
        if window is None or window.generation != generation or window.writers.get(rank) != life:
            return False
        return bool(window.open_bytes[_every_byte(copies.destination, copies.length)].all())

    def land(self, ticket: int, copies: Copies, source: Memory) -> None:
        """Copy into blocks that the ticket must own."""
        offsets = _every_byte(copies.destination, copies.length)
        assert ticket in self._owned, "bytes land in blocks that were given back"
        assert np.isin(offsets, self._owned[ticket][1]).all(), "bytes land in another room's blocks"
        self.bytes[offsets] = source.bytes[_every_byte(copies.source, copies.length)]

    def _offsets(self, blocks: Blocks) -> U64:
        found = [
            _every_byte(pages, np.full(len(pages), field.payload_bytes, np.uint64))
            for group_id, ids in blocks.items()
            for field in self.layout.fields_of(group_id)
            for pages in [self.layout.page_offsets(field.field_id, np.asarray(ids, np.uint64))]
        ]
        return np.concatenate(found)


def half(copies: Copies, which: int) -> Copies:
    """The first (0) or the second (1) half of the rows."""
    middle = len(copies.length) // 2
    rows = slice(0, middle) if which == 0 else slice(middle, None)
    return Copies(copies.source[rows], copies.destination[rows], copies.length[rows])


def _every_byte(starts: U64, lengths: U64) -> U64:
    runs = [np.arange(start, start + length, dtype=np.uint64) for start, length in zip(starts, lengths, strict=True)]
    return np.concatenate(runs) if runs else np.empty(0, np.uint64)
