"""Decode hears what has landed while the rest is on its way."""

from __future__ import annotations

import numpy as np

from pdplane.kv.copies import window_runs
from pdplane.kv.layout import U64
from pdplane.kv.manifest import build_manifest
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import meet
from tests.waiting import PATIENCE_S


def test_decode_hears_of_each_byte_once_before_the_room_is_ready(
    start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    prefill, decode = start_prefill(), start_decode()
    heard = np.zeros(decode.plane.arena.nbytes, np.uint8)

    def on_landed(offsets: U64, lengths: U64) -> None:
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            heard[offset : offset + length] += 1

    meeting = meet(prefill, decode, prompt_len=22, on_landed=on_landed)
    meeting.work.wait_window(PATIENCE_S)
    source, steps = prefill.fill(22), prefill.plane.layout.steps
    for step in range(len(steps)):
        for chunk in (range(9), range(9, 21)):
            meeting.work.push(source, range(step, step + 1), chunk)
    meeting.work.push(source, None, range(21, 22))
    assert not meeting.waiting.done.done()
    meeting.work.finish(first_token=1)
    meeting.waiting.wait(PATIENCE_S)
    expected = np.zeros_like(heard)
    manifest = build_manifest(decode.plane.layout, meeting.target, 0, 22)
    for offset, length in zip(*window_runs(decode.plane.layout, manifest), strict=True):
        expected[offset : offset + length] = 1
    assert np.array_equal(heard, expected)
