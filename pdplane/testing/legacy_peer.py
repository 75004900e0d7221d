"""The older generation of peers, played for tests: both roles and their rendezvous, misbehaviour included.

    with LegacyDecode(layout) as decode:                      # beside your prefill
        contact = decode.offer(rendezvous, room, blocks, prompt_len=100)
        status = decode.wait(room, contact)

    with LegacyRendezvous() as http, LegacyPrefill(layout, http.endpoint) as prefill:     # beside your decode
        prefill.serve(room, source_blocks, token=42)

They are written from the description of that wire, not from our codecs, and step by step: nothing happens
that the caller did not ask for. `prefill.write`, `report` and `say` do any part of it, in any order, or wrongly.
"""

from __future__ import annotations

import ctypes
import json
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
import zmq

from pdplane import wire
from pdplane.errors import Cause, RoomFailed
from pdplane.ids import Endpoint, FieldId, Generation, GroupId, Rank, Room, SessionId, new_life
from pdplane.kv.arena import Arena
from pdplane.kv.copies import (
    contact_order,
    decode_ranks_served,
    expected_prefill_ranks,
    plan_block_copies,
    plan_route,
    window_runs,
)
from pdplane.kv.layout import GroupSpec, Layout
from pdplane.kv.manifest import build_manifest, chunk_blocks
from pdplane.testing.legacy_rendezvous import LegacyRendezvous, look_up, put_rank
from pdplane.transport.fence import Fence
from pdplane.transport.registry import is_one_sided, open_receiver

FAILED, TRANSFERRING, SUCCESS = 0, 4, 5
PATIENCE_S = 15.0

Frames = Sequence[bytes]


@attrs.frozen
class LegacyStatus:
    """What a legacy decode reads of a status; the rest of the frames stands in `frames`."""

    room: int
    code: int
    prefill_rank: int
    token: int
    candidates: tuple[int, ...]
    frames: tuple[bytes, ...]


@attrs.frozen
class Contact:
    """The prefill ranks of one address and group: the sockets to them, and those whose Success is expected."""

    pushes: Mapping[Rank, zmq.Socket[bytes]]
    expected: frozenset[Rank]


