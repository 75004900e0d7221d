"""The full product of states and moves: a legal move gives a state, any other says what is wrong."""

from __future__ import annotations

import itertools

import pytest

from pdplane.errors import LocalProtocolError
from pdplane.machine.uses import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeMove,
    DecodeState,
    PrefillMove,
    PrefillState,
    advance,
)
from tests.rows import rows

LEGAL_ON_PREFILL = {
    "early": {"queued": "early", "offered": "early", "requested": "opened", "broken": "failing"},
    "opened": {"queued": "opened", "offered": "opened", "completed": "offered", "broken": "failing"},
    "offered": {"pushed": "offered", "finished": "finishing", "broken": "failing"},
    "finishing": {"pushed": "finishing", "drained": "succeeded", "broken": "failing"},
    "failing": {"pushed": "failing", "broken": "failing", "drained": "failed"},
    "succeeded": {},
    "failed": {},
}
LEGAL_ON_DECODE = {
    "queued": {"filled": "resolving", "broken": "failed"},
    "resolving": {"joined": "waiting", "broken": "failed"},
    "waiting": {"reported": "waiting", "landed": "waiting", "completed": "ready", "broken": "failed"},
    "ready": {},
    "failed": {},
}


@rows(("state", "move"), itertools.product(PrefillState, PrefillMove))
def test_prefill(state: PrefillState, move: PrefillMove) -> None:
    legal = LEGAL_ON_PREFILL[state.value]
    if move.value in legal:
        assert advance(PREFILL_TABLE, state, move).value == legal[move.value]
        return
    with pytest.raises(LocalProtocolError, match=f"a room that is {state.value} cannot be {move.value}"):
        advance(PREFILL_TABLE, state, move)


@rows(("state", "move"), itertools.product(DecodeState, DecodeMove))
def test_decode(state: DecodeState, move: DecodeMove) -> None:
    legal = LEGAL_ON_DECODE[state.value]
    if move.value in legal:
        assert advance(DECODE_TABLE, state, move).value == legal[move.value]
        return
    with pytest.raises(LocalProtocolError, match=f"a room that is {state.value} cannot be {move.value}"):
        advance(DECODE_TABLE, state, move)


def test_every_state_but_the_last_ones_can_break() -> None:
    ends = {PrefillState.SUCCEEDED, PrefillState.FAILED}
    assert {state for state in PrefillState if (state, PrefillMove.BROKEN) in PREFILL_TABLE} == set(PrefillState) - ends
    assert not [state for state, _ in PREFILL_TABLE if state in ends]
