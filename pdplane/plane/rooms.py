"""A caller's handles on rooms, on which each waiting step is one future; and the events of a step loop."""

from __future__ import annotations

import itertools
import math
import operator
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from typing import Generic, Protocol, SupportsIndex, TypeAlias, TypeVar

import attrs

from pdplane.errors import Cause, InternalError, LocalProtocolError, PdplaneError, WaitTimeout, Why
from pdplane.ids import MAX_ROOM, FieldId, GroupId, Room, SessionId
from pdplane.kv.copies import U64, Copies, plan_block_copies
from pdplane.kv.layout import Layout
from pdplane.kv.manifest import Manifest, check_chunk, chunk_positions
from pdplane.machine.actions import Delivered, Destination
from pdplane.messages import MAX_TOP_LOGPROBS, NO_TOKEN, TopLogprobs

T = TypeVar("T")


def open_future() -> Future[T]:
    """Return a future that only its maker ends, even if an asyncio wrapper around it is cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def check_room(room: int) -> Room:
    """Return the number as a Room; raise LocalProtocolError when the wire cannot carry it."""
    return Room(_whole(room, "room", 0, MAX_ROOM))


def _whole(value: SupportsIndex, name: str, low: int, high: int) -> int:
    """Return a plain int for any integer type, since the codecs write no other."""
    number = int(operator.index(value))
    if not low <= number <= high:
        raise LocalProtocolError(f"{name} is {number}, it must be {low}..{high}")
    return number


def _top_logprobs(top: Sequence[tuple[int, float]]) -> TopLogprobs:
    if len(top) > MAX_TOP_LOGPROBS or not all(math.isfinite(logprob) for _, logprob in top):
        raise LocalProtocolError(f"top must be at most {MAX_TOP_LOGPROBS} tokens with finite logprobs")
    return tuple((_whole(token, "a token of top", 0, 2**31 - 1), float(logprob)) for token, logprob in top)


def settle(future: Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def fail(future: Future[T], error: PdplaneError) -> None:
    if not future.done():
        future.set_exception(error)


def _wait(future: Future[T], room: Room, timeout_s: float | None, what: str) -> T:
    try:
        return future.result(timeout_s)
    except TimeoutError:
        if future.done() or timeout_s is None:
            raise
        raise WaitTimeout(room, what, timeout_s) from None


@attrs.frozen
class RoomWindow:
    """What decode asked for: tokens from `prefix_len` up to `prompt_len`, into these destinations."""

    prefix_len: int
    prompt_len: int
    destinations: tuple[Destination, ...]


@attrs.frozen(eq=False)
class PrefillRoom:
    """One use of a room on a prefill rank; made by `PrefillPlane.open`, usable from any thread.

    `window` ends when every decode rank has offered its blocks, `done` when Success has gone out, `released`
    (never with an error) when nothing reads the source blocks any more. A room that fails ends the first two
    with RoomFailed, at once.
    """

    room: Room
    ticket: int
    window: Future[RoomWindow] = attrs.field(factory=open_future, init=False)
    done: Future[None] = attrs.field(factory=open_future, init=False)
    released: Future[None] = attrs.field(factory=open_future, init=False)
    _pushed: dict[FieldId, int] = attrs.field(factory=dict, init=False)  # blocks of the manifest, from its first on
    _layout: Layout
    _push: Callable[[Mapping[SessionId, Copies]], None]
    _finish: Callable[[int, float | None, Sequence[int] | None, int, TopLogprobs], None]
    _cancel: Callable[[Why], None]

    def wait_window(self, timeout_s: float | None = None) -> RoomWindow:
        """Wait until decode's offer is whole and return it.

        Raises RoomFailed when the room ends first, and WaitTimeout, with the room as live as before, after `timeout_s`.
        """
        return _wait(self.window, self.room, timeout_s, "decode's offer")

    def push(
        self,
        source_blocks: Mapping[GroupId, Sequence[int]],
        steps: range | None = None,
        chunk: range | None = None,
    ) -> None:
        """Send these blocks' fields of the given layout steps (all of them by default); return at once.

        `source_blocks` are this arena's ids for the window's slots, in slot order. Those that are sent must not
        change before `released`. With `chunk` only the blocks that these tokens of the prompt complete are sent:
        `slots` names them, and ids of later slots may be missing still. Chunks follow each other without a gap, the
        first one begins at the window's `prefix_len` or before it. A push that fails fails the room. Raises
        LocalProtocolError for blocks that are missing, and for those that were pushed before: decode counts bytes, so
        they would hide others.
        """
        window = self._offered()
        if not window.destinations:
            return  # an idle prefill rank: no decode rank takes bytes of it
        slots = self.slots(chunk)
        fields = None if steps is None else _fields_of(self._layout, steps)
        ours = self._chosen(source_blocks, slots)
        copies = {
            destination.session: plan_block_copies(
                destination.route,
                self._layout,
                ours,
                destination.layout,
                {group_id: ids[_part(slots[group_id])] for group_id, ids in destination.manifest.blocks().items()},
                fields,
            )
            for destination in window.destinations
        }
        self._pushed.update(self._pushed_with(slots, fields))
        self._push({session: found for session, found in copies.items() if len(found.length)})

    def slots(self, chunk: range | None = None) -> dict[GroupId, range]:
        """Return which slots of the window a push of this chunk sends, by group: positions in `source_blocks`.

        They are the blocks that the chunk's tokens complete, the last one of the prompt with its last token; without a
        chunk, all. Raises LocalProtocolError for a chunk outside the prompt.
        """
        window = self._offered()
        prefix_len, prompt_len = window.prefix_len, window.prompt_len
        if chunk is not None:
            check_chunk(self._layout, prefix_len, prompt_len, chunk)
        tokens = range(prompt_len) if chunk is None else chunk
        return {
            spec.group_id: chunk_positions(spec, prefix_len, prompt_len, tokens) for spec in self._layout.group_specs
        }

    def finish(
        self,
        first_token: int | None = None,
        logprob: float | None = None,
        candidates: Sequence[int] | None = None,
        cached_tokens: int = 0,
        top: Sequence[tuple[int, float]] = (),
    ) -> Future[None]:
        """Send Success with these values once every push is acknowledged; return `done`.

        `top` are the likeliest first tokens with their logprobs; native decode ranks get them, at most 20.
        Without a first token decode is told that there is none: for engines that draw it on decode. Raises
        LocalProtocolError for values that no status can carry, and when a decode rank of the older generation takes
        part, which cannot do without.
        """
        window = self._offered()
        if first_token is None and not all(destination.generation for destination in window.destinations):
            raise LocalProtocolError(f"room {self.room}: a legacy decode rank takes part, it needs a first token")
        token = NO_TOKEN if first_token is None else _whole(first_token, "first_token", 0, 2**31 - 1)
        chosen = tuple(_whole(candidate, "a candidate", -(2**31), 2**31 - 1) for candidate in candidates or ())
        cached = _whole(cached_tokens, "cached_tokens", 0, 2**63 - 1)
        self._finish(token, logprob, chosen, cached, _top_logprobs(top))
        return self.done

    def cancel(self, text: str = "cancelled by the caller", cause: Cause = Cause.CANCELLED) -> None:
        """End the room and tell decode; return at once, harmless after the end."""
        self._cancel(Why(cause, text))

    def _chosen(
        self, source_blocks: Mapping[GroupId, Sequence[int]], slots: Mapping[GroupId, range]
    ) -> dict[GroupId, Sequence[int]]:
        """Return the ids of these slots. Raises LocalProtocolError that says which are wanted and missing."""
        whole = self.slots()
        for group_id, ids in source_blocks.items():
            if group_id not in whole:
                raise LocalProtocolError(f"room {self.room}: source_blocks name the unknown group {group_id!r}")
            if len(ids) > whole[group_id].stop:
                raise LocalProtocolError(
                    f"room {self.room}: source_blocks have {len(ids)} blocks of group {group_id!r}, "
                    f"the window has {whole[group_id].stop} slots"
                )
        found: dict[GroupId, Sequence[int]] = {}
        for group_id, wanted in slots.items():
            ids = source_blocks.get(group_id, ())
            if wanted and len(ids) < wanted.stop:
                raise LocalProtocolError(
                    f"room {self.room}: this push sends the slots {wanted.start} to {wanted.stop - 1} of group "
                    f"{group_id!r}, source_blocks have {len(ids)} blocks of it"
                )
            found[group_id] = ids[_part(wanted)]
        return found

    def _pushed_with(self, slots: Mapping[GroupId, range], fields: frozenset[FieldId] | None) -> dict[FieldId, int]:
        """Return how many blocks of each of these fields are pushed with these slots."""
        found = {}
        for group_id, blocks in slots.items():
            for field in self._layout.fields_of(group_id) if blocks else ():
                if fields is not None and field.field_id not in fields:
                    continue
                if blocks.start < self._pushed.get(field.field_id, 0):
                    raise LocalProtocolError(f"room {self.room}: blocks of {field.field_id} were pushed before")
                found[field.field_id] = blocks.stop
        return found

    def _offered(self) -> RoomWindow:
        if not self.window.done():
            raise LocalProtocolError(f"room {self.room} has no window yet: wait for it first")
        return self.window.result()

    def fail(self, error: PdplaneError) -> None:
        """Fail whatever still waits except `released`; called by the plane."""
        fail(self.window, error)
        fail(self.done, error)

    def end(self, error: PdplaneError) -> None:
        """Fail whatever still waits, and release; called by the plane when nothing reads the blocks any more."""
        self.fail(error)
        settle(self.released, None)


@attrs.frozen(eq=False)
class DecodeRoom:
    """One use of a room on a decode rank; made by `DecodePlane.open`, usable from any thread.

    `done` ends with what was delivered, or with RoomFailed. `released` ends, never with an error, when the blocks
    belong to the caller again, since nothing lands in them any more. Both end together, except when a room fails while
    somebody can write past the fence (legacy peers, one-sided transports): then `released` ends later, when every such
    writer has reported Success or the quarantine is over.
    """

    room: Room
    ticket: int
    done: Future[Delivered] = attrs.field(factory=open_future, init=False)
    released: Future[None] = attrs.field(factory=open_future, init=False)
    _cancel: Callable[[Why], None]
    _offer: Callable[[Manifest], None]
    on_landed: Callable[[U64, U64], None] | None = None

    def wait(self, timeout_s: float | None = None) -> Delivered:
        """Wait until the cache is whole and return its values.

        Raises RoomFailed when the room ends otherwise, and WaitTimeout after `timeout_s`: then the room is as live as
        before and its blocks still belong to it. Wait again, or cancel it and wait for `released`.
        """
        return _wait(self.done, self.room, timeout_s, "the cache")

    def offer(self, manifest: Manifest) -> None:
        """Offer blocks for a room that was opened without; return at once, harmless after the end.

        They belong to the room until `released`. Raises WireError for a manifest that does not fit the layout.
        """
        self._offer(manifest)

    def cancel(self, text: str = "cancelled by the caller", cause: Cause = Cause.CANCELLED) -> None:
        """End the room and tell prefill; return at once, harmless after the end."""
        self._cancel(Why(cause, text))

    def deliver(self, delivered: Delivered) -> None:
        """Deliver the whole cache, and release its blocks to the caller; called by the plane."""
        settle(self.released, None)
        settle(self.done, delivered)

    def fail(self, error: PdplaneError) -> None:
        """Fail whatever still waits except `released`; called by the plane."""
        fail(self.done, error)

    def end(self, error: PdplaneError) -> None:
        """Release the blocks, and then fail whatever still waits; called by the plane."""
        settle(self.released, None)
        self.fail(error)


def _part(slots: range) -> slice:
    return slice(slots.start, slots.stop)


@lru_cache(maxsize=256)
def _fields_of(layout: Layout, steps: range) -> frozenset[FieldId]:
    found = layout.steps
    if any(not 0 <= step < len(found) for step in steps):
        raise LocalProtocolError(f"steps {steps} are outside 0..{len(found) - 1}")
    return frozenset(field for step in steps for field in found[step])


def broken(error: Exception) -> InternalError:
    return InternalError(f"the control thread ended by a bug: {error!r}")


# ---- What a scheduler's step loop polls instead of waiting on futures


@attrs.frozen
class RoomWindowed:
    """Decode's offer is whole: compute and push."""

    room: Room
    ticket: int
    window: RoomWindow


