"""A process that ends without closing its plane: soon, with its own exit code, and the peer is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint
from tests.plane.conftest import StartDecode, StartPrefill
from tests.waiting import PATIENCE_S

_DECODE = """
from pdplane import Endpoint
from pdplane.kv.arena import Arena
from pdplane.kv.manifest import blocks_needed
from pdplane.kv.manifest import build_manifest
from pdplane.kv.arena import Pool
from pdplane.plane.config import DecodeConfig
from pdplane.plane.decode import DecodePlane
from tests.samples import two_group_layout

layout = two_group_layout(num_lcm_blocks=16)
plane = DecodePlane(DecodeConfig(), layout=layout, arena=Arena.zeros(layout.arena_bytes))
plane.start()
blocks = Pool(layout).allocate(blocks_needed(layout, 10))
room = plane.open(7, prefill=Endpoint("127.0.0.1", {port}), manifest=build_manifest(layout, blocks, 0, 10))
print("opened", flush=True)
input()
{end}
"""
_PREFILL = """
from pdplane.kv.arena import Arena
from pdplane.plane.config import PrefillConfig
from pdplane.plane.prefill import PrefillPlane
from tests.samples import two_group_layout

layout = two_group_layout(num_lcm_blocks=16)
plane = PrefillPlane(PrefillConfig(bootstrap_port=0), layout=layout, arena=Arena.zeros(layout.arena_bytes))
plane.start()
room = plane.open(7)
print(plane.rendezvous.port, flush=True)
room.wait_window(20)
print("windowed", flush=True)
input()
{end}
"""
ENDS = {"end": ("", 0), "exception": ("raise SystemError('unforeseen')", 1), "exit": ("raise SystemExit(3)", 3)}


class Script:
    """A process of its own."""

    def __init__(self, text: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )

    def says(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finish(self) -> int:
        """Let it go on to its end."""
        try:
            self.process.communicate("\n", timeout=PATIENCE_S)
        finally:
            self.process.kill()
        return self.process.returncode


@pytest.mark.parametrize("how", ENDS)
def test_a_decode_that_forgets_to_close(start_prefill: StartPrefill, how: str) -> None:
    end, code = ENDS[how]
    prefill = start_prefill(ping_interval_s=60)  # so that it is not silence that tells
    script = Script(_DECODE.format(port=prefill.rendezvous.port, end=end))
    assert script.says() == "opened"
    work = prefill.plane.open(7)
    work.wait_window(PATIENCE_S)
    assert script.finish() == code
    with pytest.raises(RoomFailed, match="decode is shutting down"):
        work.done.result(PATIENCE_S)


def test_a_prefill_that_forgets_to_close(start_decode: StartDecode) -> None:
    decode = start_decode(ping_interval_s=60)
    script = Script(_PREFILL.format(end=""))
    port = int(script.says())
    blocks, manifest = decode.lend(10)
    waiting = decode.plane.open(7, prefill=Endpoint("127.0.0.1", port), manifest=manifest)
    assert script.says() == "windowed"
    assert script.finish() == 0
    with pytest.raises(RoomFailed, match="prefill is shutting down"):
        waiting.wait(PATIENCE_S)
    decode.pool.release(blocks)


_FORK = """
import os, sys
from pdplane.errors import LocalProtocolError
from pdplane.kv.arena import Arena
from pdplane.kv.arena import Pool
from pdplane.plane.config import DecodeConfig
from pdplane.plane.config import PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from tests.plane.sides import DecodeSide, PrefillSide, meet
from tests.samples import two_group_layout

layout = two_group_layout(num_lcm_blocks=16)

def start():
    arenas = Arena.zeros(layout.arena_bytes), Arena.zeros(layout.arena_bytes)
    prefill = PrefillPlane(PrefillConfig(bootstrap_port=0), layout=layout, arena=arenas[0])
    decode = DecodePlane(DecodeConfig(), layout=layout, arena=arenas[1])
    prefill.start(), decode.start()
    return PrefillSide(prefill, Pool(layout)), DecodeSide(decode, Pool(layout))

mine = start()
meet(*mine).serve()
child = os.fork()
if not child:
    try:
        mine[0].plane.open(1)
    except LocalProtocolError as error:
        assert "another process" in str(error)
        meet(*start()).serve()
        sys.exit(5)
    sys.exit(6)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
meet(*mine).serve()
assert mine[1].plane.statistics()["totals"] == {"ready": 2}
assert mine[0].plane.statistics()["data_connections"] == 1
sys.exit(4)
"""


def test_a_forked_child_starts_its_own_and_leaves_its_parents_alone() -> None:
    script = Script(_FORK)
    assert script.finish() == 4
