"""Everything that a decode rank knows of one room; forgetting the room is one `del`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from pdplane.ids import Endpoint, Generation, Rank
from pdplane.machine.actions import Delivered
from pdplane.machine.events import DecodeRequested
from pdplane.machine.room import DECODE_TABLE, DecodeMove, DecodeState, advance
from pdplane.messages import Status, Window

PeerKey: TypeAlias = tuple[Endpoint, int]
"""A rendezvous and one data-parallel group behind it."""


@attrs.define
class DecodeRoom:
    """One use of a room number; its ticket is the generation that prefill is told."""

    request: DecodeRequested
    since: float
    state: DecodeState = DecodeState.RESOLVING
    peer: PeerKey | None = None
    expected: Mapping[Rank, int] = attrs.field(factory=dict)
    successes: dict[Rank, Status] = attrs.field(factory=dict)
    landed: dict[Rank, int] = attrs.field(factory=dict)
    counted: bool = True  # we hear which bytes have landed, and can stop them
    cause: str | None = None
    story: list[str] = attrs.field(factory=list)

    @property
    def generation(self) -> Generation:
        return Generation(self.request.ticket)

    @property
    def window(self) -> Window:
        """The notice that names this use to prefill."""
        return Window(self.request.room, self.generation, self.request.prompt_hash)

    def move(self, move: DecodeMove, now: float) -> bool:
        """Advance by the table; True when a new state was entered."""
        before, self.state = self.state, advance(DECODE_TABLE, self.state, move)
        if entered := before is not self.state:
            self.story.append(f"{self.state.value} +{now - self.since:.3f}s")
        return entered

    @property
    def has_every_status(self) -> bool:
        return bool(self.expected) and self.expected.keys() <= self.successes.keys()

    @property
    def has_every_byte(self) -> bool:
        return not self.counted or all(self.landed.get(rank, 0) == nbytes for rank, nbytes in self.expected.items())

    @property
    def writers_left(self) -> frozenset[Rank]:
        """Prefill ranks that may still write, and that nothing here can stop."""
        return frozenset() if self.counted else frozenset(self.expected.keys() - self.successes.keys())

    def missing(self) -> str:
        """What has not come, for the error of a room that waited too long."""
        silent = sorted(self.expected.keys() - self.successes.keys())
        if not self.counted:
            return f"no Success from prefill ranks {silent}"
        short = sorted(rank for rank, nbytes in self.expected.items() if self.landed.get(rank, 0) != nbytes)
        return f"no Success from prefill ranks {silent}, bytes missing from prefill ranks {short}"

    def delivered(self) -> Delivered | None:
        """The statuses merged by the rule of the wire; None when no rank sent a first token.

        A first token, a logprob and candidates that are present win, in rank order; cached tokens: the maximum.
        """
        statuses = [self.successes[rank] for rank in sorted(self.expected)]
        token = next((s.first_token for s in statuses if s.first_token >= 0), None)
        if token is None:
            return None
        logprob = next((s.first_logprob for s in statuses if s.logprob is not None), None)
        candidates = next((s.candidates for s in statuses if s.candidates), None)
        return Delivered(token, logprob, candidates, max(s.cached_tokens for s in statuses))
