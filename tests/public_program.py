"""A program of an embedder's that uses every public signature: mypy and pyright read it, the tests run it.

It imports nothing but the public names. One process plays both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdplane import (
    Arena,
    ArenaMemory,
    Cause,
    ConfigError,
    DecodeConfig,
    DecodePlane,
    DecodeRoom,
    Delivered,
    Destination,
    Endpoint,
    EventsLost,
    Field,
    FieldId,
    FieldSpec,
    Fingerprint,
    Generation,
    Group,
    GroupId,
    GroupSpec,
    HttpThread,
    InternalError,
    Layout,
    Life,
    LocalProtocolError,
    Manifest,
    ManifestGroup,
    OnLanded,
    Partition,
    PdplaneError,
    Plane,
    PlaneEvent,
    Pool,
    PoolExhausted,
    PrefillConfig,
    PrefillPlane,
    PrefillRoom,
    ProtocolError,
    RemoteProtocolError,
    Room,
    RoomDelivered,
    RoomEnded,
    RoomFailed,
    RoomOffered,
    RoomReleased,
    RoomSucceeded,
    RoomWindow,
    RoomWindowed,
    Secret,
    SessionId,
    Tls,
    TransportOptions,
    WaitTimeout,
    Why,
    WireError,
    blocks_needed,
    build_manifest,
    hash_prompt,
    new_room,
    plan_layout,
)

KV, KEYS = GroupId("kv"), FieldId("layer.0.k")
PROMPT = range(40)
Blocks = Mapping[GroupId, Sequence[int]]


def plan() -> Layout:
    layout = plan_layout(
        [GroupSpec(KV, "full_history", 16, 1, transfer_policy="full_suffix")],
        [FieldSpec(group_id=KV, field_id=KEYS, plane_id="keys", shape=(2, 16, 8), dtype="float16")],
        num_lcm_blocks=8,
        prefix_granularity=16,
        packing={KV: 1},
        partitions=[(KEYS, Partition(axis=0, global_extent=2, global_parts=()))],
        alignment=64,
    )
    group: Group = layout.group(KV)
    plane: Plane = layout.plane("keys")
    field: Field = layout.field(KEYS)
    spec: GroupSpec = layout.spec(KV)
    partition: Partition | None = layout.partition(KEYS)
    offsets: npt.NDArray[np.uint64] = layout.page_offsets(KEYS, np.array([1], np.uint64))
    assert group.page_count == 9
    assert plane.bytes_per_lcm_block == field.page_stride_bytes
    assert spec.block_granularity == 16
    assert partition is not None
    assert int(offsets[0]) == plane.bytes_per_lcm_block
    return layout


def arenas(layout: Layout) -> tuple[Arena, Arena]:
    memory: ArenaMemory = np.zeros(layout.arena_bytes, np.float16)
    wrapped, own = Arena(memory), Arena.zeros(layout.arena_bytes)
    within = Arena.within(bytearray(layout.arena_bytes + 4096), layout.arena_bytes)
    _base: int = within.base
    _huge: bool = own.gather_pages()
    return wrapped, own


def configs(secret_file: Path, rendezvous: Endpoint | str | None = None) -> tuple[PrefillConfig, DecodeConfig]:
    secret = Secret.from_file(secret_file)
    options = TransportOptions(streams=2)
    encrypted = TransportOptions(tls=Tls(cert=secret_file, key=secret_file, ca=secret_file))
    assert encrypted.tls is not None
    prefill = PrefillConfig(
        host="127.0.0.1",
        advertise_host=None,
        tp_size=1,
        tp_rank=0,
        secret=secret,
        bootstrap_port=0,
        rendezvous=rendezvous,
        transport="tcp",
        transport_options=options,
        record_events=True,
        max_rooms=16,
    )
    return prefill, DecodeConfig(secret=secret, transport="tcp", bootstrap_timeout_s=30, record_events=True)


def lend(pool: Pool, layout: Layout) -> tuple[Blocks, Manifest]:
    blocks = pool.allocate(blocks_needed(layout, len(PROMPT), prefix_len=0))
    manifest = build_manifest(layout, blocks, prefix_len=0, prompt_len=len(PROMPT))
    first: ManifestGroup = manifest.groups[0]
    assert first.group_id == KV
    return blocks, manifest


def push(room: PrefillRoom, source: Blocks) -> Future[None]:
    window: RoomWindow = room.wait_window(timeout_s=30)
    destination: Destination = window.destinations[0]
    _whose: tuple[SessionId, Generation] = (destination.session, destination.generation)
    complete: dict[GroupId, range] = room.slots(range(32))
    assert complete == {KV: range(2)}
    room.push(source, steps=range(1), chunk=range(32))
    room.push(source, steps=range(1), chunk=range(32, window.prompt_len))
    return room.finish(first_token=7, logprob=-0.5, candidates=[7, 8], cached_tokens=0)


async def both(work: PrefillRoom, waiting: DecodeRoom, source: Blocks) -> Delivered:
    """With asyncio: every waiting step is a future that can be wrapped; only `push` reads memory, on this thread."""
    await asyncio.wait_for(asyncio.wrap_future(work.window), 30)
    await asyncio.wrap_future(push(work, source))
    delivered = await asyncio.wait_for(asyncio.wrap_future(waiting.done), 30)
    await asyncio.wrap_future(waiting.released)
    return delivered


def told(event: PlaneEvent) -> str:
    """In a scheduler's step loop."""
    match event:
        case RoomWindowed(room, _ticket, window):
            return f"{room} wants {window.prefix_len} to {window.prompt_len}"
        case RoomOffered(room, _ticket):
            return f"{room} is offered"
        case RoomDelivered(room, _ticket, delivered):
            return f"{room} begins with {delivered.first_token}"
        case RoomSucceeded(room, _ticket) | RoomReleased(room, _ticket):
            return f"{room} goes on"
        case RoomEnded(room, _ticket, error):
            return f"{room} failed: {blame(error)}"
        case EventsLost(count):
            return f"{count} events are lost"


