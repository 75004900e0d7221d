"""What a way of asking over HTTP consists of: how its requests are read and its answers are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from pdplane.serving.answer import Piece, TextAnswer
from pdplane.serving.asked import Asked, Served

Event: TypeAlias = Mapping[str, Any]


class AnswerWriter(Protocol):
    """Writes one request's answers: told of each piece by `keep` or by `events`, never by both."""

    def keep(self, piece: Piece) -> None:
        """For a whole answer: take what is new."""

    def events(self, piece: Piece) -> Sequence[Event]:
        """For a stream: the events that tell what is new."""

    def last(self) -> Sequence[Event]:
        """The events after all answers are over."""

    def whole(self) -> Any:  # noqa: ANN401  (JSON is what it is)
        """The JSON of all answers."""


class Dialect(Protocol):
    """One shape of requests and answers."""

    @property
    def paths(self) -> Sequence[str]:
        """Where it is spoken."""

    @property
    def marks(self) -> bool:
        """Whether its writer looks for the marks of thoughts and calls."""

    def read(self, data: bytes, served: Served) -> Asked:
        """A body as a checked value. Raises ConfigError that names the field."""

    def writer(self, asked: Asked, served: Served, answers: Sequence[TextAnswer]) -> AnswerWriter:
        """Writes the answers to this request."""
