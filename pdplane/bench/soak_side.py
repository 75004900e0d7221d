"""One side of `pdplane bench soak`: a plane that serves the rooms it is told of, and checks every byte.

It talks JSON lines over its standard streams: commands come in, `say` lines go out as things happen. It ends with its
standard input. The bytes of a room's blocks say which room, field, place and offset they belong to; a block that
nobody has borrowed holds `EMPTY`, so a byte that lands too late shows.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdplane.bench.control_far import BLOCK_TOKENS, KV, LAYERS, room_layout
from pdplane.errors import LocalProtocolError, PdplaneError, PoolExhausted
from pdplane.ids import Endpoint, GroupId
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.manifest import build_manifest
from pdplane.net import JsonLines
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.plane.rooms import DecodeRoom, PrefillRoom

BLOCKS = 256
MAX_BLOCKS_A_ROOM = 3
EMPTY = 0xEE
BOOTSTRAP_S, WAITING_S, PING_S = 3.0, 5.0, 0.5
Blocks = Mapping[GroupId, Sequence[int]]


class Side:
    """What both sides have: an arena of position-coded bytes, a pool, and a thread that works off what happened."""

    plane: PrefillPlane | DecodePlane

    def __init__(self, lines: JsonLines) -> None:
        self.layout = room_layout(BLOCKS)
        self.arena = Arena.zeros(self.layout.arena_bytes)
        self.arena.bytes[:] = EMPTY
        self.pool = Pool(self.layout)
        self._lines, self._saying = lines, threading.Lock()
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="soak", daemon=True)
        self.stray = 0

    def __enter__(self) -> Side:
        self.plane.start()
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.close()
        self._work.put(None)
        self._worker.join()

    def say(self, **news: object) -> None:
        """Tell the other process."""
        with self._saying:
            self._lines.send(news)

    def later(self, work: Any) -> None:  # noqa: ANN401  (a call without arguments)
        """Do this on the working thread."""
        self._work.put(work)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def pages(self, blocks: Blocks) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
        """Yield (field, place, bytes) of every page of these blocks."""
        ids = np.array(blocks[KV], np.uint64)
        for number, field in enumerate(self.layout.fields):
            for place, offset in enumerate(self.layout.page_offsets(field.field_id, ids)):
                yield number, place, self.arena.bytes[int(offset) : int(offset) + field.payload_bytes]

    def borrow(self, tokens: int) -> Blocks:
        """Take blocks for a room; count those in which something has landed since they were given back."""
        blocks = self.pool.allocate({KV: -(-tokens // BLOCK_TOKENS)})
        self.stray += sum(not (page == EMPTY).all() for _field, _place, page in self.pages(blocks))
        return blocks

    def give_back(self, blocks: Blocks) -> None:
        """Empty the blocks and return them."""
        for _field, _place, page in self.pages(blocks):
            page[:] = EMPTY
        self.pool.release(blocks)

    def counts(self) -> dict[str, object]:
        """Return what must be back at its start when no room is left, and the memory in use."""
        gc.collect()
        counted = self.plane.statistics()
        left = dict(counted["rooms"])
        left |= {name: counted[name] for name in ("pushes", "handles") if isinstance(counted.get(name), int)}
        left["fence"] = counted.get("fence", {}).get("open_rooms", 0)
        left["blocks"] = sum(self.pool.used_blocks().values())
        clean = all((page == EMPTY).all() for _f, _p, page in self.pages({KV: range(1, BLOCKS + 1)}))
        return {
            "left": {name: count for name, count in left.items() if count},
            "stray": self.stray + (not clean),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "rss": _resident_bytes(),
        }

    def answer(self, command: dict[str, Any]) -> None:
        """Do what a command says."""
        if command["do"] == "counts":
            self.later(lambda: self.say(counts=self.counts()))
            return
        for asked in command["rooms"]:
            self.begin(**asked)

    def begin(self, room: int, tokens: int, cancel_after: float | None, **more: Any) -> None:  # noqa: ANN401
        """Begin this side's half of a room."""
        raise NotImplementedError


def cancel_later(room: PrefillRoom | DecodeRoom, after_s: float | None) -> None:
    """Cancel a room after a while, if a time is given."""
    if after_s is not None:
        timer = threading.Timer(after_s, room.cancel)
        timer.daemon = True
        timer.start()


