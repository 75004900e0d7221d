"""A plane with its arena and its blocks, and one transfer between two of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from pdplane.ids import Endpoint, GroupId, new_room
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, blocks_needed, build_manifest
from pdplane.machine.actions import Delivered
from pdplane.messages import hash_prompt
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.plane.rooms import DecodeRoom, PrefillRoom
from pdplane.transport.fence import OnLanded
from tests.waiting import PATIENCE_S

Blocks = Mapping[GroupId, tuple[int, ...]]


def pages(layout: Layout, arena: Arena, blocks: Blocks) -> npt.NDArray[np.uint8]:
    """Every byte of the blocks' pages, field by field in slot order."""
    found = [
        arena.bytes[int(offset) : int(offset) + field.payload_bytes]
        for group_id, ids in sorted(blocks.items())
        for field in layout.fields_of(group_id)
        for offset in layout.page_offsets(field.field_id, np.array(ids, np.uint64))
    ]
    return np.concatenate(found)


@attrs.frozen
class PrefillSide:
    plane: PrefillPlane
    pool: Pool

    @property
    def rendezvous(self) -> Endpoint:
        return self.plane.rendezvous

    def fill(self, prompt_len: int, seed: int = 1) -> Blocks:
        """Blocks for a prompt, with random bytes in them: "the computed cache"."""
        blocks = self.pool.allocate(blocks_needed(self.plane.layout, prompt_len))
        self.plane.arena.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.plane.arena.nbytes, np.uint8)
        return blocks


@attrs.frozen
class DecodeSide:
    plane: DecodePlane
    pool: Pool

    def lend(self, prompt_len: int) -> tuple[Blocks, Manifest]:
        blocks = self.pool.allocate(blocks_needed(self.plane.layout, prompt_len))
        return blocks, build_manifest(self.plane.layout, blocks, prefix_len=0, prompt_len=prompt_len)


@attrs.frozen
class Meeting:
    """One room opened on both sides."""

    prefill: PrefillSide
    decode: DecodeSide
    work: PrefillRoom
    waiting: DecodeRoom
    target: Blocks
    prompt_len: int

    def serve(self, seed: int = 1) -> Delivered:
        """Push the whole cache, finish, compare every byte, give the blocks back."""
        self.work.wait_window(PATIENCE_S)
        source = self.prefill.fill(self.prompt_len, seed)
        self.work.push(source)
        self.work.finish(first_token=42, logprob=-0.125).result(PATIENCE_S)
        delivered = self.waiting.wait(PATIENCE_S)
        self.work.released.result(PATIENCE_S)
        sent = pages(self.prefill.plane.layout, self.prefill.plane.arena, source)
        assert (sent == pages(self.decode.plane.layout, self.decode.plane.arena, self.target)).all()
        self.prefill.pool.release(source)
        self.give_back()
        return delivered

    def give_back(self) -> None:
        self.decode.pool.release(self.target)


def meet(
    prefill: PrefillSide,
    decode: DecodeSide,
    *,
    room: int | None = None,
    prompt_len: int = 10,
    told: Mapping[str, Any] | None = None,
    on_landed: OnLanded | None = None,
) -> Meeting:
    """Open a room on both sides; `told` replaces what prefill is told of the prompt."""
    number = new_room() if room is None else room
    target, manifest = decode.lend(prompt_len)
    digest = hash_prompt(range(prompt_len))
    waiting = decode.plane.open(
        number, prefill=prefill.rendezvous, manifest=manifest, prompt_hash=digest, on_landed=on_landed
    )
    work = prefill.plane.open(number, **{"prompt_len": prompt_len, "prompt_hash": digest} | dict(told or {}))
    return Meeting(prefill, decode, work, waiting, target, prompt_len)
