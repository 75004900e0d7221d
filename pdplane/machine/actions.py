"""What a machine asks its owner to do, the turn that collects it, and the settings of both roles."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from typing import Generic, TypeAlias, TypeVar

import attrs

from pdplane.errors import PdplaneError
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import RankRoute
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest
from pdplane.machine.events import Channel
from pdplane.messages import Notice, Push, Registration, Status, TopLogprobs


@attrs.frozen(kw_only=True)
class PrefillSettings:
    """Settings of a prefill rank's machine.

    `peer_timeout_s`: how long a half waits for the first word of the other one. `bootstrap_timeout_s`: how long a
    request waits for the other decode ranks after the first, and for peers that cannot say that they stand in line.
    `reoffer_s`: how long it waits for another offer when decode gave the use up just before it came.
    """

    prefill_rank: int = 0
    tp_size: int = 1
    exact: bool = False
    peer_timeout_s: float = 120.0
    bootstrap_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    ping_interval_s: float = 2.0
    ping_misses: int = 3
    idle_peer_s: float = 600.0
    tombstone_s: float = 10.0
    reoffer_s: float = 2.0
    max_peers: int = 1024
    max_rooms: int = 4096


@attrs.frozen(kw_only=True)
class DecodeSettings:
    """Settings of a decode rank's machine.

    `peer_timeout_s`: how long a room waits until its prefill has registered us.
    `one_sided`: the transport writes past the fence and reports nothing; that of legacy ranks always does.
    """

    tp_size: int = 1
    tp_rank: int = 0
    version: str = ""
    peer_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    ping_interval_s: float = 2.0
    ping_misses: int = 3
    tombstone_s: float = 10.0
    late_bytes_s: float = 10.0
    one_sided: bool = False
    quarantine_timeout_s: float = 300.0
    max_rooms: int = 4096


# ---- What a machine asks its owner to do, and the turn that collects these actions


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
class OpenFence:
    """Let exactly these lives of prefill ranks write exactly the manifest's blocks."""

    room: Room
    generation: Generation
    manifest: Manifest
    writers: tuple[tuple[Rank, Life], ...]


@attrs.frozen
class CloseFence:
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
    nbytes: int = 0
    """Bytes of the cache that were sent for this room."""


@attrs.frozen
class Deliver:
    """The caller of this use of the room gets its cache."""

    room: Room
    ticket: int
    delivered: Delivered


DecodeAction: TypeAlias = (
    WakeAt | Fail | LookUp | Connect | Disconnect | Tell | Offer | OpenFence | CloseFence | Deliver | Release
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


# ---- Deadlines by key


Key = TypeVar("Key", bound=Hashable)


class Timers(Generic[Key]):
    """At most one deadline a key; a dropped one costs nothing until it would have come due."""

    def __init__(self) -> None:
        self._at: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: Key) -> bool:
        return key in self._at

    def set(self, key: Key, time: float) -> None:
        self._at[key] = time
        heapq.heappush(self._heap, (time, next(self._order), key))
        if len(self._heap) > 64 + 4 * len(self._at):
            self._heap = [(at, next(self._order), kept) for kept, at in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, key: Key) -> None:
        self._at.pop(key, None)

    def earliest(self) -> float | None:
        heap = self._heap
        while heap and self._at.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)  # dropped, or set anew
        return heap[0][0] if heap else None

    def due(self, now: float) -> Iterator[Key]:
        """Yield each key that is due, removed before it is yielded."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            time, _, key = heapq.heappop(heap)
            if self._at.get(key) == time:
                del self._at[key]
                yield key


PeerKey: TypeAlias = tuple[Endpoint, int]
"""A rendezvous and one data-parallel group behind it."""
PrefillTurn: TypeAlias = Turn[PrefillAction]
DecodeTurn: TypeAlias = Turn[DecodeAction]
PrefillTimers: TypeAlias = Timers[Room | bytes]
"""A machine has one heap of deadlines: of rooms, of the oldest tombstones, and of the connections' silence."""
DecodeTimers: TypeAlias = Timers[Room | PeerKey]
"""Deadlines of rooms, live or in quarantine, of the oldest tombstones, and of the peers' pings."""
