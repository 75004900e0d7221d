"""The played legacy peers themselves: true to their records, and able to play each other."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from pdplane.control.http_thread import HttpThread
from pdplane.control.rendezvous import rendezvous_app
from pdplane.errors import RoomFailed
from pdplane.kv.arena import Pool
from pdplane.kv.manifest import blocks_needed
from pdplane.testing.legacy_peer import LegacyDecode, LegacyPrefill, LegacyRendezvous, look_up, put_rank
from tests.control.registrations import CASES
from tests.http_client import ask
from tests.samples import two_group_layout

LAYOUT = two_group_layout(num_lcm_blocks=16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_rendezvous_answers_as_recorded(case: dict[str, Any]) -> None:
    with LegacyRendezvous() as http:
        for step, (request, expected) in enumerate(zip(case["input"], case["expected"], strict=True)):
            answer = ask(http.endpoint, request["method"], request["path"], request.get("body"))
            assert (answer.status, answer.body) == (expected["status"], expected["body"]), step


def test_a_legacy_rank_registers_at_our_rendezvous() -> None:
    with contextlib.ExitStack() as opened:
        http = HttpThread("pdplane-http-test")
        opened.callback(http.close)
        http.start()
        ours = http.serve(rendezvous_app(), "127.0.0.1", 0)
        prefill = opened.enter_context(LegacyPrefill(LAYOUT, ours))
        tp_size, group, _, (address,) = look_up(ours, 7)
        assert (tp_size, group, address.port) == (1, 0, prefill.port)
        status, text = put_rank(ours, prefill.body() | {"dp_size": 0})
        assert status == 400
        assert "dp_size" in text


def test_the_two_roles_play_each_other() -> None:
    with contextlib.ExitStack() as opened:
        http = opened.enter_context(LegacyRendezvous())
        prefill = opened.enter_context(LegacyPrefill(LAYOUT, http.endpoint))
        decode = opened.enter_context(LegacyDecode(LAYOUT))
        prefill.arena.bytes[:] = np.random.default_rng(1).integers(0, 256, prefill.arena.nbytes, np.uint8)
        blocks = Pool(LAYOUT).allocate(blocks_needed(LAYOUT, 10))
        contact = decode.offer(http.endpoint, 7, blocks, prompt_len=10)
        prefill.serve(7, blocks, token=11)
        assert decode.wait(7, contact).token == 11
        first = int(LAYOUT.page_offsets(LAYOUT.fields[0].field_id, np.array([1], np.uint64))[0])
        page = slice(first, first + LAYOUT.fields[0].payload_bytes)
        assert (decode.arena.bytes[page] == prefill.arena.bytes[page]).all()


def test_a_word_of_a_foreign_rank_fails_a_legacy_room() -> None:
    with contextlib.ExitStack() as opened:
        http = opened.enter_context(LegacyRendezvous())
        prefill = opened.enter_context(LegacyPrefill(LAYOUT, http.endpoint))
        decode = opened.enter_context(LegacyDecode(LAYOUT))
        blocks = Pool(LAYOUT).allocate(blocks_needed(LAYOUT, 10))
        contact = decode.offer(http.endpoint, 7, blocks, prompt_len=10)
        (offer,) = prefill.wait(7)
        prefill.say(offer.registration, [b"7", b"5", b"3", b"11", b""])
        with pytest.raises(RoomFailed):
            decode.wait(7, contact)
