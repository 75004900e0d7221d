"""The life of a room on each role, as tables of legal moves.

Guards are events of their own ("all offers are in" is counted first and then fed to the table),
and actions follow from the state that is entered, never from the event that led there.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TypeVar

from pdplane.errors import LocalProtocolError


class PrefillState(enum.Enum):
    """Where a room stands on a prefill rank."""

    EARLY = "early"  # decode offered blocks, no request came yet
    OPENED = "opened"  # the request is here, not every offer
    OFFERED = "offered"  # every offer is here: compute and push
    FINISHING = "finishing"  # all is pushed, not all of it acknowledged
    FAILING = "failing"  # failed, but a push may still be reading the source blocks
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class PrefillMove(enum.Enum):
    """What can move it."""

    REQUESTED = "requested"
    OFFERED = "offered"
    COMPLETED = "completed"  # the last expected offer was counted
    PUSHED = "pushed"  # one push ended well
    FINISHED = "finished"
    DRAINED = "drained"  # no push is under way
    BROKEN = "broken"


P, PM = PrefillState, PrefillMove

PREFILL_TABLE: Mapping[tuple[PrefillState, PrefillMove], PrefillState] = {
    (P.EARLY, PM.OFFERED): P.EARLY,
    (P.EARLY, PM.REQUESTED): P.OPENED,
    (P.EARLY, PM.BROKEN): P.FAILING,
    (P.OPENED, PM.OFFERED): P.OPENED,
    (P.OPENED, PM.COMPLETED): P.OFFERED,
    (P.OPENED, PM.BROKEN): P.FAILING,
    (P.OFFERED, PM.PUSHED): P.OFFERED,
    (P.OFFERED, PM.FINISHED): P.FINISHING,
    (P.OFFERED, PM.BROKEN): P.FAILING,
    (P.FINISHING, PM.PUSHED): P.FINISHING,
    (P.FINISHING, PM.DRAINED): P.SUCCEEDED,
    (P.FINISHING, PM.BROKEN): P.FAILING,
    (P.FAILING, PM.PUSHED): P.FAILING,
    (P.FAILING, PM.BROKEN): P.FAILING,  # a second cause changes nothing
    (P.FAILING, PM.DRAINED): P.FAILED,
}


class DecodeState(enum.Enum):
    """Where a room stands on a decode rank."""

    RESOLVING = "resolving"  # the prefill is looked up and registered with
    WAITING = "waiting"  # blocks are offered and their window is open
    READY = "ready"
    FAILED = "failed"


class DecodeMove(enum.Enum):
    """What can move it."""

    JOINED = "joined"  # every prefill rank that we need has registered us
    REPORTED = "reported"  # a status of an expected rank
    LANDED = "landed"  # bytes of an expected rank
    COMPLETED = "completed"  # every expected status and every expected byte
    BROKEN = "broken"


D, DM = DecodeState, DecodeMove

DECODE_TABLE: Mapping[tuple[DecodeState, DecodeMove], DecodeState] = {
    (D.RESOLVING, DM.JOINED): D.WAITING,
    (D.RESOLVING, DM.BROKEN): D.FAILED,
    (D.WAITING, DM.REPORTED): D.WAITING,
    (D.WAITING, DM.LANDED): D.WAITING,
    (D.WAITING, DM.COMPLETED): D.READY,
    (D.WAITING, DM.BROKEN): D.FAILED,
}

State = TypeVar("State", bound=enum.Enum)
Move = TypeVar("Move", bound=enum.Enum)


def advance(table: Mapping[tuple[State, Move], State], state: State, move: Move) -> State:
    """Return the next state. Raises LocalProtocolError, which names the illegal move."""
    try:
        return table[state, move]
    except KeyError:
        raise LocalProtocolError(f"a room that is {state.value} cannot be {move.value}") from None
