"""Decode ranks, as a prefill rank knows them: who is connected, who owns a session, who is still alive."""

from __future__ import annotations

from collections import Counter

import attrs

from pdplane.errors import Cause, LayoutMismatch, ProtocolError
from pdplane.ids import Life, Room, SessionId
from pdplane.kv.copies import RankRoute, plan_route
from pdplane.kv.layout import Layout, compare_layouts
from pdplane.machine.actions import (
    CloseData,
    OpenData,
    PrefillSettings,
    PrefillTimers,
    PrefillTurn,
    Send,
)
from pdplane.machine.events import (
    DataConnected,
    DataLost,
    RegistrationReceived,
    RegistrationRejected,
)
from pdplane.machine.uses import DecodeLife
from pdplane.messages import (
    Fingerprint,
    Hello,
    Notice,
    Ping,
    Refused,
    Registered,
    Registration,
    Window,
    is_legacy,
)
from pdplane.net import first_to_go

# A session belongs to whoever answers at its address: a native peer is bound only after the life that its `hello` named
# has answered on the data connection to that address.
# A peer without `hello` (a raw or legacy one) is bound at once, but never over another owner. On the legacy channel
# anybody can name any session: a registration that contradicts the one in force ends both until a good one comes.
# Rules: docs/legacy_wire.md section 3.


_ABSENT = "absent"
MAX_CHECKS = 64  # registrations whose address is being asked which life answers: each has a thread and a connection


def compare_fingerprints(ours: Fingerprint, theirs: Fingerprint, *, exact: bool) -> None:
    """Raise LayoutMismatch for the first name that must agree and does not; under `exact` advisory ones must too."""
    pairs = [(ours.required, theirs.required)]
    if exact:
        pairs.append((ours.advisory, theirs.advisory))
    for mine, yours in pairs:
        here, there = dict(mine), dict(yours)
        for name in [*here, *(name for name in there if name not in here)]:
            if here.get(name) != there.get(name):
                raise LayoutMismatch(name, here.get(name, _ABSENT), there.get(name, _ABSENT))


@attrs.define
class DecodePeer:
    """One connection. `native` once it sent any notice: only such peers are sent notices."""

    identity: bytes
    heard: float
    address: str = ""
    used: bool = False  # bytes of a room arrived there: it is no stranger who only holds a place
    native: bool = False
    hello: Hello | None = None
    session: SessionId | None = None
    refused: bool = False  # its registration was, so that it can only say which rooms it does not fill
    window: Window | None = None  # names the next pre-allocation

    @property
    def life(self) -> Life:
        """The life that `hello` named, or an empty one."""
        return self.hello.life if self.hello else Life("")


@attrs.define
class Session:
    """One decode rank's registered life. `life` is empty for a peer without `hello`."""

    registration: Registration
    identity: bytes
    life: Life
    layout: Layout
    route: RankRoute
    opened: bool = False  # its data connection was asked for

    @property
    def id(self) -> SessionId:
        return self.registration.session

    def repeats(self, event: RegistrationReceived) -> bool:
        """Return whether the event registers the same values again; the layout's spelling may differ."""
        again = attrs.evolve(event.registration, layout=self.registration.layout)
        return again == self.registration and event.layout == self.layout


