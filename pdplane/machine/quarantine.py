"""Blocks of failed rooms that somebody may still write to, because no fence stands before a one-sided write.

Only a prefill rank's Success means that its writes are over: legacy peers were seen to write after their Failed. So the
blocks of a rank that failed or fell silent are kept for a time after its last status, which bounds the risk and does
not remove it.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from pdplane.ids import Rank, Room
from pdplane.machine.actions import DecodeAction, Release, Turn
from pdplane.machine.events import DecodeRequested
from pdplane.machine.timers import Timers
from pdplane.messages import Status, StatusCode


@attrs.define
class _Quarantined:
    ticket: int
    blocks: int
    until: dict[Rank, float]


class Quarantine:
    """Failed rooms whose blocks are held. Their numbers take no new use, since a status names only the number."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._held: dict[Room, _Quarantined] = {}
        self._timers: Timers[Room] = Timers()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, number: Room) -> bool:
        return number in self._held

    def counts(self) -> dict[str, int]:
        return {"rooms": len(self._held), "blocks": sum(held.blocks for held in self._held.values())}

    def earliest(self) -> float | None:
        return self._timers.earliest()

    def hold(self, request: DecodeRequested, writers: Collection[Rank], now: float) -> None:
        """Hold a room's blocks until each of these prefill ranks reports Success or its time is over."""
        blocks = sum(len(group.block_ids) for group in request.manifest.groups)
        until = dict.fromkeys(writers, now + self._timeout_s)
        self._held[request.room] = _Quarantined(request.ticket, blocks, until)
        self._timers.set(request.room, now + self._timeout_s)

    def heard(self, turn: Turn[DecodeAction], status: Status) -> bool:
        """Take a rank's status; return whether the room is in quarantine."""
        held = self._held.get(status.room)
        if held is None:
            return False
        if status.prefill_rank in held.until:
            if status.code is StatusCode.SUCCESS:
                del held.until[status.prefill_rank]
            else:
                held.until[status.prefill_rank] = turn.now + self._timeout_s
            self._timers.set(status.room, max(held.until.values(), default=turn.now))
        return True

    def expire(self, turn: Turn[DecodeAction]) -> None:
        """Release the rooms whose last writer has reported or timed out."""
        for number in list(self._timers.due(turn.now)):
            turn.add(Release(number, self._held.pop(number).ticket))
