"""The values that travel between a prefill rank and a decode rank.

Three of them are the legacy wire's (registration, pre-allocation, status); notices are our own
and go between native peers only. Bytes are made of them in `pdplane.wire`, decisions in
`pdplane.machine`; this module knows neither.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import TypeAlias

import attrs

from pdplane.errors import Cause, Why
from pdplane.ids import Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import Copies


@attrs.frozen
class Route:
    """Where statuses for a decode rank go, and the session that it registers."""

    host: str
    port: int
    session: SessionId


_LEGACY = b"legacy "


def legacy_identity(route: Route) -> bytes:
    """Return the identity of a legacy decode rank, which no connection names: its address and session."""
    return _LEGACY + f"{route.host} {route.port} {route.session}".encode("ascii")


def is_legacy(identity: bytes) -> bool:
    """Return whether the identity is a legacy peer's, which anybody can name and which sends no pings."""
    return identity.startswith(_LEGACY)


@attrs.frozen
class Registration:
    """A decode rank's arena, as it asks a prefill rank to write into it.

    `layout` is the layout JSON as it travelled; `arena_base` the address of the arena's first byte.
    """

    host: str
    port: int
    session: SessionId
    arena_base: int
    layout: bytes
    tp_size: int
    tp_rank: int

    @property
    def route(self) -> Route:
        return Route(self.host, self.port, self.session)


@attrs.frozen
class Preallocation:
    """A decode rank's blocks for a room; `manifest` is its JSON, empty for a decode rank that gets no bytes."""

    room: Room
    session: SessionId
    manifest: bytes


class StatusCode(enum.Enum):
    """The wire's numbers. They are names only: never compared by size (Failed is the lowest)."""

    FAILED = 0
    BOOTSTRAPPING = 1
    BOOTSTRAPPED = 2
    WAITING_FOR_INPUT = 3
    TRANSFERRING = 4
    SUCCESS = 5


NO_TOKEN = -1  # what stands in a status for a first token that there is not


TopLogprobs: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens at one place of an answer and their natural logprobs, the likeliest first."""

MAX_TOP_LOGPROBS = 20


@attrs.frozen
class Status:
    """A prefill rank's report on a room.

    `logprob` is the first token's, as the 8 little-endian bytes of the wire, so that NaN bits survive. `top` has no
    frame: a native peer says it in the `window` before the status.
    """

    room: Room
    code: StatusCode
    prefill_rank: Rank
    first_token: int = NO_TOKEN
    candidates: tuple[int, ...] | None = None
    cached_tokens: int = 0
    logprob: bytes | None = None
    top: TopLogprobs = ()

    @property
    def first_logprob(self) -> float | None:
        """The first token's natural logarithm, when the status carries one."""
        return None if self.logprob is None else float(struct.unpack("<d", self.logprob)[0])


@attrs.frozen
class Fingerprint:
    """What two sides must share beyond the layout for equal tokens, as texts by name.

    `required` must agree or the registration is refused; `advisory` only costs bit-equality:
    a difference is a warning, or a refusal under `--exact`.
    """

    required: tuple[tuple[str, str], ...] = ()
    advisory: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Hello:
    """The first notice of a native decode rank on a connection: its life and what it runs."""

    version: str
    life: Life
    fingerprint: Fingerprint = Fingerprint()


@attrs.frozen
class Registered:
    """A prefill rank accepted the session; names the life that will write."""

    session: SessionId
    life: Life


@attrs.frozen
class Refused:
    """A prefill rank refuses the session: the field that differs and both values."""

    session: SessionId
    field: str
    ours: str
    theirs: str
    cause: Cause = Cause.REFUSED


@attrs.frozen
class Window:
    """Goes before each pre-allocation: the generation of the room's blocks and the hash of the prompt's tokens.

    Prefill sends it before a status, with the likeliest first tokens if they are wanted.
    """

    room: Room
    generation: Generation
    prompt_hash: str
    top: TopLogprobs = ()

    def names(self, room: Room, generation: Generation) -> bool:
        return (self.room, self.generation) == (room, generation)


@attrs.frozen
class Queued:
    """Decode has its half of a room, which stands in line for blocks: prefill's half waits longer than for silence."""

    room: Room
    session: SessionId
    generation: Generation
    prompt_hash: str


@attrs.frozen
class UnknownSession:
    """A prefill rank got a room of a session that it does not know: register again and send the room again."""

    room: Room
    session: SessionId


@attrs.frozen
class Failed:
    """Why a use of a room ended on the prefill side."""

    room: Room
    generation: Generation
    why: Why


@attrs.frozen
class Cancel:
    """Why a use of a room ended on the decode side."""

    room: Room
    generation: Generation
    why: Why


@attrs.frozen
class Ping:
    """Sent by both sides while nothing else is; carries the sender's life."""

    life: Life


@attrs.frozen
class Drain:
    """The sender takes no new rooms and exits when the live ones have ended."""

    text: str


# ---- Facts that the data plane and the machines share


PushKey: TypeAlias = tuple[Room, Generation, int]


@attrs.frozen(eq=False)
class Push:
    """Bytes of a room to write into the receiver's arena.

    `push` numbers the pushes of a room, 0 to 2**32-1. To repeat one after a cut, submit it again under the
    same number with the same copies: segments that had landed count once.
    """

    room: Room
    generation: Generation
    push: int
    copies: Copies

    @property
    def key(self) -> PushKey:
        return self.room, self.generation, self.push


@attrs.frozen
class Landed:
    """A push of this rank ended well; `nbytes` counts all whole segments of the rank in the room so far."""

    room: Room
    generation: Generation
    prefill_rank: Rank
    nbytes: int


@attrs.frozen
class WriterCut:
    """The data connection of one life of a prefill rank ended; it had been accepted as a writer."""

    prefill_rank: Rank
    life: Life
    text: str


def hash_prompt(tokens: Iterable[int]) -> str:
    """Return a name for a prompt: SHA-256 over its token ids as little-endian i64, the first 32 hex digits."""
    ids = array("q", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()[:32]


Notice: TypeAlias = Hello | Registered | Refused | Window | Queued | UnknownSession | Failed | Cancel | Ping | Drain