class Sessions:
    """Every connection and session of one prefill rank."""

    def __init__(
        self,
        settings: PrefillSettings,
        layout: Layout,
        life: Life,
        fingerprint: Fingerprint,
        rejected: Counter[str],
        timers: PrefillTimers,
    ) -> None:
        self._settings, self._layout, self._life, self._fingerprint = settings, layout, life, fingerprint
        self._rejected, self._timers = rejected, timers
        self._peers: dict[bytes, DecodePeer] = {}
        self._bound: dict[SessionId, Session] = {}
        self._checking: dict[tuple[SessionId, Life], Session] = {}
        self._contending: dict[bytes, Session] = {}  # by the identity of the connection that holds the session
        self.evicted: list[Session] = []

    # ---- questions

    def owner(self, identity: bytes, session: SessionId) -> Session | None:
        """Return the session, if this connection is the one bound to it."""
        found = self._bound.get(session)
        return found if found is not None and found.identity == identity else None

    def knows(self, identity: bytes) -> bool:
        return identity in self._peers

    def is_native(self, identity: bytes) -> bool:
        peer = self._peers.get(identity)
        return peer is not None and peer.native

    def any_mute(self) -> bool:
        """Return whether a registered decode rank sends no notices, so that it cannot say that it stands in line."""
        return not all(self.is_native(session.identity) for session in self._bound.values())

    def part_of(self, peer: DecodePeer) -> DecodeLife | None:
        """Return under which name this peer's words about rooms count; None for a stranger's, which do not."""
        session = self.owner(peer.identity, peer.session) if peer.session else None
        if session is not None:
            return session.id, session.life
        return (SessionId(""), peer.life) if peer.refused and peer.life else None

    def counts(self) -> dict[str, int]:
        return {
            "peers": len(self._peers),
            "sessions": len(self._bound),
            "checking": len(self._checking) + len(self._contending),
        }

    # ---- what peers say

    def hear(self, turn: PrefillTurn, identity: bytes, *, native: bool = False, address: str = "") -> DecodePeer | None:
        """Return the peer behind this connection, new or known; None when there are too many peers."""
        peer = self._peers.get(identity)
        if peer is None:
            if len(self._peers) >= self._settings.max_peers and not self._evict(turn):
                self._rejected["too_many_peers"] += 1
                return None
            peer = self._peers[identity] = DecodePeer(identity, turn.now, address)
        peer.native = peer.native or native
        peer.heard = turn.now
        if contender := self._contending.pop(identity, None):
            self._refuse_as_taken(turn, contender)
        if identity not in self._timers and not is_legacy(identity):  # those register once and send nothing more
            self._timers.set(identity, turn.now + self._patience(peer))
        return peer

    def hello(self, turn: PrefillTurn, peer: DecodePeer, hello: Hello) -> None:
        peer.hello = hello
        self._timers.set(peer.identity, turn.now + self._patience(peer))  # from now on it pings

    def announced(self, identity: bytes, room: Room) -> Window | None:
        """Take the window notice before this pre-allocation; a notice serves the next one only."""
        peer = self._peers.get(identity)
        if peer is None:
            return None
        window, peer.window = peer.window, None
        return window if window is not None and window.room == room else None

    def ping(self, turn: PrefillTurn, peer: DecodePeer) -> None:
        # A peer whose session we lost gets no answer, so that it counts us as silent and starts over.
        if peer.session is not None:
            turn.add(Send(peer.identity, Ping(self._life)))

    def tell_all(self, turn: PrefillTurn, notice: Notice) -> None:
        for peer in self._peers.values():
            if peer.native:
                turn.add(Send(peer.identity, notice))

    def register(self, turn: PrefillTurn, event: RegistrationReceived) -> list[Session]:
        """Start or finish a registration; return the sessions that it replaced."""
        peer = self.hear(turn, event.identity, address=event.address)
        known = self.owner(event.identity, event.registration.session)
        if peer is None:
            return []
        if known is not None and known.repeats(event) and known.life == peer.life:
            self._welcome(turn, known)
            return []
        gone = self._contradicted(turn, event.identity, event.registration.session)
        if gone:
            self._refuse(turn, peer, Refused(gone[0].id, "registration", "the one in force", "another one"))
        session = None if gone else self._candidate(turn, peer, event)
        if session is None:
            return gone
        if holder := self._holder(session):
            self._contest(turn, session, holder)
            return []
        if session.life:
            self._check(turn, peer, session)
            return []
        return self._bind(turn, session)

    def use(self, turn: PrefillTurn, session: Session) -> None:
        """Open the data connection of a peer without `hello` that a room needs, so that its first push need not wait.

        Not before: a registration says where we connect to, and anybody can send one.
        """
        if not (session.opened or session.life or session.route.dummy):
            session.opened = True
            turn.add(OpenData(session.id, session.life, session.registration.arena_base))

    def proved(self, session_id: SessionId) -> None:
        """Note that bytes of a room arrived at the session's address."""
        bound = self._bound.get(session_id)
        if bound is not None and (peer := self._peers.get(bound.identity)):
            peer.used = True

    def _holder(self, session: Session) -> Session | None:
        """Return the other connection that holds the session, unless the newcomer is a new life: that takes it over."""
        holders = self._checking.get((session.id, session.life)), self._bound.get(session.id)
        others = [holder for holder in holders if holder is not None and holder.identity != session.identity]
        return next((holder for holder in others if session.life in ("", holder.life)), None)

    def _contest(self, turn: PrefillTurn, session: Session, holder: Session) -> None:
        """Let the connection that holds the session keep it while it is alive.

        A life that connected again may have left the old connection behind. A ping shows whether that is still there;
        when it is lost, the contender is checked.
        """
        if not session.life:
            self._refuse_as_taken(turn, session)
            return
        self._contending[holder.identity] = session
        turn.add(Send(holder.identity, Ping(self._life)))

    def _refuse_as_taken(self, turn: PrefillTurn, session: Session) -> None:
        peer = self._peers[session.identity]
        self._refuse(turn, peer, Refused(session.id, "session", "owned by another peer", session.id))

    def _check(self, turn: PrefillTurn, peer: DecodePeer, session: Session) -> None:
        """Ask which life answers at the session's address; a connection has one such question at a time."""
        key = (session.id, session.life)
        self._drop_checks(turn, session.identity, but=key)
        peer.session = session.id
        asked, self._checking[key] = key in self._checking, session
        if len(self._checking) > MAX_CHECKS:
            self._give_up_check(turn)
        if not asked:
            turn.add(OpenData(*key, session.registration.arena_base))

    def _give_up_check(self, turn: PrefillTurn) -> None:
        """Refuse the registration that has waited longest for its address to answer."""
        key = next(iter(self._checking))
        oldest = self._checking.pop(key)
        turn.add(CloseData(*key))
        if peer := self._peers.get(oldest.identity):
            text = "too many other registrations wait for an answer"
            self._refuse(turn, peer, Refused(oldest.id, "data address", "reachable", text, Cause.UNREACHABLE))

    def _drop_checks(self, turn: PrefillTurn, identity: bytes, but: tuple[SessionId, Life] | None = None) -> None:
        for key in [key for key, session in self._checking.items() if session.identity == identity and key != but]:
            del self._checking[key]
            if (bound := self._bound.get(key[0])) is None or bound.life != key[1]:
                turn.add(CloseData(*key))

    def reject(self, turn: PrefillTurn, event: RegistrationRejected) -> list[Session]:
        """Refuse what cannot be read; return the session that a legacy peer lost by it."""
        peer = self.hear(turn, event.identity, address=event.address)
        self._rejected["registration"] += 1
        if peer is None or event.route is None:
            return []
        self._tell_refused(turn, peer, Refused(event.route.session, event.field, "valid", event.reason))
        return self._contradicted(turn, event.identity, event.route.session)

    def _contradicted(self, turn: PrefillTurn, identity: bytes, session_id: SessionId) -> list[Session]:
        """End and return a legacy peer's session that another registration of the legacy channel names."""
        bound = self._bound.get(session_id)
        if bound is None or not is_legacy(identity) or not is_legacy(bound.identity):
            return []
        del self._bound[session_id]
        self._peers[bound.identity].session = None
        turn.add(CloseData(bound.id, bound.life))
        return [bound]

    def connected(self, turn: PrefillTurn, event: DataConnected) -> list[Session]:
        """Bind the session if the expected life answered at its address; return the sessions that it replaced."""
        session = self._checking.pop((event.session, event.life), None)
        if session is None:
            return self._reconnected(turn, event)
        peer = self._peers.get(session.identity)
        if event.decode_life == session.life and peer is not None:
            return self._bind(turn, session)
        turn.add(CloseData(event.session, event.life))
        if peer is not None:
            self._refuse(turn, peer, Refused(session.id, "life", event.decode_life, session.life))
        return []

    def _reconnected(self, turn: PrefillTurn, event: DataConnected) -> list[Session]:
        """Lose the bound session if a push connected again and another life answered; return what was lost."""
        bound = self._bound.get(event.session)
        if bound is None or not bound.life or bound.life != event.life or event.decode_life == event.life:
            return []  # a peer without `hello` has no known life
        return self.lose(turn, bound.identity)

    def data_lost(self, turn: PrefillTurn, event: DataLost) -> None:
        session = self._checking.pop((event.session, event.life), None)
        peer = self._peers.get(session.identity) if session is not None else None
        if session is not None and peer is not None:
            refused = Refused(session.id, "data address", "reachable", event.text, Cause.UNREACHABLE)
            self._refuse(turn, peer, refused)

    # ---- ends

    def lose(self, turn: PrefillTurn, identity: bytes) -> list[Session]:
        """Forget a connection; return the sessions that it held."""
        self._timers.drop(identity)
        if self._peers.pop(identity, None) is None:
            return []
        self._drop_checks(turn, identity)
        gone = [session for session in self._bound.values() if session.identity == identity]
        for session in gone:
            del self._bound[session.id]
            turn.add(CloseData(session.id, session.life))
        self._give_way(turn, identity)
        return gone

    def _give_way(self, turn: PrefillTurn, identity: bytes) -> None:
        """Check the contender for a lost connection's session, and drop the lost one as a contender."""
        for holder in [holder for holder, session in self._contending.items() if session.identity == identity]:
            del self._contending[holder]
        if contender := self._contending.pop(identity, None):
            self._check(turn, self._peers[contender.identity], contender)

    def silent(self, turn: PrefillTurn, identity: bytes) -> list[Session]:
        """Lose a connection if it was silent for too long; return its sessions."""
        peer = self._peers[identity]
        until = peer.heard + self._patience(peer)
        if until <= turn.now:
            return self.lose(turn, identity)
        self._timers.set(identity, until)
        return []

    def take_evicted(self) -> list[Session]:
        """Return the sessions of peers that were forgotten to make place, once."""
        gone, self.evicted = self.evicted, []
        return gone

    def _evict(self, turn: PrefillTurn) -> bool:
        """Make place by forgetting a peer that no room was pushed to, else a legacy one; return False without such.

        Of the address with the most it is one without a session, else the one that was silent for longest.
        """
        peers = self._peers.values()
        idle = [peer for peer in peers if not peer.used] or [peer for peer in peers if is_legacy(peer.identity)]
        if idle:
            goes = first_to_go(
                idle, lambda peer: peer.address, lambda peer: (peer.session is not None, bool(peer.life), peer.heard)
            )
            self.evicted += self.lose(turn, goes.identity)
        return bool(idle)

    def _patience(self, peer: DecodePeer) -> float:
        settings = self._settings
        return settings.ping_interval_s * settings.ping_misses if peer.hello else settings.idle_peer_s

    # ---- one registration

    def _candidate(self, turn: PrefillTurn, peer: DecodePeer, event: RegistrationReceived) -> Session | None:
        registration, hello = event.registration, peer.hello
        try:
            route = self._accept(registration, event.layout, hello)
        except LayoutMismatch as wrong:
            advised = f"{wrong.theirs} ({wrong.advice})" if wrong.advice and is_legacy(peer.identity) else wrong.theirs
            self._refuse(turn, peer, Refused(registration.session, wrong.field, wrong.ours, advised))
            return None
        except ProtocolError as wrong:
            ours = f"rank {self._settings.prefill_rank} of {self._settings.tp_size}"
            self._refuse(turn, peer, Refused(registration.session, "tp rank", ours, str(wrong)))
            return None
        return Session(registration, event.identity, peer.life, event.layout, route)

    def _accept(self, registration: Registration, layout: Layout, hello: Hello | None) -> RankRoute:
        if hello is not None:
            compare_fingerprints(self._fingerprint, hello.fingerprint, exact=self._settings.exact)
        compare_layouts(self._layout, layout)
        return plan_route(
            self._layout,
            layout,
            prefill_tp=self._settings.tp_size,
            prefill_rank=self._settings.prefill_rank,
            decode_tp=registration.tp_size,
            decode_rank=registration.tp_rank,
        )

    def _refuse(self, turn: PrefillTurn, peer: DecodePeer, refused: Refused) -> None:
        self._rejected["registration"] += 1
        if self.owner(peer.identity, peer.session or refused.session) is None:
            peer.session, peer.refused = None, True
        self._tell_refused(turn, peer, refused)

    def _tell_refused(self, turn: PrefillTurn, peer: DecodePeer, refused: Refused) -> None:
        if peer.native or is_legacy(peer.identity):  # a legacy peer cannot be told, so its channel logs it
            turn.add(Send(peer.identity, refused))

    def _bind(self, turn: PrefillTurn, session: Session) -> list[Session]:
        peer = self._peers[session.identity]
        replaced = [old for old in self._bound.values() if old.id == session.id or old.identity == session.identity]
        for old in replaced:
            del self._bound[old.id]
            if (old.id, old.life) != (session.id, session.life):
                turn.add(CloseData(old.id, old.life))
        peer.session, peer.refused = session.id, False
        self._bound[session.id] = session
        self._welcome(turn, session)
        return replaced

    def _welcome(self, turn: PrefillTurn, session: Session) -> None:
        if self.is_native(session.identity):
            turn.add(Send(session.identity, Registered(session.id, self._life)))
