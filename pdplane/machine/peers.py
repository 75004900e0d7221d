"""Prefill instances, as a decode rank knows them: joined once, pinged, lost together.

LookUp -> found: connect to each rank that we need, hello, registration -> every rank registered: joined
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from pdplane.errors import Why, WireError
from pdplane.ids import Endpoint, Life, Rank, Room
from pdplane.kv.copies import RankRoute, contact_order, expected_prefill_ranks, plan_route
from pdplane.kv.layout import Layout, compare_layouts
from pdplane.machine.actions import (
    Connect,
    DecodeSettings,
    DecodeTimers,
    DecodeTurn,
    Disconnect,
    LookUp,
    PeerKey,
    Tell,
)
from pdplane.machine.events import (
    Channel,
    PeerFound,
)
from pdplane.messages import (
    Cancel,
    Drain,
    Fingerprint,
    Hello,
    Notice,
    Ping,
    Registration,
    Window,
)


@attrs.define
class Link:
    """One prefill rank of a peer. An idle one gets no blocks and reports no Success, but must know of the room."""

    channel: Channel
    idle: bool
    heard: float
    registered: bool = False
    refused: bool = False
    window: Window | None = None  # names the next status

    def announced(self, room: Room) -> Window | None:
        """Take the notice that went before this room's status; a notice serves the next status only."""
        window, self.window = self.window, None
        return window if window is not None and window.room == room else None


def parting_words(link: Link, window: Window, why: Why) -> tuple[Tell, Tell]:
    """Return the notices by which a rank hears that a use gets no blocks."""
    return Tell(link.channel, window), Tell(link.channel, Cancel(window.room, window.generation, why))


@attrs.define
class PrefillPeer:
    """One data-parallel group of a prefill instance."""

    key: PeerKey
    lives: dict[Rank, Life]
    endpoints: dict[Rank, Endpoint]
    routes: dict[Rank, RankRoute]  # of the ranks that send to us
    links: dict[Rank, Link]
    suspect: bool = False
    draining: bool = False

    @property
    def is_joined(self) -> bool:
        return all(link.registered for link in self.links.values())

    def note(self, link: Link, notice: Notice) -> bool:
        """Take a notice that changes no room; return False for one that prefill ranks do not send."""
        match notice:
            case Window() as window:
                link.window = window
            case Drain():
                self.draining = True
            case Ping():
                pass  # it only shows that the peer lives
            case _:
                return False
        return True

    @property
    def is_legacy(self) -> bool:
        return any(link.channel.is_legacy for link in self.links.values())

    @property
    def writers(self) -> tuple[tuple[Rank, Life], ...]:
        return tuple((rank, link.channel.life) for rank, link in sorted(self.links.items()) if not link.idle)


