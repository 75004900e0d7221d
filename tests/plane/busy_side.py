"""One side of a few rooms in a process whose Python threads spin: `python -m tests.plane.busy_side ROLE SPINNERS [PORT]`.

It stays on one core, as a serving stack's workers are bound by default. Prefill prints its rendezvous' port, decode one
line for each room; both end with their standard input.
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
        sum(range(hold))  # C code that keeps the interpreter's lock


def prefill() -> None:
    layout = two_group_layout(num_lcm_blocks=64)
    with PrefillPlane(PrefillConfig(bootstrap_port=0), layout=layout, arena=Arena.zeros(layout.arena_bytes)) as plane:
        works = [plane.open(room, prompt_len=PROMPT_LEN) for room in ROOMS]
        source = Pool(layout).allocate(blocks_needed(layout, PROMPT_LEN))
        print(plane.rendezvous.port, flush=True)
        for work in works:
            try:
                work.wait_window()
                for step in range(len(layout.steps)):
                    work.push(source, range(step, step + 1))
                work.finish(first_token=work.room).result()
            except PdplaneError as error:
                print(error, file=sys.stderr, flush=True)
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
                print(room.wait().first_token, flush=True)
            except PdplaneError as error:
                print(error, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    for _ in range(int(sys.argv[2])):
        threading.Thread(target=spin, args=(int(os.environ['HOLD']),), daemon=True).start()
    prefill() if sys.argv[1] == "prefill" else decode(int(sys.argv[3]))