class LegacyDecode:
    """One rank with an arena; `with` opens its sockets. `transport` says how prefill's bytes reach the arena.

    A one-sided transport writes as between real peers; for the others a window of generation 0 is opened at each offer,
    since their receivers require one.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        transport: str = "tcp",
        host: str = "127.0.0.1",
        arena: Arena | None = None,
    ) -> None:
        self.layout, self.tp_size, self.tp_rank, self.host = layout, tp_size, tp_rank, host
        self.arena = arena or Arena.zeros(layout.arena_bytes)
        self.session = SessionId("")
        self._one_sided = is_one_sided(transport)
        self._fence = Fence(self.arena)
        self._receiver = open_receiver(
            transport,
            listen=Endpoint(host, 0),
            decode_life=new_life(),
            fence=self._fence,
            report=lambda report: None,
        )
        self._contacts: dict[tuple[Endpoint, int], Contact] = {}
        self._heard: list[LegacyStatus] = []

    def __enter__(self) -> Self:
        self.session = self._receiver.start(self.host)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self.port = self._pull.bind_to_random_port(f"tcp://{self.host}")
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.close()
        self._context.destroy(linger=0)

    # ---- what it sends

    def registration(self, **changes: bytes) -> list[bytes]:
        """Return the eight frames; a keyword replaces one (host, port, session, base, layout, tp_size, tp_rank)."""
        frames = {
            "marker": b"None",
            "host": self.host.encode(),
            "port": str(self.port).encode(),
            "session": self.session.encode(),
            "base": struct.pack("=Q", self.arena.base),
            "layout": wire.encode_layout(self.layout),
            "tp_size": str(self.tp_size).encode(),
            "tp_rank": str(self.tp_rank).encode(),
        }
        return list((frames | changes).values())

    def meet(self, rendezvous: Endpoint, room: int, **changes: bytes) -> Contact:
        """Look prefill up and register with its ranks, unless that was done before. Raises ConnectionError."""
        tp_size, group, layout_json, addresses = look_up(rendezvous, room)
        key = (rendezvous, group)
        if key not in self._contacts:
            layout = wire.decode_layout(layout_json)
            sizes = tp_size, self.tp_size, self.tp_rank
            pushes = {rank: self._connect(addresses[rank]) for rank in contact_order(layout, self.layout, *sizes)}
            self._contacts[key] = Contact(pushes, frozenset(expected_prefill_ranks(layout, self.layout, *sizes)))
            for push in pushes.values():
                push.send_multipart(self.registration(**changes))
        return self._contacts[key]

    def forget(self) -> None:
        """Close every connection, so that the next room looks up and registers again."""
        for contact in self._contacts.values():
            for push in contact.pushes.values():
                push.close()
        self._contacts.clear()

    def offer(
        self,
        rendezvous: Endpoint,
        room: int,
        blocks: Mapping[GroupId, Sequence[int]],
        *,
        prompt_len: int,
        prefix_len: int = 0,
    ) -> Contact:
        """Pre-allocate: the blocks to every rank that sends, an empty manifest to the others."""
        contact = self.meet(rendezvous, room)
        manifest = build_manifest(self.layout, blocks, prefix_len, prompt_len)
        if not self._one_sided:
            runs = window_runs(self.layout, manifest)
            self._fence.open(Room(room), Generation(0), *runs, writers=None)
        groups = [{"group_id": spec.group_id, "block_ids": list(blocks[spec.group_id])} for spec in self._specs]
        text = json.dumps({"groups": groups, "prefix_len": prefix_len, "prompt_len": prompt_len}, separators=(",", ":"))
        for rank, push in contact.pushes.items():
            manifest_frame = text.encode("ascii") if rank in contact.expected else b""
            push.send_multipart([str(room).encode(), self.session.encode(), manifest_frame])
        return contact

    # ---- what it receives

    def hear(self, timeout_s: float = PATIENCE_S) -> LegacyStatus:
        """Return the next status of any room. Raises TimeoutError."""
        if not self._pull.poll(int(max(0.0, timeout_s) * 1000)):
            raise TimeoutError("no status came")
        return _read(self._pull.recv_multipart())

    def wait(self, room: int, contact: Contact, timeout_s: float = PATIENCE_S) -> LegacyStatus:
        """Wait until every expected rank sent Success; return the status whose token counts.

        Raises RoomFailed for a Failed of any rank, and TimeoutError.
        """
        until, arrived = time.monotonic() + timeout_s, list[LegacyStatus]()
        while True:
            for status in [status for status in self._heard if status.room == room]:
                self._heard.remove(status)
                if status.code == FAILED or status.prefill_rank not in contact.expected:
                    self.close_window(room)
                    raise RoomFailed(room, Cause.PEER_FAILED, f"prefill rank {status.prefill_rank} said {status.code}")
                arrived.append(status)
            if {status.prefill_rank for status in arrived} == contact.expected:
                self.close_window(room)
                return next((status for status in arrived if status.token != -1), arrived[0])
            self._heard.append(self.hear(until - time.monotonic()))

    def close_window(self, room: int) -> None:
        """Close the room's window, for transports with a fence: nothing of it lands any more."""
        self._fence.close(Room(room), Generation(0))

    @property
    def _specs(self) -> Sequence[GroupSpec]:
        return self.layout.group_specs

    def _connect(self, address: Endpoint) -> zmq.Socket[bytes]:
        push = self._context.socket(zmq.PUSH)
        push.connect(address.url("tcp"))
        return push


def _read(frames: list[bytes]) -> LegacyStatus:
    room, code, rank = (int(frame.decode("ascii")) for frame in frames[:3])
    token = int(frames[3].decode("ascii")) if len(frames) > 3 else -1
    candidates = frames[4] if len(frames) > 4 else b""
    return LegacyStatus(room, code, rank, token, struct.unpack(f"<{len(candidates) // 4}i", candidates), tuple(frames))


# ---- A prefill rank of the older generation, played: raw frames of its own, every misbehaviour on demand
#
# It publishes itself once, takes registrations and offers from one PULL, writes into the registered arenas unasked,
# and reports with five frames or seven. Rules: docs/legacy_wire.md sections 1, 3, 5, 6, 8 and 9.


