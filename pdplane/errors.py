"""Every exception that pdplane raises on purpose.

    PdplaneError
    +- ProtocolError                 abstract: says who is wrong
    |  +- LocalProtocolError         our own illegal move: a bug, never caught by name
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
    +- ConfigError                   also a ValueError; raised before anything starts
    +- InternalError                 "cannot happen"

The text of an error is made from its fields, and every error survives pickling.
"""

from __future__ import annotations

import attrs


@attrs.frozen(eq=False)
class PdplaneError(Exception):
    """Base of every error that pdplane raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        fields = attrs.fields(type(self))
        return type(self), tuple(getattr(self, field.name) for field in fields)


@attrs.frozen(eq=False)
class ProtocolError(PdplaneError):
    """A rule of the protocol was broken; the subclass says by whom."""


@attrs.frozen(eq=False)
class LocalProtocolError(ProtocolError):
    """Our own side asked for an illegal move: a bug in the caller."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@attrs.frozen(eq=False)
class RemoteProtocolError(ProtocolError):
    """The peer broke a rule; its room or session fails and we keep serving."""


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
    """The two sides' caches (or models) differ in one named field."""

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} differs: ours {self.ours}, theirs {self.theirs}"


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
    cause: str
    story: tuple[str, ...] = ()

    def __str__(self) -> str:
        path = f" ({' -> '.join(self.story)})" if self.story else ""
        return f"room {self.room} failed: {self.cause}{path}"


@attrs.frozen(eq=False)
class WaitTimeout(PdplaneError, TimeoutError):
    """A caller's wait was over before what it waited for: the room goes on, and its blocks are lent as before."""

    room: int
    what: str
    timeout_s: float

    def __str__(self) -> str:
        return f"room {self.room}: {self.what} did not come within {self.timeout_s:g} s; the room is still live"


@attrs.frozen(eq=False)
class SessionLost(PdplaneError):
    """A peer is gone, with the cause."""

    session: str
    cause: str

    def __str__(self) -> str:
        return f"session {self.session} lost: {self.cause}"


@attrs.frozen(eq=False)
class TransferError(PdplaneError):
    """A push did not land whole; `done` of `total` bytes were acknowledged or written."""

    endpoint: str
    done: int
    total: int
    cause: str

    def __str__(self) -> str:
        return f"transfer to {self.endpoint} stopped after {self.done} of {self.total} bytes: {self.cause}"


@attrs.frozen(eq=False)
class RendezvousError(PdplaneError):
    """The rendezvous gave no usable answer; `status` is the HTTP status, 0 when there was none."""

    url: str
    status: int
    reason: str

    def __str__(self) -> str:
        answered = f" answered {self.status}" if self.status else ""
        return f"rendezvous {self.url}{answered}: {self.reason}"


@attrs.frozen(eq=False)
class PoolExhausted(PdplaneError):
    """Not enough free blocks."""

    wanted: int
    free: int

    def __str__(self) -> str:
        return f"wanted {self.wanted} blocks, {self.free} are free"


@attrs.frozen(eq=False)
class ConfigError(PdplaneError, ValueError):
    """A setting that cannot work; raised before anything starts."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@attrs.frozen(eq=False)
class InternalError(PdplaneError):
    """Something that cannot happen did."""

    reason: str

    def __str__(self) -> str:
        return self.reason
