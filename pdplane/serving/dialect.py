"""What a dialect consists of: how its requests are read and its answers are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from pdplane.serving.answer import Piece, TextAnswer
from pdplane.serving.asked import Asked, Served

Event: TypeAlias = Mapping[str, Any]


class AnswerWriter(Protocol):
    """Writes one request's answers: it gets each piece by `keep` or by `events`, never by both."""

    def keep(self, piece: Piece) -> None:
        """Take a piece of a whole answer."""

    def events(self, piece: Piece) -> Sequence[Event]:
        """Return the events of a stream that carry this piece."""

    def last(self) -> Sequence[Event]:
        """Return the events after all answers are over."""

    def whole(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        """Return the JSON of all answers."""


class Dialect(Protocol):
    """One shape of requests and answers."""

    @property
    def paths(self) -> Sequence[str]:
        """Its routes."""

    @property
    def marks(self) -> bool:
        """Whether its writer looks for the marks of thoughts and calls."""

    def read(self, data: bytes, served: Served) -> Asked:
        """Return a body as a checked value. Raises ConfigError that names the field."""

    def writer(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> AnswerWriter:
        """Return the writer of this request's answers."""
