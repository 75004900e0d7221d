"""One side of a few rooms in a process with a thread that spins: `python -m tests.plane.busy_side ROLE HOLD [PORT]`.

HOLD is how long the thread keeps the interpreter's lock at a time, in turns of a loop. The process stays on one core,
as a serving stack's workers are bound by default. Prefill says its rendezvous' port, decode one line for each room;
both end with their standard input.
"""

from __future__ import annotations

import os
import sys
import threading

from pdplane import (
    Arena,
    DecodeConfig,
    DecodePlane,
    PdplaneError,
    Pool,
    PrefillConfig,
    PrefillPlane,
    blocks_needed,
    build_manifest,
)
from tests.samples import two_group_layout

ROOMS = range(1, 7)
PROMPT_LEN = 22


def spin(hold: int) -> None:
    while True:
        sum(range(hold))  # C code, which does not give the lock to others in between


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def prefill() -> None:
    layout = two_group_layout(num_lcm_blocks=64)
    with PrefillPlane(PrefillConfig(bootstrap_port=0), layout=layout, arena=Arena.zeros(layout.arena_bytes)) as plane:
        works = [plane.open(room, prompt_len=PROMPT_LEN) for room in ROOMS]
        source = Pool(layout).allocate(blocks_needed(layout, PROMPT_LEN))
        say(plane.rendezvous.port)
        for work in works:
            work.wait_window()
            for step in range(len(layout.steps)):
                work.push(source, range(step, step + 1))
            work.finish(first_token=work.room).result()
        sys.stdin.read()


def decode(port: int) -> None:
    layout = two_group_layout(num_lcm_blocks=64)
    pool = Pool(layout)
    with DecodePlane(DecodeConfig(), layout=layout, arena=Arena.zeros(layout.arena_bytes)) as plane:
        waiting = []
        for room in ROOMS:
            blocks = pool.allocate(blocks_needed(layout, PROMPT_LEN))
            manifest = build_manifest(layout, blocks, prefix_len=0, prompt_len=PROMPT_LEN)
            waiting.append(plane.open(room, prefill=f"127.0.0.1:{port}", manifest=manifest))
        for room in waiting:
            try:
                say(room.wait().first_token)
            except PdplaneError as error:
                say(error)
        sys.stdin.read()


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    threading.Thread(target=spin, args=(int(sys.argv[2]),), daemon=True).start()
    prefill() if sys.argv[1] == "prefill" else decode(int(sys.argv[3]))
