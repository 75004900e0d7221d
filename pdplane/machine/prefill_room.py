"""Everything that a prefill rank knows of one room; forgetting the room is one `del`."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from pdplane.ids import Generation, Room, SessionId
from pdplane.kv.manifest import Manifest
from pdplane.machine.actions import Destination
from pdplane.machine.events import PrefillRequested, RoomFinished
from pdplane.machine.graveyard import Peer, Tombstone, Use, merge
from pdplane.machine.room import PREFILL_TABLE, PrefillMove, PrefillState, advance
from pdplane.machine.session import Session


@attrs.frozen
class Offered:
    """One decode rank's pre-allocation; no manifest when it only joins the vote."""

    session: Session
    generation: Generation
    manifest: Manifest | None
    prompt_hash: str

    @property
    def use(self) -> Use:
        return Use((self.session.id, self.session.life), self.generation)


@attrs.define
class PrefillRoom:
    """One use of a room number. `ended` names the uses of it that are over, so that none comes back.

    `before` is what is left of the last use, if that ended a short while ago.
    """

    room: Room
    since: float
    ended: Mapping[Peer, Generation] = attrs.field(factory=dict)
    before: Tombstone | None = None
    state: PrefillState = PrefillState.EARLY
    request: PrefillRequested | None = None
    finish: RoomFinished | None = None
    offers: dict[SessionId, Offered] = attrs.field(factory=dict)
    declined: list[Use] = attrs.field(factory=list)  # uses of it that decode ranks took no part in
    pushes: set[int] = attrs.field(factory=set)
    cause: str | None = None
    story: list[str] = attrs.field(factory=list)

    def move(self, move: PrefillMove, now: float) -> bool:
        """Advance by the table; True when a new state was entered."""
        before, self.state = self.state, advance(PREFILL_TABLE, self.state, move)
        if entered := before is not self.state:
            self.story.append(f"{self.state.value} +{now - self.since:.3f}s")
        return entered

    @property
    def takes_offers(self) -> bool:
        return self.state in (PrefillState.EARLY, PrefillState.OPENED)

    def takes_part(self, identity: bytes, generation: Generation) -> bool:
        """Whether this connection's offer of this generation is one of the room's."""
        return any(o.session.identity == identity and o.generation == generation for o in self.offers.values())

    def asks_for(self, prompt_hash: str) -> bool:
        """Whether its request waits for offers, and is of this prompt."""
        return self.takes_offers and self.request is not None and self.request.prompt_hash == prompt_hash

    def place_conflict(self, newcomer: Offered) -> str | None:
        """Why an offer has no place beside the others: the newcomer's fault, the room is not harmed."""
        for offer in self.offers.values():
            ours, theirs = offer.session, newcomer.session
            if ours.registration.tp_size != theirs.registration.tp_size:
                return "the room has decode ranks of another tp size"
            if ours.route.decode_ranks != theirs.route.decode_ranks:
                return "the room has other decode ranks"
            if ours.registration.tp_rank == theirs.registration.tp_rank:
                return "the room has another session of this decode rank"
        return None

    def take_as_late(self, newcomer: Offered) -> str | None:
        """Whether this offer is of the last use, which failed here before it came: its cause, and then never again.

        Only the prompt can tell: the request carries no generation.
        """
        before = self.before
        if before is None or not before.missed_by(newcomer.use.peer):
            return None
        if self.prompt_conflict(newcomer) is None:
            return None
        self.before = attrs.evolve(before, members=before.members | {newcomer.use.peer})
        self.ended = merge(self.ended, newcomer.use)
        return before.cause

    def prompt_conflict(self, *newcomers: Offered) -> str | None:
        """Why the offers and the request cannot be of one prompt; None when they can."""
        offers = [offer for offer in (*self.offers.values(), *newcomers) if offer.manifest is not None]
        windows = {(o.manifest.prefix_len, o.manifest.prompt_len) for o in offers if o.manifest is not None}
        hashes = {offer.prompt_hash for offer in offers if offer.prompt_hash}
        if len(windows) > 1 or len(hashes) > 1:
            return "the decode ranks' prompts differ"
        request = self.request
        if request is None:
            return None
        lengths = {prompt_len for _, prompt_len in windows}
        if request.prompt_len is not None and lengths - {request.prompt_len}:
            return f"prompt_len differs: ours {request.prompt_len}, decode's {lengths.pop()}"
        if request.prompt_hash and hashes - {request.prompt_hash}:
            return "the prompt's tokens differ from decode's"
        return None

    @property
    def withdrawn(self) -> str | None:
        """Why decode takes no part any more, if it gave this use up before its request came. A new offer ends that."""
        before, request = self.before, self.request
        if before is None or request is None or self.offers or not before.awaits(request.prompt_hash):
            return None
        return before.cause

    @property
    def is_complete(self) -> bool:
        offers = list(self.offers.values())
        if not offers:
            return False
        ranks = {offer.session.registration.tp_rank for offer in offers}
        return ranks == set(offers[0].session.route.decode_ranks)

    def offers_by_rank(self) -> list[Offered]:
        """The offers of the decode ranks that get bytes."""
        offers = sorted(self.offers.values(), key=lambda offer: offer.session.registration.tp_rank)
        return [offer for offer in offers if offer.manifest is not None]

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """The decode ranks that get bytes, by rank."""
        return tuple(
            Destination(offer.session.id, offer.generation, offer.session.layout, offer.session.route, offer.manifest)
            for offer in self.offers_by_rank()
            if offer.manifest is not None
        )
