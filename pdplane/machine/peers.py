"""Prefill instances as a decode rank knows them: joined once, pinged, lost together.

LookUp -> found: connect to each rank that we need, hello, registration -> every rank registered: joined
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import attrs

from pdplane.errors import WireError
from pdplane.ids import Endpoint, Life, Rank, Room
from pdplane.kv.layout import Layout, compare_layouts
from pdplane.kv.routes import RankRoute, contact_order, expected_prefill_ranks, plan_route
from pdplane.machine.actions import Connect, DecodeAction, Disconnect, LookUp, Tell, Turn
from pdplane.machine.events import Channel, PeerFound
from pdplane.machine.settings import DecodeSettings
from pdplane.machine.timers import Timers
from pdplane.messages import Drain, Fingerprint, Hello, Notice, Ping, Registration, Window

PeerKey: TypeAlias = tuple[Endpoint, int]
"""A rendezvous and one data-parallel group behind it."""
DecodeTurn: TypeAlias = Turn[DecodeAction]


@attrs.define
class Link:
    """One prefill rank of a peer. An idle one gets no blocks and reports no Success, but must know of the room."""

    channel: Channel
    idle: bool
    heard: float
    registered: bool = False
    window: Window | None = None  # names the next status

    def announced(self, room: Room) -> Window | None:
        """Take the notice that went before this room's status; a notice serves the next status only."""
        window, self.window = self.window, None
        return window if window is not None and window.room == room else None


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
    ) -> None:
        self._settings, self._layout = settings, layout
        self._life, self._registration = life, registration
        self._hello = Hello(settings.version, life, fingerprint)
        self._peers: dict[PeerKey, PrefillPeer] = {}
        self._sizes: dict[Endpoint, int] = {}
        self._timers: Timers[PeerKey] = Timers()

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
        size = self._sizes.get(bootstrap)
        peer = self._peers.get((bootstrap, room % size)) if size else None
        if peer is None or not peer.is_joined or peer.suspect or peer.draining:
            return None
        oldest = min(link.heard for link in peer.links.values())
        return peer if now - oldest <= self._settings.ping_interval_s * 1.5 else None

    def counts(self) -> dict[str, int]:
        joined = sum(peer.is_joined for peer in self._peers.values())
        return {"peers": len(self._peers), "sessions": joined}

    def earliest(self) -> float | None:
        return self._timers.earliest()

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

    def tend(self, turn: DecodeTurn) -> list[PrefillPeer]:
        """Ping the peers that are due; return those of which a rank was silent for too long."""
        limit = self._settings.ping_interval_s * self._settings.ping_misses
        silent = []
        for key in list(self._timers.due(turn.now)):
            peer = self._peers[key]
            if any(turn.now - link.heard >= limit for link in peer.links.values()):
                silent.append(peer)
                continue
            for link in peer.links.values():
                if link.registered:
                    turn.add(Tell(link.channel, Ping(self._life)))
                else:  # the answer may be lost; a second registration does no harm
                    self.introduce(turn, link)
            self._timers.set(key, turn.now + self._settings.ping_interval_s)
        return silent
