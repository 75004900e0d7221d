"""What transports tell their owner: frozen values, given to one callback from transport threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from pdplane.ids import Generation, Life, Rank, Room, SessionId


@attrs.frozen
class Connected:
    """A sender's greeting was accepted; whoever answers at the session's address has this life.

    `way` is what carries the bytes: tcp, unix, pull, loopback, mooncake.
    """

    session: SessionId
    decode_life: Life
    way: str


@attrs.frozen
class ConnectFailed:
    """A sender got no connection; it tries no more."""

    session: SessionId
    cause: str


@attrs.frozen
class Pushed:
    """Every byte of a push landed, says the receiver."""

    session: SessionId
    room: Room
    generation: Generation
    push: int
    nbytes: int


@attrs.frozen
class PushFailed:
    """A push did not land whole: refused, cancelled, cut, or the sender was closed."""

    session: SessionId
    room: Room
    generation: Generation
    push: int
    cause: str


@attrs.frozen
class Disconnected:
    """A sender's connection is over; the failures of its pushes were reported before this."""

    session: SessionId
    cause: str


@attrs.frozen
class Resumed:
    """A cut left so many pushes unfinished; the sender connects again and repeats them."""

    session: SessionId
    pushes: int
    cause: str


@attrs.frozen
class Landed:
    """A push of this rank ended well; `nbytes` is all that the rank has landed in the room, whole segments only."""

    room: Room
    generation: Generation
    prefill_rank: Rank
    nbytes: int


@attrs.frozen
class WriterCut:
    """The connection of an accepted writer is over."""

    prefill_rank: Rank
    life: Life
    cause: str


Report: TypeAlias = Connected | ConnectFailed | Pushed | PushFailed | Disconnected | Resumed | Landed | WriterCut
OnReport: TypeAlias = Callable[[Report], None]
"""Must not block and must not raise: it runs on the thread that moves bytes."""
