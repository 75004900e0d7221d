"""Legacy peers as they are in life: the real Mooncake engine moves the bytes, over TCP on loopback."""

from __future__ import annotations

import contextlib

import numpy as np

from pdplane.ids import Endpoint, SessionId
from pdplane.kv.arena import Arena, Pool
from pdplane.kv.copies import Copies
from pdplane.kv.manifest import blocks_needed
from pdplane.testing.legacy_peer import LegacyDecode, LegacyPrefill, LegacyRendezvous
from pdplane.transport.mooncake import MooncakeEngine
from pdplane.transport.reports import TransportOptions
from tests.mooncake_engine import needs_engine
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import meet, pages
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S

LAYOUT = two_group_layout(num_lcm_blocks=16)
PROMPT = 10

pytestmark = needs_engine


def test_our_prefill_writes_into_a_legacy_decode(start_prefill: StartPrefill, opened: contextlib.ExitStack) -> None:
    prefill = start_prefill(legacy_transport="mooncake")
    decode = opened.enter_context(LegacyDecode(LAYOUT, transport="mooncake"))
    target = Pool(LAYOUT).allocate(blocks_needed(LAYOUT, PROMPT))
    contact = decode.offer(prefill.rendezvous, 7, target, prompt_len=PROMPT)
    work = prefill.plane.open(7)
    work.wait_window(PATIENCE_S)
    source = prefill.fill(PROMPT)
    work.push(source)
    work.finish(first_token=42).result(PATIENCE_S)
    assert decode.wait(7, contact).token == 42
    assert (pages(LAYOUT, prefill.plane.arena, source) == pages(LAYOUT, decode.arena, target)).all()


def test_a_legacy_prefill_writes_into_our_decode(start_decode: StartDecode, opened: contextlib.ExitStack) -> None:
    """Its registration names the engine's session, while native peers push over TCP to another one."""
    decode = start_decode(legacy_transport="mooncake")
    arena = Arena.zeros(LAYOUT.arena_bytes)
    arena.bytes[:] = np.random.default_rng(1).integers(0, 256, arena.nbytes, np.uint8)
    engine = MooncakeEngine("127.0.0.1", arena, TransportOptions())
    opened.callback(engine.close)

    def write(session: str, address: int, data: np.ndarray) -> None:
        start = int(data.ctypes.data) - arena.base
        one = Copies(*(np.array([number], np.uint64) for number in (start, address, data.nbytes)))
        assert engine.write(SessionId(session), [one], 0)

    http = opened.enter_context(LegacyRendezvous())
    prefill = opened.enter_context(LegacyPrefill(LAYOUT, http.endpoint, arena=arena, write=write))
    target, manifest = decode.lend(PROMPT)
    room = decode.plane.open(7, prefill=http.endpoint, manifest=manifest)
    source = Pool(LAYOUT).allocate(blocks_needed(LAYOUT, PROMPT))
    prefill.serve(7, source)
    assert room.wait(PATIENCE_S).first_token == 42
    assert (pages(LAYOUT, arena, source) == pages(LAYOUT, decode.plane.arena, target)).all()
    (registered,) = prefill.registrations.values()
    assert registered.session != decode.plane.session
    assert Endpoint.parse(registered.session).host == "127.0.0.1"


def test_our_own_two_sides_meet_over_mooncake(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    """Nobody can ask an engine whose life it is: the address is believed, and Success is all that is heard."""
    prefill, decode = start_prefill(transport="mooncake"), start_decode(transport="mooncake")
    for room in (1, 2):
        assert meet(prefill, decode, room=room).serve(seed=room).first_token == 42
