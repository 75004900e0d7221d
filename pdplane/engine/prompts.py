"""The line of prompts in front of the MLX thread: whose chunk is computed next.

First come, first served, one chunk a turn: of three queued prompts the first is done after its own chunks, not after
those of all. A prompt of one chunk does not wait for the chunks of a longer one, since it costs that one a single turn;
it goes first, `MAX_OVERTAKES` times in a row at most, so that a stream of short prompts stops no long one. The last
token is part of the last chunk's turn and waits for nobody's chunk.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

MAX_OVERTAKES = 8


class Cancellable(Protocol):
    """What the line needs of a prompt's job."""

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled, so that its next turn ends it and costs nothing."""


P = TypeVar("P", bound=Cancellable)


class PromptLine(Generic[P]):
    """The prompts that wait for a turn. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.is_served = False
        """Whether a turn that takes the next prompt is queued or under way; set by the owner."""
        self._short: deque[P] = deque()
        self._long: deque[P] = deque()
        self._overtakes = 0

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def add(self, prompt: P, chunks: int) -> None:
        """Put a new prompt of that many chunks in its place."""
        (self._long if chunks > 1 else self._short).append(prompt)

    def take(self) -> P | None:
        """Take out and return the prompt that has the next turn; None when none waits."""
        for waiting in (self._short, self._long):
            for prompt in waiting:
                if prompt.cancelled:
                    waiting.remove(prompt)
                    return prompt
        if self._short and (not self._long or self._overtakes < MAX_OVERTAKES):
            self._overtakes += 1
            return self._short.popleft()
        self._overtakes = 0
        return self._long.popleft() if self._long else None

    def resume(self, prompt: P) -> None:
        """Put the prompt that had the last turn back: it is the first of the long ones."""
        self._long.appendleft(prompt)