class PrefillSide(Side):
    """Writes each room's bytes into blocks of its own and pushes them, layer by layer."""

    def __init__(self, lines: JsonLines, transport: str, port: int) -> None:
        super().__init__(lines)
        config = PrefillConfig(
            bootstrap_port=port, transport=transport, legacy=False, bootstrap_timeout_s=BOOTSTRAP_S,
            waiting_timeout_s=WAITING_S, ping_interval_s=PING_S,
        )  # fmt: skip
        self.plane: PrefillPlane = PrefillPlane(config, layout=self.layout, arena=self.arena)

    @property
    def address(self) -> str:
        return str(self.plane.rendezvous)

    def begin(self, room: int, tokens: int, cancel_after: float | None, **_more: Any) -> None:  # noqa: ANN401
        work = self.plane.open(room, prompt_len=tokens)
        work.window.add_done_callback(lambda _offer: self.later(partial(self._push, work, tokens)))
        work.done.add_done_callback(lambda done: self.say(room=room, end=_end(done.exception())))
        cancel_later(work, cancel_after)

    def _push(self, work: PrefillRoom, tokens: int) -> None:
        if work.window.exception() is not None:
            return
        try:
            blocks = self.borrow(tokens)
        except PoolExhausted as full:
            work.cancel(str(full))
            return
        for field, place, page in self.pages(blocks):
            page[:] = coded(work.room, field, place, page.size)
        work.released.add_done_callback(lambda _done: self.later(lambda: self.give_back(blocks)))
        try:
            for step in range(LAYERS):
                work.push(blocks, range(step, step + 1))
            work.finish(work.room % 1000)
        except LocalProtocolError:  # it ended meanwhile, which `done` tells
            return


class DecodeSide(Side):
    """Lends blocks to each room and compares what has landed when it is delivered."""

    def __init__(self, lines: JsonLines, transport: str, port: int) -> None:
        super().__init__(lines)
        config = DecodeConfig(
            data_port=port, transport=transport, legacy=False, bootstrap_timeout_s=BOOTSTRAP_S,
            waiting_timeout_s=WAITING_S, ping_interval_s=PING_S,
        )  # fmt: skip
        self.plane: DecodePlane = DecodePlane(config, layout=self.layout, arena=self.arena)

    @property
    def address(self) -> str:
        return str(self.plane.data)

    def begin(self, room: int, tokens: int, cancel_after: float | None, **more: Any) -> None:  # noqa: ANN401
        began = time.monotonic()
        try:
            blocks = self.borrow(tokens)
        except PoolExhausted:
            self.say(room=room, end="full", wrong=0, ms=0.0)
            return
        manifest = build_manifest(self.layout, blocks, 0, tokens)
        opened = self.plane.open(room, prefill=Endpoint.parse(more["prefill"]), manifest=manifest)
        opened.released.add_done_callback(lambda _done: self.later(lambda: self._ended(opened, blocks, began)))
        cancel_later(opened, cancel_after)

    def _ended(self, room: DecodeRoom, blocks: Blocks, began: float) -> None:
        took = time.monotonic() - began
        error = room.done.exception(WAITING_S)
        wrong = 0
        if error is None:
            wrong = sum(
                not np.array_equal(page, coded(room.room, field, place, page.size))
                for field, place, page in self.pages(blocks)
            )
            wrong += room.done.result().first_token != room.room % 1000
        self.give_back(blocks)
        self.say(room=room.room, end=_end(error), wrong=wrong, ms=1e3 * took)


_PLACES = np.arange(1 << 16, dtype=np.uint32)


def coded(room: int, field: int, place: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of one page: each depends on its room, field, place and offset."""
    seed = (room * 0x9E3779B1 + field * 0x85EBCA6B + place * 0xC2B2AE35) & 0xFFFFFFFF
    mixed = (_PLACES[:size] ^ np.uint32(seed)) * np.uint32(0x9E3779B1)
    return (mixed >> np.uint32(24)).astype(np.uint8)


def _end(error: BaseException | None) -> str:
    if error is None:
        return "done"
    return error.cause.value if isinstance(error, PdplaneError) else type(error).__name__


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    """Serve one side; the arguments are the role, the transport and the port."""
    logging.basicConfig(level=logging.ERROR)  # cuts and lost peers are what this is about
    lines = JsonLines(sys.stdin, sys.stdout)
    role, transport, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    side = (PrefillSide if role == "prefill" else DecodeSide)(lines, transport, port)
    with side:
        side.say(address=side.address)
        with contextlib.suppress(EOFError):
            while True:
                command: Any = lines.receive()
                side.answer(command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