class Peers:
    """Every prefill instance that this decode rank is registered with, or joining."""

    def __init__(
        self,
        settings: DecodeSettings,
        layout: Layout,
        life: Life,
        registration: Registration,
        fingerprint: Fingerprint,
        timers: DecodeTimers,
    ) -> None:
        self._settings, self._layout, self._timers = settings, layout, timers
        self._life, self._registration = life, registration
        self._hello = Hello(settings.version, life, fingerprint)
        self._peers: dict[PeerKey, PrefillPeer] = {}
        self._sizes: dict[Endpoint, int] = {}

    def __iter__(self) -> Iterator[PrefillPeer]:
        return iter(list(self._peers.values()))

    def get(self, key: PeerKey | None) -> PrefillPeer | None:
        return None if key is None else self._peers.get(key)

    def link(self, channel: Channel) -> tuple[PrefillPeer, Link] | None:
        for peer in self._peers.values():
            link = peer.links.get(channel.prefill_rank)
            if link is not None and link.channel == channel:
                return peer, link
        return None

    def fresh(self, bootstrap: Endpoint, room: Room, now: float) -> PrefillPeer | None:
        """Return the joined peer that serves this room, if its last message is so recent that no look-up is needed."""
        peer = self.joined(bootstrap, room)
        if peer is None or peer.suspect or peer.draining:
            return None
        oldest = min(link.heard for link in peer.links.values())
        return peer if now - oldest <= self._settings.ping_interval_s * 1.5 else None

    def joined(self, bootstrap: Endpoint, room: Room) -> PrefillPeer | None:
        """Return the peer that serves this room and has registered us, however long it has been silent."""
        size = self._sizes.get(bootstrap)
        peer = self._peers.get((bootstrap, room % size)) if size else None
        return peer if peer is not None and peer.is_joined else None

    def counts(self) -> dict[str, int]:
        joined = sum(peer.is_joined for peer in self._peers.values())
        return {"peers": len(self._peers), "sessions": joined}

    def same_lives(self, peer: PrefillPeer, found: PeerFound) -> bool:
        """Return whether these are the known ranks; a restarted legacy rank shows only by its new address."""
        return all(
            peer.lives.get(rank.prefill_rank) == rank.life
            and (rank.life or peer.endpoints.get(rank.prefill_rank) == rank.endpoint)
            for rank in found.ranks
        )

    def known_as(self, found: PeerFound) -> PrefillPeer | None:
        """Return the peer of the same ranks, found by another name of its rendezvous: their session stays one."""
        ranks = {rank.prefill_rank for rank in found.ranks}
        for peer in self._peers.values():
            if peer.key[1] == found.dp_group and peer.lives.keys() == ranks and self.same_lives(peer, found):
                return peer
        return None

    def join(self, turn: DecodeTurn, found: PeerFound) -> PrefillPeer:
        """Connect to the ranks that we need and register. Raises LayoutMismatch or another ProtocolError."""
        compare_layouts(self._layout, found.layout)
        sizes = len(found.ranks), self._settings.tp_size
        me = self._settings.tp_rank
        if sorted(rank.prefill_rank for rank in found.ranks) != list(range(len(found.ranks))):
            raise WireError("ranks", "the rendezvous does not name every prefill rank once")
        contacts = contact_order(found.layout, self._layout, *sizes, me)
        senders = expected_prefill_ranks(found.layout, self._layout, *sizes, me)
        routes = {rank: plan_route(found.layout, self._layout, sizes[0], rank, sizes[1], me) for rank in senders}
        links = {}
        for rank in found.ranks:
            if rank.prefill_rank in contacts:
                channel = Channel(found.bootstrap, rank.prefill_rank, rank.life, found.dp_group)
                links[rank.prefill_rank] = Link(channel, rank.prefill_rank not in routes, turn.now)
                turn.add(Connect(channel, rank.endpoint))
        lives = {rank.prefill_rank: rank.life for rank in found.ranks}
        endpoints = {rank.prefill_rank: rank.endpoint for rank in found.ranks}
        key = (found.bootstrap, found.dp_group)
        peer = self._peers[key] = PrefillPeer(key, lives, endpoints, routes, links)
        self._sizes[found.bootstrap] = found.dp_size
        for link in links.values():
            self.introduce(turn, link)
        self._timers.set(key, turn.now + self._settings.ping_interval_s)
        return peer

    def part(self, turn: DecodeTurn, found: PeerFound, window: Window, why: Why) -> None:
        """Tell ranks whose cache does not fit ours that a use gets no blocks: they hear those that they refuse."""
        for rank in {rank.prefill_rank: rank for rank in found.ranks}.values():
            channel = Channel(found.bootstrap, rank.prefill_rank, rank.life, found.dp_group)
            if not channel.is_legacy:
                link = Link(channel, idle=True, heard=turn.now)
                turn.add(Connect(channel, rank.endpoint))
                self.introduce(turn, link)
                turn.add(*parting_words(link, window, why), Disconnect(channel))

    def introduce(self, turn: DecodeTurn, link: Link) -> None:
        """Say hello and register (again) with one rank."""
        link.registered = False
        turn.add(Tell(link.channel, self._hello), Tell(link.channel, self._registration))

    def suspect(self, turn: DecodeTurn, life: Life) -> None:
        """Ask the rendezvous whether a life whose data connection ended is still in service."""
        for peer in self._peers.values():
            if life in peer.lives.values() and not peer.suspect:
                peer.suspect = True
                turn.add(LookUp(peer.key[0], Room(peer.key[1])))

    def forget(self, turn: DecodeTurn, peer: PrefillPeer) -> None:
        self._timers.drop(peer.key)
        del self._peers[peer.key]
        if all(other.key[0] != peer.key[0] for other in self._peers.values()):
            self._sizes.pop(peer.key[0], None)
        turn.add(*(Disconnect(link.channel) for link in peer.links.values()))

    def tend(self, turn: DecodeTurn, key: PeerKey) -> PrefillPeer | None:
        """Ping a peer; return it instead if one of its ranks was silent for too long."""
        peer, limit = self._peers[key], self._settings.ping_interval_s * self._settings.ping_misses
        if any(turn.now - link.heard >= limit for link in peer.links.values()):
            return peer
        for link in peer.links.values():
            if link.registered:
                turn.add(Tell(link.channel, Ping(self._life)))
            else:  # the answer may be lost; a second registration does no harm
                self.introduce(turn, link)
        self._timers.set(key, turn.now + self._settings.ping_interval_s)
        return None


# ---- Uses that were given up before prefill could hear of them


@attrs.define
class Parting:
    """A use that ended before its prefill had registered us: that is told as soon as it has."""

    bootstrap: Endpoint
    window: Window
    why: Why
    peer: PeerKey | None = None


class Partings:
    """At most one for each room number. Each ends with its look-up or its peer: neither takes for ever."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[Room, Parting] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, bootstrap: Endpoint, window: Window, why: Why, peer: PeerKey | None = None) -> bool:
        """Keep a word until the peer has registered us; return False when there are too many, or no prompt to name."""
        if not window.prompt_hash or len(self._kept) >= self._capacity:
            return False
        self._kept[window.room] = Parting(bootstrap, window, why, peer)
        return True

    def awaits(self, number: Room, bootstrap: Endpoint) -> bool:
        """Return whether this look-up is for one of them."""
        parting = self._kept.get(number)
        return parting is not None and parting.peer is None and parting.bootstrap == bootstrap

    def attach(self, number: Room, peer: PeerKey) -> None:
        """Wait for this peer from now on."""
        self._kept[number].peer = peer

    def forget(self, number: Room) -> Parting | None:
        """Take one out, if there is one."""
        return self._kept.pop(number, None)

    def take(self, peer: PeerKey) -> list[Parting]:
        """Take out those that wait for this peer."""
        found = [number for number, parting in self._kept.items() if parting.peer == peer]
        return [self._kept.pop(number) for number in found]
