"""One answer as it grows: tokens become text, up to a stop."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import attrs

from pdplane.api import Finished, FinishReason, Token, Tokenizer
from pdplane.serving.asked import Asked


class StopText:
    """Passes text up to the first stop string, and holds back what may become one.

    `matched` names the stop string once it was found; nothing passes after it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str) -> str:
        """Take a piece; return the text that is safe to show."""
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
        """Return the text that was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)


@attrs.frozen
class AnswerEnd:
    """Why an answer is over; `matched` is the stop string or the stop token."""

    reason: FinishReason
    matched: str | int | None = None


@attrs.frozen
class Piece:
    """What is new of the answer with this index: text that is safe to show, and tokens, which may run ahead of it."""

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    ending: AnswerEnd | None = None


class TextAnswer:
    """Tokens and text so far. Stop tokens count as tokens and add no text."""

    def __init__(self, asked: Asked, index: int, tokenizer: Tokenizer, *, marks: bool) -> None:
        self.index, self.prompt_tokens = index, len(asked.answers[index].prompt)
        self._detokenizer = tokenizer.detokenizer(marks=marks)
        self._silent = asked.stop_ids if asked.ignore_eos else asked.stop_ids | tokenizer.eos_ids
        self._stop_text = StopText(asked.stop)
        self._finished: Finished | None = None
        self.began = time.monotonic()
        self.first_token_s: float | None = None
        self.tokens: list[Token] = []
        self.text = ""
        self.ending: AnswerEnd | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was found, so that the answer is over, whatever the node still sends."""
        return self._stop_text.matched is not None

    @property
    def cached_tokens(self) -> int:
        """Of the prompt, known at the end."""
        return 0 if self._finished is None else self._finished.cached_tokens

    @property
    def timings(self) -> Mapping[str, float]:
        """The node's, and when the first token came."""
        ours = {} if self.first_token_s is None else {"first_token_ms": 1000 * self.first_token_s}
        return ours if self._finished is None else {**ours, **self._finished.timings}

    def add(self, tokens: Iterable[Token], finished: Finished | None = None) -> Piece:
        """Take tokens up to the one that completes a stop string, and how the node ended."""
        before, text = len(self.tokens), ""
        for token in tokens:
            if self.ending is not None:
                break
            text += self._take(token)
        if finished is not None and self.ending is None:
            text += self._finish(finished)
        self.text += text
        return Piece(self.index, text, tuple(self.tokens[before:]), self.ending)

    def _take(self, token: Token) -> str:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic() - self.began
        self.tokens.append(token)
        if token.id in self._silent:
            return ""
        text = self._stop_text.feed(self._detokenizer.add(token.id))
        if self.is_stopped:
            self.ending = AnswerEnd("stop", self._stop_text.matched)
        return text

    def _finish(self, finished: Finished) -> str:
        self._finished = finished
        text = self._stop_text.feed(self._detokenizer.finish())
        if self.is_stopped:
            self.ending = AnswerEnd("stop", self._stop_text.matched)
            return text
        matched = self.tokens[-1].id if self.tokens and finished.reason == "stop" else None
        self.ending = AnswerEnd(finished.reason, matched)
        return text + self._stop_text.flush()
