"""Every exception that pdplane raises on purpose, and the causes that they tell.

    PdplaneError
    +- ProtocolError                 abstract: says who is wrong
    |  +- LocalProtocolError         (reason, cause) our own illegal move: a bug, never caught by name
    |  +- RemoteProtocolError        the peer is wrong: fail its room or session, keep serving
    |     +- WireError               (field, reason)
    |     +- LayoutMismatch          (field, ours, theirs)
    |     +- IncompatibleCache       (field, ours, theirs)
    +- RoomFailed                    (room, cause, story)
    +- WaitTimeout                   (room, what, timeout_s); also a TimeoutError: nothing has ended
    +- SessionLost                   (session, cause)
    +- TransferError                 (endpoint, done, total, cause)
    +- RendezvousError               (url, status, reason)
    +- PoolExhausted                 (wanted, free)
    +- ConfigError                   (reason) also a ValueError; raised before anything starts
    +- InternalError                 (reason) "cannot happen"

Every error has a `cause`, by which programs decide: texts are for people. The text of an
error is made from its fields, and every error survives pickling.
"""

from __future__ import annotations

import enum

import attrs


class Cause(enum.Enum):
    """What happened. The values stand in notices between peers and in the JSON of HTTP errors."""

    CANCELLED = "cancelled"
    """Whoever asked for it, on either side, gave it up."""
    UNMATCHED = "unmatched"
    """The other half of the request did not come in time."""
    TIMED_OUT = "timed_out"
    """Both halves were there, and it was not done in time."""
    UNREACHABLE = "unreachable"
    """The other side could not be found, or does not answer where it should be."""
    PEER_LOST = "peer_lost"
    """The other side fell silent, restarted or cut its connection."""
    PEER_FAILED = "peer_failed"
    """The other side says that it failed, and no more than that."""
    REFUSED = "refused"
    """The two sides do not fit: other caches, models, versions or prompts."""
    TRANSFER = "transfer"
    """Bytes did not arrive."""
    FULL = "full"
    """No blocks, no room for another request, no place in the line."""
    LIVE = "room_is_live"
    """The room number is in use, or was a moment ago by a peer that cannot tell uses apart."""
    CLOSING = "closing"
    """This side, or the other one, takes no requests: it has not started, drains or shuts down."""
    BAD_REQUEST = "bad_request"
    """No side could ever serve the request as it is."""
    INTERNAL = "internal"
    """A fault of our own."""

    @classmethod
    def read(cls, word: object, default: Cause) -> Cause:
        """Return the cause that a peer named, or `default` for a name of another version."""
        return next((cause for cause in cls if cause.value == word), default)

    @property
    def of_peer(self) -> Cause:
        """What the other side's cause is to us: its own fault is not ours."""
        return Cause.PEER_FAILED if self is Cause.INTERNAL else self


@attrs.frozen
class Why:
    """Why something ended: the cause, and the words for people."""

    cause: Cause
    text: str


@attrs.frozen(eq=False)
class PdplaneError(Exception):
    """Base of every error that pdplane raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        fields = attrs.fields(type(self))
        return type(self), tuple(getattr(self, field.name) for field in fields)

    @property
    def cause(self) -> Cause:
        """What happened."""
        return Cause.INTERNAL

    @property
    def why(self) -> Why:
        """The cause and the text, to pass on."""
        return Why(self.cause, str(self))


@attrs.frozen(eq=False)
class ProtocolError(PdplaneError):
    """A rule of the protocol was broken; the subclass says by whom."""


@attrs.frozen(eq=False)
class LocalProtocolError(ProtocolError):
    """Our own side asked for an illegal move: a bug in the caller, or a request at the wrong time."""

    reason: str
    cause: Cause = Cause.INTERNAL

    def __str__(self) -> str:
        return self.reason


@attrs.frozen(eq=False)
class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; its room or session fails and we keep serving."""

    @property
    def cause(self) -> Cause:
        return Cause.REFUSED


