"""One call of a machine: the time it happens at and the actions that come of it."""

from __future__ import annotations

from typing import Generic, TypeVar

import attrs

Action = TypeVar("Action")


@attrs.define
class Turn(Generic[Action]):
    """Passed down instead of kept, so that no machine remembers a time that is over."""

    now: float
    actions: list[Action] = attrs.field(factory=list)

    def add(self, *actions: Action) -> None:
        self.actions.extend(actions)
