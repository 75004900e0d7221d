"""A decode rank of the older generation, played: raw frames of its own, every misbehaviour on demand.

Source: legacy_peer.md sections 1, 3, 5, 6 and 10. It registers once for each prefill address and group, offers blocks,
and hears statuses of three frames or more, of which it reads five.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Self

import attrs
import zmq

from pdplane import wire
from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, Generation, GroupId, Rank, Room, SessionId, new_life
from pdplane.kv.arena import Arena
from pdplane.kv.copies import window_runs
from pdplane.kv.layout import GroupSpec, Layout
from pdplane.kv.manifest import build_manifest
from pdplane.kv.routes import contact_order, expected_prefill_ranks
from pdplane.testing.legacy_rendezvous import look_up
from pdplane.transport.fence import Fence
from pdplane.transport.registry import is_one_sided, open_receiver

FAILED, SUCCESS = 0, 5
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
    """The prefill ranks of one address and group: whom to tell, and whose Success to wait for."""

    pushes: Mapping[Rank, zmq.Socket[bytes]]
    expected: frozenset[Rank]


class LegacyDecode:
    """One rank with an arena; `with` opens its sockets. `transport` says how prefill's bytes reach the arena.

    A one-sided transport writes as it does in life; over the others a window of generation 0 is opened for each
    offer, since their receivers ask for one.
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

    # ---- what it says

    def registration(self, **changes: bytes) -> list[bytes]:
        """The eight frames; a keyword replaces one (host, port, session, base, layout, tp_size, tp_rank)."""
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

    # ---- what it hears

    def hear(self, timeout_s: float = PATIENCE_S) -> LegacyStatus:
        """The next status of any room. Raises TimeoutError."""
        if not self._pull.poll(int(max(0.0, timeout_s) * 1000)):
            raise TimeoutError("no status came")
        return _read(self._pull.recv_multipart())

    def wait(self, room: int, contact: Contact, timeout_s: float = PATIENCE_S) -> LegacyStatus:
        """Until every expected rank said Success: the status whose token counts. RoomFailed for a Failed of anybody.

        Raises TimeoutError.
        """
        until, arrived = time.monotonic() + timeout_s, list[LegacyStatus]()
        while True:
            for status in [status for status in self._heard if status.room == room]:
                self._heard.remove(status)
                if status.code == FAILED or status.prefill_rank not in contact.expected:
                    self.close_window(room)
                    raise RoomFailed(room, f"prefill rank {status.prefill_rank} said {status.code}")
                arrived.append(status)
            if {status.prefill_rank for status in arrived} == contact.expected:
                self.close_window(room)
                return next((status for status in arrived if status.token != -1), arrived[0])
            self._heard.append(self.hear(until - time.monotonic()))

    def close_window(self, room: int) -> None:
        """For transports that ask: nothing of this room lands any more."""
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
