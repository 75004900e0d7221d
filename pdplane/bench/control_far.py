"""The prefill process of `pdplane bench control`: it pushes every room that decode offers, and computes nothing.

It talks JSON lines over its standard streams: the first line out says where the rendezvous is, then each command gets
one answer. It ends with its standard input.
"""

from __future__ import annotations

import contextlib
import queue
import resource
import sys
import threading
from functools import partial
from typing import Any

from pdplane.ids import FieldId, GroupId
from pdplane.kv.arena import Arena
from pdplane.kv.layout import GroupSpec, Layout
from pdplane.kv.planning import FieldSpec, plan_layout
from pdplane.net import JsonLines
from pdplane.plane.config import PrefillConfig
from pdplane.plane.prefill import PrefillPlane
from pdplane.plane.rooms import PrefillRoom
from pdplane.testing.interop_run import LegacyPrefillPlane

CHANNELS = ("native", "legacy")
KV = GroupId("kv")
BLOCK_TOKENS = 16
LAYERS = 4
ROOM_BYTES = 24 << 10
MAX_ROOMS = 8192


def room_layout(blocks: int) -> Layout:
    """Return a layout with room for so many blocks; each is one room's prompt of 24 KiB, in four layers."""
    width = ROOM_BYTES // (2 * LAYERS * BLOCK_TOKENS)
    fields = [
        FieldSpec(KV, FieldId(f"layer.{layer}.{name}"), f"plane.{layer}.{name}", (BLOCK_TOKENS, width), "uint8")
        for layer in range(LAYERS)
        for name in "kv"
    ]
    spec = GroupSpec(
        KV, "full_history", rows_per_page=BLOCK_TOKENS, entry_stride_tokens=1, transfer_policy="full_suffix"
    )
    return plan_layout([spec], fields, num_lcm_blocks=blocks, prefix_granularity=BLOCK_TOKENS)


def processor_seconds() -> float:
    """Return the processor time of this process until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Pusher:
    """A prefill plane, and the one thread that stands for an engine: it pushes each offered room in two pushes."""

    def __init__(self, channel: str, transport: str) -> None:
        layout = room_layout(1)
        config = PrefillConfig(
            bootstrap_port=0, transport=transport, legacy=channel == "legacy", max_rooms=MAX_ROOMS,
            bootstrap_timeout_s=3600, waiting_timeout_s=3600,
        )  # fmt: skip
        kind = LegacyPrefillPlane if channel == "legacy" else PrefillPlane
        self.plane = kind(config, layout=layout, arena=Arena.zeros(layout.arena_bytes))
        self._offered: queue.SimpleQueue[PrefillRoom | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._push_all, name="engine", daemon=True)

    def __enter__(self) -> Pusher:
        self.plane.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.plane.close()
        self._offered.put(None)
        self._thread.join()

    def answer(self, command: dict[str, Any]) -> float | None:
        """Do what the decode process asks; return the processor time when that is asked for."""
        if command["do"] == "cpu":
            return processor_seconds()
        for number in range(command["first"], command["first"] + command["count"]):
            room = self.plane.open(number, prompt_len=BLOCK_TOKENS)
            room.window.add_done_callback(partial(self._take, room))
        return None

    def _take(self, room: PrefillRoom, _offered: object) -> None:
        self._offered.put(room)

    def _push_all(self) -> None:
        half = LAYERS // 2
        while (room := self._offered.get()) is not None:
            if room.window.exception() is not None:
                continue
            for steps in (range(half), range(half, LAYERS)):
                room.push({KV: (1,)}, steps)
            room.finish(1)


def main() -> int:
    """Serve one measurement; the arguments are the channel and the transport."""
    lines = JsonLines(sys.stdin, sys.stdout)
    with Pusher(*sys.argv[1:3]) as pusher:
        lines.send(str(pusher.plane.rendezvous))
        with contextlib.suppress(EOFError):
            while True:
                command: Any = lines.receive()
                lines.send(pusher.answer(command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
