"""What lies between linked machines: a clock, and queues of letters that a test delivers, loses or mixes up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import attrs

QueueName: TypeAlias = tuple[str, int, int]
"""Kind, sender's rank, receiver's rank."""

CONTROL = ("up", "down")
"""The kinds of queue that a test may harm at will; the others always keep their promises."""


@attrs.frozen(eq=False)
class Letter:
    """One delivery. `parts` are given over one after the other.

    A window notice and the frame that it names are one letter: a channel keeps their order, or loses the rest of it.
    """

    text: str
    parts: tuple[Callable[[], None], ...]


@attrs.define
class Net:
    """Queues by name, first in first out unless a test meddles, and the virtual time in seconds."""

    now: float = 0.0
    _queues: dict[QueueName, deque[Letter]] = attrs.field(factory=dict, init=False)
    log: deque[str] = attrs.field(factory=lambda: deque(maxlen=200), init=False)

    def post(self, queue: QueueName, letter: Letter, *, first: bool = False) -> None:
        letters = self._queues.setdefault(queue, deque())
        (letters.appendleft if first else letters.append)(letter)

    @property
    def waiting(self) -> list[QueueName]:
        """The queues that hold letters, in a fixed order."""
        return sorted(name for name, letters in self._queues.items() if letters)

    def length(self, queue: QueueName) -> int:
        return len(self._queues.get(queue, ()))

    # ---- what a test does to them

    def deliver(self, queue: QueueName) -> None:
        """Hand the first letter over."""
        letter = self._queues[queue].popleft()
        self.log.append(f"{self.now:.1f} {queue} {letter.text}")
        for part in letter.parts:
            part()

    def drop(self, queue: QueueName) -> None:
        """Lose the first letter."""
        letter = self._queues[queue].popleft()
        self.log.append(f"{self.now:.1f} {queue} LOST {letter.text}")

    def tear(self, queue: QueueName) -> None:
        """Lose the last part of the first letter."""
        letter = self._queues[queue].popleft()
        self.log.append(f"{self.now:.1f} {queue} TORN {letter.text}")
        if kept := letter.parts[:-1]:
            self._queues[queue].appendleft(attrs.evolve(letter, parts=kept))

    def duplicate(self, queue: QueueName) -> None:
        """The first letter comes now, and once more after all that wait behind it."""
        self.log.append(f"{self.now:.1f} {queue} TWICE {self._queues[queue][0].text}")
        self._queues[queue].append(self._queues[queue][0])

    def postpone(self, queue: QueueName) -> None:
        """The first letter comes last."""
        self.log.append(f"{self.now:.1f} {queue} LATE {self._queues[queue][0].text}")
        self._queues[queue].rotate(-1)

    def clear(self, kind: str, sender: int | None, receiver: int | None) -> None:
        """Forget the letters of a connection; None stands for every rank."""
        for name, letters in self._queues.items():
            if name[0] == kind and sender in (None, name[1]) and receiver in (None, name[2]):
                letters.clear()
