"""Stop strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Lets text through up to the first stop string, and holds back what may become one.

    `matched` names the stop string once it was found; nothing comes through after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take a piece, return the text that is safe to show."""
        if self.matched is not None:
            return ""
        self._held += piece
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            index, self.matched = min(found)
            shown, self._held = self._held[:index], ""
            return shown
        kept = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)
