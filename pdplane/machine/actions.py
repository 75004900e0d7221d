"""What a machine asks its owner to do, and the turn that collects these actions."""

from __future__ import annotations

from typing import Generic, TypeAlias, TypeVar

import attrs

from pdplane.errors import PdplaneError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest
from pdplane.kv.routes import RankRoute
from pdplane.machine.events import Channel
from pdplane.messages import Notice, Push, Registration, Status, TopLogprobs


@attrs.frozen
class WakeAt:
    """Feed a Tick to the machine at this time, unless another event comes before."""

    time: float


@attrs.frozen
class Fail:
    """The caller of this use of the room gets this error.

    With `held`, on decode only, the caller may not use the room's blocks again before a Release.
    """

    room: Room
    ticket: int
    error: PdplaneError
    held: bool = False


# ---- prefill


@attrs.frozen
class Send:
    """A status or a notice for one decode rank."""

    identity: bytes
    message: Status | Notice


@attrs.frozen
class OpenData:
    """Connect to the session's data address and report which decode life answers there.

    `arena_base` is the address that its registration named, for transports that write to addresses.
    """

    session: SessionId
    life: Life
    arena_base: int = attrs.field(default=0, eq=False)


@attrs.frozen
class CloseData:
    """Close the connection to this life of the session: nothing is pushed to it any more."""

    session: SessionId
    life: Life


@attrs.frozen
class Destination:
    """One decode rank's side of a room: where the bytes go and in which geometry."""

    session: SessionId
    generation: Generation
    layout: Layout
    route: RankRoute
    manifest: Manifest


@attrs.frozen
class Offered:
    """Every expected decode rank has offered its blocks: work may begin."""

    room: Room
    ticket: int
    prefix_len: int
    prompt_len: int
    destinations: tuple[Destination, ...]


@attrs.frozen(eq=False)
class StartPush:
    """Bytes for one offer; a PushEnded with the same number reports how it ended."""

    session: SessionId
    life: Life
    push: Push
    arena_base: int = 0


@attrs.frozen
class CancelPush:
    """Stop the pushes for this offer at the next segment border; each still ends with a PushEnded."""

    session: SessionId
    life: Life
    room: Room
    generation: Generation


@attrs.frozen
class Succeed:
    """Success has gone out to every decode rank."""

    room: Room
    ticket: int


@attrs.frozen
class Release:
    """Nothing reads the room's source blocks any more; on decode, the held blocks count as safe from late writes."""

    room: Room
    ticket: int


PrefillAction: TypeAlias = (
    WakeAt | Fail | Send | OpenData | CloseData | Offered | StartPush | CancelPush | Succeed | Release
)

# ---- decode


@attrs.frozen
class LookUp:
    """Ask the rendezvous for the data-parallel group that serves this room."""

    bootstrap: Endpoint
    room: Room


@attrs.frozen
class Connect:
    """Open a channel."""

    channel: Channel
    endpoint: Endpoint


@attrs.frozen
class Disconnect:
    """Close a channel; no event comes from it any more."""

    channel: Channel


@attrs.frozen
class Tell:
    """A registration or a notice for one prefill rank."""

    channel: Channel
    message: Registration | Notice


@attrs.frozen
class Offer:
    """The room's blocks for one prefill rank; None for an idle rank."""

    channel: Channel
    room: Room
    manifest: Manifest | None


@attrs.frozen
class OpenWindow:
    """Let exactly these lives of prefill ranks write exactly the manifest's blocks."""

    room: Room
    generation: Generation
    manifest: Manifest
    writers: tuple[tuple[Rank, Life], ...]


@attrs.frozen
class CloseWindow:
    """Nothing may land in the room's blocks from here on."""

    room: Room
    generation: Generation


@attrs.frozen
class Delivered:
    """A prompt's cache is whole in the arena; the values are those of the statuses, merged over the ranks.

    `first_token` is None when prefill sent none; `logprob` is its natural logarithm, or None.
    """

    first_token: int | None
    logprob: float | None
    candidates: tuple[int, ...] | None
    cached_tokens: int
    top: TopLogprobs = ()
    """The likeliest first tokens, when prefill sent them."""


@attrs.frozen
class Deliver:
    """The caller of this use of the room gets its cache."""

    room: Room
    ticket: int
    delivered: Delivered


DecodeAction: TypeAlias = (
    WakeAt | Fail | LookUp | Connect | Disconnect | Tell | Offer | OpenWindow | CloseWindow | Deliver | Release
)


# ---- One call of a machine


Action = TypeVar("Action")


@attrs.define
class Turn(Generic[Action]):
    """The time of one call and its actions; passed down and not kept, so that no machine remembers an old time."""

    now: float
    actions: list[Action] = attrs.field(factory=list)

    def add(self, *actions: Action) -> None:
        self.actions.extend(actions)
