"""Daemons with toy engines beside played peers of the older generation."""

from __future__ import annotations

import numpy as np
import pytest

from pdplane.api import PrefillRequest
from pdplane.errors import Cause, LocalProtocolError, RoomFailed
from pdplane.ids import Room
from pdplane.kv.arena import Pool
from pdplane.kv.manifest import blocks_behind, blocks_needed
from pdplane.testing.legacy_peer import FAILED, SUCCESS, LegacyDecode, LegacyPrefill, LegacyRendezvous
from pdplane.toy.engine import ToyPrefillEngine
from pdplane.toy.model import toy_answer
from tests.node.conftest import Daemons, call, prompt
from tests.waiting import PATIENCE_S, until

PROMPT = prompt(5, 50)


@pytest.fixture
def http(daemons: Daemons) -> LegacyRendezvous:
    return daemons.stack.enter_context(LegacyRendezvous())


def played_prefill(daemons: Daemons, http: LegacyRendezvous) -> tuple[LegacyPrefill, Pool]:
    """A legacy prefill whose arena holds the prompt's true pages, computed by the toy engine."""
    engine = ToyPrefillEngine(daemons.options)
    engine.start()
    daemons.stack.callback(engine.close)
    played = LegacyPrefill(engine.layout, http.endpoint, arena=engine.arena)
    pool = Pool(engine.layout)
    blocks = pool.allocate(blocks_needed(engine.layout, len(PROMPT)))
    engine.prefill(PROMPT, blocks, lambda steps, chunk: None).future.result(PATIENCE_S)
    pool.release(blocks)
    return daemons.stack.enter_context(played), pool


def first_token(daemons: Daemons) -> int:
    return toy_answer(daemons.options, PROMPT, 1)[0][0]


def test_our_decode_answers_what_a_legacy_prefill_computed(daemons: Daemons, http: LegacyRendezvous) -> None:
    played, pool = played_prefill(daemons, http)
    decode = daemons.decode()
    asked = call(None, decode, PROMPT, at=http.endpoint, max_tokens=5)
    played.serve(asked.decode.number, pool.allocate(blocks_needed(played.layout, len(PROMPT))), first_token(daemons))
    assert asked.is_right(daemons.options)
    until(lambda: decode.node.statistics()["blocks"]["free_parents"] == decode.parents, "the blocks")


def test_a_cache_without_a_first_token_is_of_no_use_to_a_daemon(daemons: Daemons, http: LegacyRendezvous) -> None:
    played, pool = played_prefill(daemons, http)
    decode = daemons.decode()
    asked = call(None, decode, PROMPT, at=http.endpoint)
    played.serve(asked.decode.number, pool.allocate(blocks_needed(played.layout, len(PROMPT))), token=-1)
    assert "prefill sent no first token" in asked.causes().pop()
    until(lambda: decode.node.statistics()["blocks"]["free_parents"] == decode.parents, "the blocks")


def test_blocks_come_back_when_the_writer_has_said_so(daemons: Daemons, http: LegacyRendezvous) -> None:
    played, _ = played_prefill(daemons, http)
    decode = daemons.decode()
    asked = call(None, decode, PROMPT, at=http.endpoint)
    (offer,) = played.wait(asked.decode.number)
    played.report(offer, FAILED)
    assert "prefill rank 0 failed it" in asked.causes().pop()
    counts = decode.node.statistics()
    assert counts["blocks"]["free_parents"] < decode.parents
    assert counts["quarantine"]["rooms"] == 1
    again = call(None, decode, PROMPT, at=http.endpoint, room=asked.decode.number)
    with pytest.raises(LocalProtocolError, match="may still be written to") as caught:
        again.finish()
    assert caught.value.cause is Cause.LIVE
    played.report(offer, SUCCESS, 1)
    until(lambda: decode.node.statistics()["blocks"]["free_parents"] == decode.parents, "the blocks")


@pytest.mark.parametrize("prefix_blocks", [0, 1])
def test_our_prefill_serves_a_legacy_decode(daemons: Daemons, prefix_blocks: int) -> None:
    """With a prefix hit too: the whole prompt is computed, only what decode lacks is sent."""
    prefill = daemons.prefill()
    truth = ToyPrefillEngine(daemons.options)
    truth.start()
    daemons.stack.callback(truth.close)
    decode = daemons.stack.enter_context(LegacyDecode(truth.layout))
    blocks = Pool(truth.layout).allocate(blocks_needed(truth.layout, len(PROMPT)))
    truth.prefill(PROMPT, blocks, lambda steps, chunk: None).future.result(PATIENCE_S)
    prefix_len = prefix_blocks * truth.layout.prefix_granularity
    wanted = blocks_behind(truth.layout, blocks, prefix_len, len(PROMPT))
    leg = prefill.node.prefill(PrefillRequest(Room(7), PROMPT))
    contact = decode.offer(prefill.rendezvous, 7, wanted, prompt_len=len(PROMPT), prefix_len=prefix_len)
    assert decode.wait(7, contact).token == leg.done.result(PATIENCE_S).token == first_token(daemons)
    for group_id, ids in wanted.items():
        for field in truth.layout.fields_of(group_id):
            for block in ids:
                start = int(truth.layout.page_offsets(field.field_id, np.array([block], np.uint64))[0])
                page = slice(start, start + field.payload_bytes)
                assert (decode.arena.bytes[page] == truth.arena.bytes[page]).all()


def test_a_cancelled_leg_tells_the_legacy_decode(daemons: Daemons) -> None:
    prefill = daemons.prefill()
    prefill.hold.clear()
    engine = ToyPrefillEngine(daemons.options)
    engine.start()
    daemons.stack.callback(engine.close)
    decode = daemons.stack.enter_context(LegacyDecode(engine.layout))
    leg = prefill.node.prefill(PrefillRequest(Room(7), PROMPT))
    blocks = Pool(engine.layout).allocate(blocks_needed(engine.layout, len(PROMPT)))
    contact = decode.offer(prefill.rendezvous, 7, blocks, prompt_len=len(PROMPT))
    leg.room.wait_window(PATIENCE_S)
    leg.cancel("the client left")
    with pytest.raises(RoomFailed, match="said 0"):
        decode.wait(7, contact)


def test_a_number_that_cannot_be_used_again_yet_is_a_conflict(daemons: Daemons, http: LegacyRendezvous) -> None:
    played, pool = played_prefill(daemons, http)
    decode = daemons.decode()
    asked = call(None, decode, PROMPT, at=http.endpoint)
    number = asked.decode.number
    played.serve(number, pool.allocate(blocks_needed(played.layout, len(PROMPT))), first_token(daemons))
    asked.finish()
    again = call(None, decode, PROMPT, at=http.endpoint, room=number)
    error = again.decode.done.exception(PATIENCE_S)
    assert isinstance(error, LocalProtocolError)
    assert error.cause is Cause.LIVE