@attrs.frozen
class RoomOffered:
    """Every prefill rank knows this decode; the room's blocks are offered to them."""

    room: Room
    ticket: int


@attrs.frozen
class RoomDelivered:
    """The cache is whole in the arena."""

    room: Room
    ticket: int
    delivered: Delivered


@attrs.frozen
class RoomSucceeded:
    """Success has gone out."""

    room: Room
    ticket: int


@attrs.frozen
class RoomReleased:
    """The source blocks are free."""

    room: Room
    ticket: int


@attrs.frozen
class RoomEnded:
    """The room failed."""

    room: Room
    ticket: int
    error: PdplaneError


@attrs.frozen
class EventsLost:
    """Nobody polled for so long that this many events were dropped: look at the rooms' futures instead."""

    count: int


PlaneEvent: TypeAlias = (
    RoomWindowed | RoomOffered | RoomDelivered | RoomSucceeded | RoomReleased | RoomEnded | EventsLost
)


# ---- The live handles of a plane by ticket, and what a step loop polls


class Endable(Protocol):
    """A handle that the plane can fail."""

    @property
    def ticket(self) -> int: ...

    def end(self, error: PdplaneError) -> None: ...


Handle = TypeVar("Handle", bound=Endable)


class Handles(Generic[Handle]):
    """The handles of live rooms by ticket: callers add them, the reactor's thread takes them out."""

    def __init__(self, *, record: bool, max_rooms: int) -> None:
        self._lock = threading.Lock()
        self._live: dict[int, Handle] = {}
        self._tickets = itertools.count(1)
        self._record = record
        self._told: deque[PlaneEvent] = deque(maxlen=8 * max_rooms)
        self._lost = 0
        self._over: PdplaneError | None = None

    def __len__(self) -> int:
        return len(self._live)

    def ticket(self) -> int:
        """Return the number of a new use of a room, from 1."""
        return next(self._tickets)

    def add(self, handle: Handle) -> None:
        """Keep a handle; after `fail_all` it fails at once, since nothing else would end it."""
        with self._lock:
            if self._over is None:
                self._live[handle.ticket] = handle
                return
        handle.end(self._over)

    def get(self, ticket: int) -> Handle | None:
        return self._live.get(ticket)

    def pop(self, ticket: int) -> Handle | None:
        with self._lock:
            return self._live.pop(ticket, None)

    def fail_all(self, error: PdplaneError) -> None:
        """Fail every handle, and from now on every new one, since the plane has ended."""
        with self._lock:
            self._over = self._over or error
            handles, self._live = list(self._live.values()), {}
        for handle in handles:
            handle.end(error)

    def record(self, event: PlaneEvent) -> None:
        if self._record:
            with self._lock:
                self._lost += len(self._told) == self._told.maxlen
                self._told.append(event)

    def poll(self) -> list[PlaneEvent]:
        """Return the events since the last call; raise LocalProtocolError when none are recorded."""
        if not self._record:
            raise LocalProtocolError("poll() needs record_events=True in the plane's config")
        with self._lock:
            found, lost = list(self._told), self._lost
            self._told.clear()
            self._lost = 0
        return [EventsLost(lost), *found] if lost else found