def blame(error: PdplaneError) -> str:
    why: Why = error.why
    if why.cause is Cause.CANCELLED:
        return f"nobody: {why.text}"
    match error:
        case WaitTimeout() | RoomFailed():
            return f"room {error.room}"
        case WireError() | RemoteProtocolError():
            return "a peer"
        case LocalProtocolError() | ConfigError() | PoolExhausted() | ProtocolError():
            return "the caller"
        case InternalError():
            return "pdplane"
        case _:
            return "nobody"


def main(secret_file: Path) -> list[str]:
    layout = plan()
    source, target = arenas(layout)
    source.bytes[:] = 1
    prefill_config, decode_config = configs(secret_file)
    fingerprint = Fingerprint(required=(("model", "m"),), advisory=(("blas", "none"),))
    http, pool, landed = HttpThread(), Pool(layout), []
    on_landed: OnLanded = lambda offsets, lengths: landed.append((offsets, lengths))  # noqa: E731  (to say its type)
    with (
        PrefillPlane(prefill_config, layout=layout, arena=source, fingerprint=fingerprint, http=http) as prefill,
        DecodePlane(decode_config, layout=layout, arena=target, fingerprint=fingerprint, http=http) as decode,
    ):
        where: Endpoint = prefill.rendezvous
        _lives: tuple[Life, Life, SessionId] = (prefill.life, decode.life, decode.session)
        room: Room = new_room()
        prompt_hash = hash_prompt(PROMPT)
        blocks, manifest = lend(pool, layout)
        waiting: DecodeRoom = decode.open(
            room, prefill=where, manifest=manifest, prompt_hash=prompt_hash, on_landed=on_landed
        )
        work: PrefillRoom = prefill.open(room, prompt_len=len(PROMPT), prompt_hash=prompt_hash)
        delivered = asyncio.run(both(work, waiting, {KV: (3, 4, 5)}))
        assert (delivered.first_token, delivered.logprob, delivered.candidates) == (7, -0.5, (7, 8))
        work.released.result(30)
        pool.release(blocks)
        decode.decline(new_room(), prefill=str(where), prompt_hash=prompt_hash, text="no blocks", cause=Cause.FULL)
        prefill.open(new_room()).cancel("not needed")
        assert prefill.ready
        assert prefill.alive
        assert decode.alive
        _counts: dict[str, object] = decode.statistics() | prefill.statistics()
        said = [told(event) for event in (*prefill.poll(), *decode.poll())]
        decode.close("the work is done")
    http.close()
    return [line.replace(str(room), "the room") for line in said if line.startswith(str(room))]
