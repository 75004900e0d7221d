"""Everything that a prefill rank knows of one room; forgetting the room is one `del`."""

from __future__ import annotations

import attrs

from pdplane.ids import Generation, Room, SessionId
from pdplane.kv.manifest import Manifest
from pdplane.machine.actions import Destination
from pdplane.machine.events import PrefillRequested, RoomFinished
from pdplane.machine.room import PREFILL_TABLE, PrefillMove, PrefillState, Use, advance
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
        return self.session.id, self.generation


@attrs.define
class PrefillRoom:
    """One use of a room number."""

    room: Room
    since: float
    state: PrefillState = PrefillState.EARLY
    request: PrefillRequested | None = None
    finish: RoomFinished | None = None
    offers: dict[SessionId, Offered] = attrs.field(factory=dict)
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
    def uses(self) -> frozenset[Use]:
        return frozenset(offer.use for offer in self.offers.values())

    def prompt_conflict(self) -> str | None:
        """Why the offers and the request cannot be of one prompt; None when they can."""
        request = self.request
        for offer in self.offers.values():
            manifest = offer.manifest
            if request is None or manifest is None:
                continue
            if request.prompt_len is not None and request.prompt_len != manifest.prompt_len:
                return f"prompt_len differs: ours {request.prompt_len}, decode's {manifest.prompt_len}"
            if request.prompt_hash and offer.prompt_hash and request.prompt_hash != offer.prompt_hash:
                return "the prompt's tokens differ from decode's"
        return None

    def offers_conflict(self) -> str | None:
        """Why the offers do not fit each other; None when they do."""
        offers = list(self.offers.values())
        if len({offer.session.registration.tp_size for offer in offers}) > 1:
            return "decode ranks of different tp sizes"
        ranks = [offer.session.registration.tp_rank for offer in offers]
        if len(set(ranks)) < len(ranks):
            return "two sessions claim one decode rank"
        if any(rank not in offers[0].session.route.decode_ranks for rank in ranks):
            return "a decode rank that this prefill rank does not serve"
        windows = {(o.manifest.prefix_len, o.manifest.prompt_len) for o in offers if o.manifest is not None}
        return "decode ranks of different prompt windows" if len(windows) > 1 else None

    @property
    def is_complete(self) -> bool:
        offers = list(self.offers.values())
        if not offers:
            return False
        ranks = {offer.session.registration.tp_rank for offer in offers}
        return ranks == set(offers[0].session.route.decode_ranks)

    @property
    def destinations(self) -> tuple[Destination, ...]:
        """The decode ranks that get bytes, by rank."""
        offers = sorted(self.offers.values(), key=lambda offer: offer.session.registration.tp_rank)
        return tuple(
            Destination(offer.session.id, offer.generation, offer.session.layout, offer.session.route, offer.manifest)
            for offer in offers
            if offer.manifest is not None
        )
