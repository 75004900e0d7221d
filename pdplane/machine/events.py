"""The events that a machine takes; the time is an argument beside them.

`ticket` is the plane's own number of one use of a room, so that a handle of an ended room cannot touch a later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import attrs

from pdplane.errors import Why
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest
from pdplane.messages import Landed, Notice, Registration, Route, Status, TopLogprobs, WriterCut


@attrs.frozen
class Tick:
    """Nothing but time has passed."""


@attrs.frozen
class Closing:
    """The plane shuts down: every live room ends and its peers are told."""

    text: str


@attrs.frozen
class Draining:
    """This prefill rank takes no new rooms; those that it has go on."""

    text: str


@attrs.frozen
class RoomCancelled:
    """The caller on this side cancelled the room."""

    room: Room
    ticket: int
    why: Why


# ---- events of a prefill rank


@attrs.frozen
class NoticeReceived:
    """A notice of a native decode rank; `address` is where its connection comes from."""

    identity: bytes
    notice: Notice
    address: str = ""


@attrs.frozen
class RegistrationReceived:
    """A well-formed registration with its layout parsed."""

    identity: bytes
    registration: Registration
    layout: Layout
    address: str = ""


@attrs.frozen
class RegistrationRejected:
    """A registration that cannot be used; `route` is None when not even the address for statuses was readable."""

    identity: bytes
    route: Route | None
    field: str
    reason: str
    address: str = ""


@attrs.frozen
class PreallocationReceived:
    """Blocks for a room; the manifest is None from a decode rank that gets no bytes."""

    identity: bytes
    room: Room
    session: SessionId
    manifest: Manifest | None


@attrs.frozen
class PreallocationRejected:
    """A pre-allocation whose room is readable and whose manifest is not."""

    identity: bytes
    room: Room
    session: SessionId
    reason: str


@attrs.frozen
class Undeliverable:
    """A message could not be sent to this identity: its connection is gone."""

    identity: bytes


@attrs.frozen
class DataConnected:
    """The data connection opened for `life` stands; `decode_life` answered at the session's address."""

    session: SessionId
    life: Life
    decode_life: Life


@attrs.frozen
class DataLost:
    """The data connection opened for `life` could not be made, or is gone."""

    session: SessionId
    life: Life
    text: str


@attrs.frozen
class PrefillRequested:
    """A caller wants to prefill a room; length and hash of the prompt when it knows them already."""

    room: Room
    ticket: int
    prompt_len: int | None
    prompt_hash: str | None


@attrs.frozen(eq=False)
class PushRequested:
    """A caller hands over bytes for the room's sessions."""

    room: Room
    ticket: int
    copies: Mapping[SessionId, Copies]


@attrs.frozen
class PushEnded:
    """One push was acknowledged (`text` None) or failed."""

    session: SessionId
    room: Room
    generation: Generation
    push: int
    text: str | None


@attrs.frozen
class RoomFinished:
    """The caller has pushed everything; these values go out with Success."""

    room: Room
    ticket: int
    first_token: int
    logprob: bytes | None
    candidates: tuple[int, ...] | None
    cached_tokens: int
    top: TopLogprobs = ()


PrefillEvent: TypeAlias = (
    Tick
    | Draining
    | Closing
    | RoomCancelled
    | NoticeReceived
    | RegistrationReceived
    | RegistrationRejected
    | PreallocationReceived
    | PreallocationRejected
    | Undeliverable
    | DataConnected
    | DataLost
    | PrefillRequested
    | PushRequested
    | PushEnded
    | RoomFinished
)

# ---- events of a decode rank


@attrs.frozen
class Channel:
    """One connection of this decode rank: to one life of one prefill rank behind one rendezvous.

    A legacy prefill rank does not name its life: the empty one stands for it.
    """

    bootstrap: Endpoint
    prefill_rank: Rank
    life: Life
    dp_group: int = 0
    is_legacy: bool = attrs.field(init=False, eq=False, repr=False)

    @is_legacy.default
    def _has_no_life(self) -> bool:
        return not self.life


@attrs.frozen
class PeerRank:
    """Where one prefill rank listens, and which life of it; an empty one for a legacy rank."""

    prefill_rank: Rank
    endpoint: Endpoint
    life: Life


@attrs.frozen
class DecodeRequested:
    """A caller wants a room filled by the prefill behind `bootstrap`.

    The manifest names its blocks; None when it stands in line for them, and then a BlocksGiven follows.
    """

    room: Room
    ticket: int
    bootstrap: Endpoint
    manifest: Manifest | None
    prompt_hash: str


@attrs.frozen
class BlocksGiven:
    """A caller that stood in line has its blocks."""

    room: Room
    ticket: int
    manifest: Manifest


@attrs.frozen
class DecodeDeclined:
    """A caller has no blocks for a room that the prefill behind `bootstrap` has been or will be asked for."""

    room: Room
    ticket: int
    bootstrap: Endpoint
    prompt_hash: str
    why: Why


@attrs.frozen
class PeerFound:
    """The rendezvous knows every rank of the data-parallel group that serves the room."""

    room: Room
    bootstrap: Endpoint
    dp_group: int
    dp_size: int
    layout: Layout
    ranks: tuple[PeerRank, ...]


@attrs.frozen
class PeerMissing:
    """The rendezvous gave no usable answer in time."""

    room: Room
    bootstrap: Endpoint
    why: Why


@attrs.frozen
class NoticeFromPrefill:
    """A notice of a native prefill rank."""

    channel: Channel
    notice: Notice


@attrs.frozen
class ChannelBroken:
    """The channel cannot be opened."""

    channel: Channel
    why: Why


@attrs.frozen
class StatusFromPrefill:
    """A status arrived on this channel; `generation` is None unless the channel knows which use it is for."""

    channel: Channel
    status: Status
    generation: Generation | None = None


DecodeEvent: TypeAlias = (
    Tick
    | Closing
    | RoomCancelled
    | DecodeRequested
    | BlocksGiven
    | DecodeDeclined
    | PeerFound
    | PeerMissing
    | ChannelBroken
    | NoticeFromPrefill
    | StatusFromPrefill
    | Landed
    | WriterCut
)