Write: TypeAlias = Callable[[str, int, npt.NDArray[np.uint8]], None]
"""Writes these bytes at this address behind this session, without any check."""


def write_in_process(session: str, address: int, data: npt.NDArray[np.uint8]) -> None:
    """Write into a decode rank of this process, whose arena must exist until then."""
    del session
    ctypes.memmove(address, np.ascontiguousarray(data).ctypes.data, data.nbytes)


@attrs.frozen
class LegacyRegistration:
    """A decode rank, as it registered."""

    host: str
    port: int
    session: str
    arena_base: int
    layout: Layout
    tp_size: int
    tp_rank: int


@attrs.frozen
class LegacyOffer:
    """One decode rank's pre-allocation; `blocks` is None from a rank that gets no bytes."""

    room: int
    registration: LegacyRegistration
    blocks: dict[GroupId, tuple[int, ...]] | None
    prefix_len: int = 0
    prompt_len: int = 0


class LegacyPrefill:
    """One rank with an arena; `with` opens its sockets and publishes it at the rendezvous."""

    def __init__(
        self,
        layout: Layout,
        rendezvous: Endpoint,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        dp_size: int = 1,
        dp_rank: int = 0,
        host: str = "127.0.0.1",
        write: Write = write_in_process,
        arena: Arena | None = None,
    ) -> None:
        self.layout, self.rendezvous, self.host = layout, rendezvous, host
        self.tp_size, self.tp_rank, self.dp_size, self.dp_rank = tp_size, tp_rank, dp_size, dp_rank
        self.arena = arena or Arena.zeros(layout.arena_bytes)
        self.registrations: dict[str, LegacyRegistration] = {}
        self._write = write
        self._offers: list[LegacyOffer] = []
        self._pushes: dict[Endpoint, zmq.Socket[bytes]] = {}

    def __enter__(self) -> Self:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self.port = self._pull.bind_to_random_port(f"tcp://{self.host}")
        status, text = put_rank(self.rendezvous, self.body())
        if status != 200:
            self.__exit__()
            raise ConnectionError(f"{self.rendezvous} answered {status}: {text}")
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def restart(self) -> None:
        """Close everything and bind the same port again, as a restarted process would."""
        self._context.destroy(linger=0)
        self._pushes.clear()
        self.registrations.clear()
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.bind(f"tcp://{self.host}:{self.port}")

    def body(self) -> dict[str, Any]:
        """Return what the rank publishes of itself."""
        return {
            "role": "Prefill",
            "world_size": self.tp_size * self.dp_size,
            "dp_size": self.dp_size,
            "rank_ip": self.host,
            "rank_port": self.port,
            "engine_rank": self.dp_rank * self.tp_size + self.tp_rank,
            "cache_layout": wire.encode_layout(self.layout).decode("ascii"),
        }

    # ---- what it receives

    def hear(self, timeout_s: float = PATIENCE_S) -> list[bytes]:
        """Receive one message, keep it if it is a registration or an offer, and return it. Raises TimeoutError."""
        if not self._pull.poll(int(max(0.0, timeout_s) * 1000)):
            raise TimeoutError("no message came")
        frames = self._pull.recv_multipart()
        if frames[0] == b"None":
            found = _registration(frames)
            self.registrations[found.session] = found
        elif registration := self.registrations.get(frames[1].decode("ascii")):
            self._offers.append(_offer(frames, registration))
        return frames

    def wait(self, room: int, timeout_s: float = PATIENCE_S) -> list[LegacyOffer]:
        """Wait until every decode rank that this one feeds has offered the room; return the offers.

        Raises TimeoutError.
        """
        until = time.monotonic() + timeout_s
        while True:
            found = {offer.registration.tp_rank: offer for offer in self._offers if offer.room == room}
            if found and found.keys() == self._expected(next(iter(found.values())).registration):
                self._offers = [offer for offer in self._offers if offer.room != room]
                return [found[rank] for rank in sorted(found)]
            self.hear(until - time.monotonic())

    def _expected(self, registration: LegacyRegistration) -> Collection[int]:
        pair = self.layout, registration.layout
        served = decode_ranks_served(*pair, self.tp_size, self.tp_rank, registration.tp_size)
        return set(served) or {0}

    # ---- what it does

    def write(
        self,
        offer: LegacyOffer,
        source_blocks: Mapping[GroupId, Sequence[int]],
        *,
        fields: Collection[FieldId] | None = None,
        chunk: range | None = None,
    ) -> None:
        """Write the offer's pages: all of them, or only some fields', or only those that a chunk completes."""
        if offer.blocks is None:
            return
        theirs = offer.registration
        route = plan_route(self.layout, theirs.layout, self.tp_size, self.tp_rank, theirs.tp_size, theirs.tp_rank)
        sides: list[Mapping[GroupId, Sequence[int]]] = [source_blocks, offer.blocks]
        if chunk is not None:
            window = offer.prefix_len, offer.prompt_len, chunk
            sides = [chunk_blocks(self.layout, side, *window) for side in sides]
        copies = plan_block_copies(route, self.layout, sides[0], theirs.layout, sides[1], fields)
        for start, to, length in zip(*(column.tolist() for column in attrs.astuple(copies)), strict=True):
            self._write(theirs.session, theirs.arena_base + to, self.arena.bytes[start : start + length])

    def report(self, offer: LegacyOffer, code: int, token: int = -1, **more: Any) -> None:  # noqa: ANN401
        """Send one decode rank a status; see `status_frames` for the rest."""
        self.say(offer.registration, status_frames(offer.room, code, self.tp_rank, token, **more))

    def say(self, to: LegacyRegistration, frames: Sequence[bytes]) -> None:
        """Push any frames to a decode rank."""
        address = Endpoint(to.host, to.port)
        if address not in self._pushes:
            self._pushes[address] = self._context.socket(zmq.PUSH)
            self._pushes[address].connect(address.url("tcp"))
        self._pushes[address].send_multipart(list(frames))

    def serve(self, room: int, source_blocks: Mapping[GroupId, Sequence[int]], token: int = 42) -> list[LegacyOffer]:
        """Serve one room without faults: wait for the offers, write everything, send Success; return the offers."""
        offers = self.wait(room)
        for offer in offers:
            self.write(offer, source_blocks)
        for offer in offers:
            if offer.blocks is not None:
                self.report(offer, SUCCESS, token)
        return offers


