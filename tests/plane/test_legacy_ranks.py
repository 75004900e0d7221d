"""Every tensor-parallel ratio and data-parallel groups, one side of the older generation."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from pdplane.ids import GroupId
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import blocks_needed, build_manifest
from pdplane.testing.legacy_peer import LegacyDecode, LegacyPrefill, LegacyRendezvous
from tests.plane.conftest import StartDecode, StartPrefill
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S, until

PROMPT = 10
RATIOS = [(1, 1), (2, 2), (2, 1), (1, 2), (4, 2), (4, 1)]
HEADS = 4


def layout_of(tp_size: int, heads: int = HEADS) -> Layout:
    """A rank's layout; with fewer heads than ranks, ranks hold copies, and some of them have nothing to send."""
    return two_group_layout(heads=max(1, heads // tp_size), total_heads=heads, num_lcm_blocks=16)


def whole(layout: Layout, arena: Arena, blocks: dict[GroupId, tuple[int, ...]]) -> list[npt.NDArray[np.uint8]]:
    """The rank's pages as arrays of elements, field by field."""
    found = []
    for group_id, ids in sorted(blocks.items()):
        for field in layout.fields_of(group_id):
            for offset in layout.page_offsets(field.field_id, np.array(ids, np.uint64)).tolist():
                page = arena.bytes[offset : offset + field.payload_bytes]
                found.append(page.reshape(*field.shape, field.element_bytes))
    return found


def joined(ranks: Sequence[tuple[Layout, Arena, dict[GroupId, tuple[int, ...]]]], heads: int = HEADS) -> list[bytes]:
    """What all ranks hold together, each page made whole along its partition."""
    layout = ranks[0][0]
    axes = [
        partition.axis if (partition := layout.partition(field.field_id)) else None
        for group_id, ids in sorted(ranks[0][2].items())
        for field in layout.fields_of(group_id)
        for _ in ids
    ]
    step = max(1, len(ranks) // heads)  # ranks that are copies of each other
    pages = [whole(*rank) for rank in ranks[::step]]
    assert all(axis is not None for axis in axes)
    return [np.concatenate(parts, axis=axis).tobytes() for axis, *parts in zip(axes, *pages, strict=True)]


def fill(arenas: Sequence[Arena], heads: int = HEADS) -> None:
    """Random bytes, the same for ranks that are copies of each other."""
    step = max(1, len(arenas) // heads)
    for rank, arena in enumerate(arenas):
        arena.bytes[:] = np.random.default_rng(rank // step).integers(0, 256, arena.nbytes, np.uint8)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), RATIOS)
def test_our_prefill_ranks_feed_legacy_decode_ranks(
    prefill_tp: int, decode_tp: int, heads: int, start_prefill: StartPrefill, opened: contextlib.ExitStack
) -> None:
    ranks = [start_prefill(layout_of(prefill_tp, heads), tp_size=prefill_tp)]
    for rank in range(1, prefill_tp):
        config = {"tp_size": prefill_tp, "tp_rank": rank, "rendezvous": ranks[0].rendezvous}
        ranks.append(start_prefill(layout_of(prefill_tp, heads), **config))
    layout = layout_of(decode_tp, heads)
    decodes = [opened.enter_context(LegacyDecode(layout, tp_size=decode_tp, tp_rank=rank)) for rank in range(decode_tp)]
    fill([rank.plane.arena for rank in ranks], heads)
    target = Pool(layout).allocate(blocks_needed(layout, PROMPT))
    contacts = [decode.offer(ranks[0].rendezvous, 7, target, prompt_len=PROMPT) for decode in decodes]
    works = [rank.plane.open(7) for rank in ranks]
    source = Pool(ranks[0].plane.layout).allocate(blocks_needed(ranks[0].plane.layout, PROMPT))
    for work in works:
        work.wait_window(PATIENCE_S)
        work.push(source)
        work.finish(first_token=42).result(PATIENCE_S)
    for decode, contact in zip(decodes, contacts, strict=True):
        assert decode.wait(7, contact).token == 42
    sent = joined([(rank.plane.layout, rank.plane.arena, source) for rank in ranks], heads)
    assert sent == joined([(layout, decode.arena, target) for decode in decodes], heads)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), RATIOS)
def test_legacy_prefill_ranks_feed_our_decode_ranks(
    prefill_tp: int, decode_tp: int, heads: int, start_decode: StartDecode, opened: contextlib.ExitStack
) -> None:
    http = opened.enter_context(LegacyRendezvous())
    ranks = [
        opened.enter_context(
            LegacyPrefill(layout_of(prefill_tp, heads), http.endpoint, tp_size=prefill_tp, tp_rank=rank)
        )
        for rank in range(prefill_tp)
    ]
    fill([rank.arena for rank in ranks], heads)
    layout = layout_of(decode_tp, heads)
    decodes = [start_decode(layout, tp_size=decode_tp, tp_rank=rank) for rank in range(decode_tp)]
    target = Pool(layout).allocate(blocks_needed(layout, PROMPT))
    manifest = build_manifest(layout, target, 0, PROMPT)
    rooms = [decode.plane.open(7, prefill=http.endpoint, manifest=manifest) for decode in decodes]
    source = Pool(ranks[0].layout).allocate(blocks_needed(ranks[0].layout, PROMPT))
    for rank in ranks:
        rank.serve(7, source)
    assert [room.wait(PATIENCE_S).first_token for room in rooms] == [42] * decode_tp
    sent = joined([(rank.layout, rank.arena, source) for rank in ranks], heads)
    assert sent == joined([(layout, decode.plane.arena, target) for decode in decodes], heads)


def test_rooms_go_to_their_group_of_our_prefill(start_prefill: StartPrefill, opened: contextlib.ExitStack) -> None:
    first = start_prefill(dp_size=2)
    groups = [first, start_prefill(dp_size=2, dp_rank=1, rendezvous=first.rendezvous)]
    decode = opened.enter_context(LegacyDecode(two_group_layout(num_lcm_blocks=16)))
    for room in (4, 5):
        blocks = Pool(decode.layout).allocate(blocks_needed(decode.layout, PROMPT))
        contact = decode.offer(first.rendezvous, room, blocks, prompt_len=PROMPT)
        work = groups[room % 2].plane.open(room)
        work.wait_window(PATIENCE_S)
        work.finish(first_token=room).result(PATIENCE_S)
        assert decode.wait(room, contact).token == room


def test_rooms_go_to_their_group_of_a_legacy_prefill(start_decode: StartDecode, opened: contextlib.ExitStack) -> None:
    http, layout = opened.enter_context(LegacyRendezvous()), two_group_layout(num_lcm_blocks=16)
    groups = [opened.enter_context(LegacyPrefill(layout, http.endpoint, dp_size=2, dp_rank=rank)) for rank in (0, 1)]
    decode = start_decode()
    source = Pool(layout).allocate(blocks_needed(layout, PROMPT))
    rooms = {}
    for number in (4, 5, 6):
        _, manifest = decode.lend(PROMPT)
        rooms[number] = decode.plane.open(number, prefill=http.endpoint, manifest=manifest)
    for number in (5, 4, 6):
        groups[number % 2].serve(number, source, token=number)
        assert rooms[number].wait(PATIENCE_S).first_token == number
    assert [len(group.registrations) for group in groups] == [1, 1]


def test_a_failed_word_of_an_idle_rank_ends_the_room(start_decode: StartDecode, opened: contextlib.ExitStack) -> None:
    """Its instance votes: an idle rank that fails the room fails it for all, whether the others say so or not."""
    http = opened.enter_context(LegacyRendezvous())
    ranks = [
        opened.enter_context(LegacyPrefill(layout_of(4, 2), http.endpoint, tp_size=4, tp_rank=rank))
        for rank in range(4)
    ]
    decode = start_decode(layout_of(1, 2))
    _, manifest = decode.lend(PROMPT)
    room = decode.plane.open(7, prefill=http.endpoint, manifest=manifest)
    idle = next(rank for rank in ranks if rank.wait(7)[0].blocks is None)
    idle.say(next(iter(idle.registrations.values())), [b"7", b"0", str(idle.tp_rank).encode(), b"-1", b""])
    until(room.done.done, "the room's end")
    assert "failed it" in str(room.done.exception())
    assert not room.released.done()