@attrs.frozen(eq=False)
class WireError(RemoteProtocolError):
    """Bytes that are no message: the field at fault and the reason, which is the text."""

    field: str
    reason: str

    @property
    def kind(self) -> str:
        """The field without places in lists: a name for counts, of which a peer cannot make more."""
        return self.field.partition("[")[0]

    def __str__(self) -> str:
        return self.reason


@attrs.frozen(eq=False)
class LayoutMismatch(RemoteProtocolError):
    """The two sides' caches (or models) differ in one named field; `advice` says what would make them agree."""

    field: str
    ours: str
    theirs: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f" ({self.advice})" if self.advice else ""
        return f"{self.field} differs: ours {self.ours}, theirs {self.theirs}{advice}"


@attrs.frozen(eq=False)
class IncompatibleCache(RemoteProtocolError):
    """A saved cache belongs to another model, version or prompt; one named field differs."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} differs: ours {self.ours}, the cache's {self.theirs}"


@attrs.frozen(eq=False)
class RoomFailed(PdplaneError):
    """What a caller that waits for one request sees; `story` is the room's path of states."""

    room: int
    cause: Cause
    text: str
    story: tuple[str, ...] = ()

    @property
    def why(self) -> Why:
        """The cause and the text, to pass on without the room and its path, of which each receiver has its own."""
        return Why(self.cause, self.text)

    def __str__(self) -> str:
        path = f" ({' -> '.join(self.story)})" if self.story else ""
        return f"room {self.room} failed: {self.text}{path}"


@attrs.frozen(eq=False)
class WaitTimeout(PdplaneError, TimeoutError):
    """A caller's wait was over before what it waited for: the room goes on, and its blocks are lent as before."""

    room: int
    what: str
    timeout_s: float

    @property
    def cause(self) -> Cause:
        return Cause.TIMED_OUT

    def __str__(self) -> str:
        return f"room {self.room}: {self.what} did not come within {self.timeout_s:g} s; the room is still live"


@attrs.frozen(eq=False)
class SessionLost(PdplaneError):
    """A peer is gone."""

    session: str
    text: str

    @property
    def cause(self) -> Cause:
        return Cause.PEER_LOST

    def __str__(self) -> str:
        return f"session {self.session} lost: {self.text}"


@attrs.frozen(eq=False)
class TransferError(PdplaneError):
    """A push did not land whole; `done` of `total` bytes were acknowledged or written."""

    endpoint: str
    done: int
    total: int
    text: str

    @property
    def cause(self) -> Cause:
        return Cause.TRANSFER

    def __str__(self) -> str:
        return f"transfer to {self.endpoint} stopped after {self.done} of {self.total} bytes: {self.text}"


@attrs.frozen(eq=False)
class RendezvousError(PdplaneError):
    """The rendezvous gave no usable answer; `status` is the HTTP status, 0 when there was none."""

    url: str
    status: int
    reason: str

    @property
    def cause(self) -> Cause:
        return Cause.UNREACHABLE

    def __str__(self) -> str:
        answered = f" answered {self.status}" if self.status else ""
        return f"rendezvous {self.url}{answered}: {self.reason}"


@attrs.frozen(eq=False)
class PoolExhausted(PdplaneError):
    """Not enough free blocks."""

    wanted: int
    free: int

    @property
    def cause(self) -> Cause:
        return Cause.FULL

    def __str__(self) -> str:
        return f"wanted {self.wanted} blocks, {self.free} are free"


@attrs.frozen(eq=False)
class ConfigError(PdplaneError, ValueError):
    """A setting or a request that can never work; raised before anything starts."""

    reason: str

    @property
    def cause(self) -> Cause:
        return Cause.BAD_REQUEST

    def __str__(self) -> str:
        return self.reason


@attrs.frozen(eq=False)
class InternalError(PdplaneError):
    """Something that cannot happen did."""

    reason: str

    def __str__(self) -> str:
        return self.reason