def status_frames(
    room: int,
    code: int,
    prefill_rank: int,
    token: int = -1,
    candidates: Sequence[int] = (),
    *,
    cached_tokens: int | None = None,
    logprob: float | None = None,
) -> list[bytes]:
    """Return five frames; seven, as newer peers send, with `cached_tokens`."""
    frames = [str(number).encode("ascii") for number in (room, code, prefill_rank, token)]
    frames.append(struct.pack(f"<{len(candidates)}i", *candidates))
    if cached_tokens is not None:
        frames += [str(cached_tokens).encode("ascii"), b"" if logprob is None else struct.pack("<d", logprob)]
    return frames


def _registration(frames: Sequence[bytes]) -> LegacyRegistration:
    _, host, port, session, base, layout, tp_size, tp_rank = frames
    return LegacyRegistration(
        host.decode("ascii"),
        int(port),
        session.decode("ascii"),
        struct.unpack("=Q", base)[0],
        wire.decode_layout(layout),
        int(tp_size),
        int(tp_rank),
    )


def _offer(frames: Sequence[bytes], registration: LegacyRegistration) -> LegacyOffer:
    room, _, manifest = frames
    if not manifest:
        return LegacyOffer(int(room), registration, None)
    found = json.loads(manifest)
    blocks = {group["group_id"]: tuple(group["block_ids"]) for group in found["groups"]}
    return LegacyOffer(int(room), registration, blocks, found["prefix_len"], found["prompt_len"])


__all__ = [
    "Contact",
    "LegacyDecode",
    "LegacyOffer",
    "LegacyPrefill",
    "LegacyRegistration",
    "LegacyRendezvous",
    "LegacyStatus",
    "look_up",
    "put_rank",
    "status_frames",
    "write_in_process",
]
