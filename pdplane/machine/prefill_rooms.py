"""A prefill rank's rooms: all facts of one in one object, so that forgetting it is one `del`; and all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

import attrs

from pdplane.errors import Cause, RoomFailed, Why
from pdplane.ids import Generation, Rank, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.kv.manifest import Manifest
from pdplane.machine.actions import (
    CancelPush,
    Destination,
    Fail,
    Offered,
    PrefillSettings,
    PrefillTimers,
    PrefillTurn,
    Release,
    Send,
    StartPush,
    Succeed,
)
from pdplane.machine.events import PrefillRequested, RoomFinished
from pdplane.machine.sessions import Session, Sessions
from pdplane.machine.uses import (
    PREFILL_TABLE,
    TOMBSTONES,
    DecodeLife,
    Graveyard,
    Known,
    PrefillMove,
    PrefillState,
    RankUse,
    Standing,
    Tombstone,
    advance,
    merge,
    standing,
)
from pdplane.messages import Failed, Push, Status, StatusCode, Window, is_legacy


@attrs.frozen
class RankOffer:
    """One decode rank's pre-allocation; the manifest is None when that rank gets no bytes.

    `queued`: it stands in line for its blocks, and the pre-allocation comes later.
    """

    session: Session
    generation: Generation
    manifest: Manifest | None
    prompt_hash: str
    queued: bool = False

    @property
    def part(self) -> RankUse:
        return RankUse((self.session.id, self.session.life), self.generation)


@attrs.define
class PrefillUse:
    """One use of a room number.

    `ended` names earlier uses of the number, so that their late messages are known. `before` is the tombstone of the
    last one, if that ended a short while ago.
    """

    room: Room
    since: float
    ended: Mapping[DecodeLife, Generation] = attrs.field(factory=dict)
    before: Tombstone | None = None
    state: PrefillState = PrefillState.EARLY
    request: PrefillRequested | None = None
    finish: RoomFinished | None = None
    offers: dict[SessionId, RankOffer] = attrs.field(factory=dict)
    queued: dict[SessionId, RankOffer] = attrs.field(factory=dict)  # of decode ranks whose offers will follow
    declined: list[RankUse] = attrs.field(factory=list)  # uses of decode ranks that gave them up
    pushes: set[int] = attrs.field(factory=set)
    why: Why | None = None
    story: list[str] = attrs.field(factory=list)

    def move(self, move: PrefillMove, now: float) -> bool:
        """Advance by the table; return True when a new state was entered."""
        before, self.state = self.state, advance(PREFILL_TABLE, self.state, move)
        if entered := before is not self.state:
            self.story.append(f"{self.state.value} +{now - self.since:.3f}s")
        return entered

    @property
    def takes_offers(self) -> bool:
        return self.state in (PrefillState.EARLY, PrefillState.OPENED)

    @property
    def heard(self) -> list[RankOffer]:
        """What decode ranks have said of it: their offers, and that they stand in line."""
        return [*self.offers.values(), *self.queued.values()]

    def has(self, offer: RankOffer) -> bool:
        """Return whether it has exactly this word."""
        return (self.queued if offer.queued else self.offers).get(offer.session.id) == offer

    def take(self, offer: RankOffer) -> PrefillMove:
        """Add a decode rank's word."""
        if offer.queued:
            self.queued[offer.session.id] = offer
            return PrefillMove.QUEUED
        self.queued.pop(offer.session.id, None)
        self.offers[offer.session.id] = offer
        return PrefillMove.OFFERED

    def takes_part(self, identity: bytes, generation: Generation) -> bool:
        """Return whether the room has this connection's word of this generation."""
        return any(word.session.identity == identity and word.generation == generation for word in self.heard)

    def asks_for(self, prompt_hash: str) -> bool:
        """Return whether its request is of this prompt and waits for offers."""
        return self.takes_offers and self.request is not None and self.request.prompt_hash == prompt_hash

    def place_conflict(self, newcomer: RankOffer) -> Why | None:
        """Return why a new offer does not fit the others, or None; a refusal costs the newcomer only."""
        for offer in self.heard:
            ours, theirs = offer.session, newcomer.session
            if ours is theirs:
                continue  # it stood in line, and now it has its blocks
            if ours.registration.tp_size != theirs.registration.tp_size:
                return Why(Cause.REFUSED, "the room has decode ranks of another tp size")
            if ours.route.decode_ranks != theirs.route.decode_ranks:
                return Why(Cause.REFUSED, "the room has other decode ranks")
            if ours.registration.tp_rank == theirs.registration.tp_rank:
                return Why(Cause.REFUSED, "the room has another session of this decode rank")
        return None

    def remember_missed(self, part: RankUse) -> Why:
        """Remember that a decode rank has heard of the last use's failure; return why that failed."""
        before = self.before
        assert before is not None, "it missed a use that is remembered"
        assert before.why is not None, "only a use that failed is missed"
        self.before = attrs.evolve(before, members=before.members | {part.peer})
        self.ended = merge(self.ended, part)
        return before.why

    def prompt_conflict(self, *newcomers: RankOffer) -> Why | None:
        """Return why the offers and the request cannot be of one prompt; None when they can."""
        words = (*self.heard, *newcomers)
        offers = [word for word in words if word.queued or word.manifest is not None]
        windows = {(o.manifest.prefix_len, o.manifest.prompt_len) for o in offers if o.manifest is not None}
        hashes = {offer.prompt_hash for offer in offers if offer.prompt_hash}
        if len(windows) > 1 or len(hashes) > 1:
            return Why(Cause.REFUSED, "the decode ranks' prompts differ")
        request = self.request
        if request is None:
            return None
        lengths = {prompt_len for _, prompt_len in windows}
        if request.prompt_len is not None and lengths - {request.prompt_len}:
            return Why(Cause.REFUSED, f"prompt_len differs: ours {request.prompt_len}, decode's {lengths.pop()}")
        if request.prompt_hash and hashes - {request.prompt_hash}:
            return Why(Cause.REFUSED, "the prompt's tokens differ from decode's")
        return None

    @property
    def withdrawn(self) -> Why | None:
        """Why decode gave this use up before its request came, or None; a new offer revives it."""
        before, request = self.before, self.request
        if before is None or request is None or self.heard or not before.awaits(request.prompt_hash):
            return None
        return before.why

    @property
    def is_complete(self) -> bool:
        offers = list(self.offers.values())
        if not offers:
            return False
        ranks = {offer.session.registration.tp_rank for offer in offers}
        return ranks == set(offers[0].session.route.decode_ranks)

    def offers_by_rank(self) -> list[RankOffer]:
        """Return the offers of the decode ranks that get bytes."""
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


# ---- A prefill rank's rooms, and what follows from the states that they enter
#
# A number belongs to at most one live room. A room that fails frees its number at once, so that the next use need not
# wait, but is kept until its last push has ended: only then are its blocks released.


TOO_MANY = Why(Cause.FULL, "too many live rooms")
_PUSHES = 2**32  # the data plane numbers a room's pushes by a u32; ours wrap around, long after the last use


class PrefillRooms:
    """Every room of one prefill rank: live, draining, ended."""

    def __init__(self, settings: PrefillSettings, sessions: Sessions, timers: PrefillTimers) -> None:
        self._settings, self._sessions, self._timers = settings, sessions, timers
        self._live: dict[Room, PrefillUse] = {}
        self._draining: dict[int, PrefillUse] = {}  # failed, by ticket
        self._pushing: dict[int, PrefillUse] = {}  # by push
        self._graveyard = Graveyard()
        self._numbers = itertools.count(1)
        self.totals: Counter[str] = Counter()

    # ---- questions

    def __iter__(self) -> Iterator[PrefillUse]:
        """Return the live rooms."""
        return iter(list(self._live.values()))

    def get(self, number: Room) -> PrefillUse | None:
        return self._live.get(number)

    def current(self, number: Room, ticket: int) -> PrefillUse | None:
        """Return the live room, if it is this caller's use of the number."""
        room = self._live.get(number)
        return room if room and room.request and room.request.ticket == ticket else None

    def known(self, number: Room, now: float) -> Known:
        """Return what `standing` needs to know of a number."""
        room = self._live.get(number)
        if room is None:
            return Known(stone=self._graveyard.find(number, now))
        live = {word.part.peer: word.generation for word in room.heard}
        return Known(live, room.request is not None, room.ended, room.before)

    @property
    def is_full(self) -> bool:
        return len(self._live) + len(self._draining) >= self._settings.max_rooms

    def states(self) -> Counter[str]:
        return Counter(room.state.value for room in (*self._live.values(), *self._draining.values()))

    @property
    def pushes(self) -> int:
        return len(self._pushing)

    @property
    def tombstones(self) -> int:
        return len(self._graveyard)

    # ---- moves

    def open(self, turn: PrefillTurn, number: Room) -> PrefillUse:
        """Open a room under a free number."""
        before = self._graveyard.find(number, turn.now)
        ended = self._graveyard.take(number, turn.now)
        room = self._live[number] = PrefillUse(number, turn.now, ended, before)
        self._timers.set(number, turn.now + self._settings.peer_timeout_s)
        return room

    def evict(self, turn: PrefillTurn) -> None:
        """Make place for a request: break the room whose offer has waited longest without one."""
        early = next((room for room in self._live.values() if room.state is PrefillState.EARLY), None)
        if early is not None:
            self.break_(turn, early, TOO_MANY)

    def push(self, turn: PrefillTurn, room: PrefillUse, session_id: SessionId, copies: Copies) -> None:
        offer, number = room.offers[session_id], next(self._numbers) % _PUSHES
        room.pushes.add(number)
        self._pushing[number] = room
        session, push = offer.session, Push(room.room, offer.generation, number, copies)
        turn.add(StartPush(session_id, session.life, push, session.registration.arena_base))

    def push_ended(self, turn: PrefillTurn, push: int, failure: Why | None) -> None:
        room = self._pushing.pop(push, None)
        if room is None:
            return
        room.pushes.discard(push)
        if failure is None:
            self.move(turn, room, PrefillMove.PUSHED)
        else:
            self.break_(turn, room, failure)
        self.drain(turn, room)

    def break_(self, turn: PrefillTurn, room: PrefillUse, why: Why) -> None:
        room.why = room.why or why
        self.move(turn, room, PrefillMove.BROKEN)

    def drain(self, turn: PrefillTurn, room: PrefillUse) -> None:
        if not room.pushes and room.state in (PrefillState.FINISHING, PrefillState.FAILING):
            self.move(turn, room, PrefillMove.DRAINED)

    def move(self, turn: PrefillTurn, room: PrefillUse, move: PrefillMove) -> None:
        if room.move(move, turn.now):
            self._entered(turn, room)

    def offered(self, turn: PrefillTurn, room: PrefillUse, offer: RankOffer) -> None:
        """Add a decode rank's offer, or its word that it stands in line."""
        self.move(turn, room, room.take(offer))
        if room.state is PrefillState.OPENED:
            self._timers.set(room.room, turn.now + self._patience(room))

    def _patience(self, room: PrefillUse) -> float:
        """Return how long an opened room waits, from the last word on, for what is missing still.

        heard of decode                                    waits
        nothing, but that it gave the last use up          reoffer_s
        nothing                                            peer_timeout_s
        nothing, and a registered rank sends no notices    bootstrap_timeout_s, since it may stand in line
        a rank stands in line                              waiting_timeout_s: its own end, or its loss, comes before
        some ranks' offers                                 bootstrap_timeout_s
        """
        settings = self._settings
        if room.withdrawn:
            return min(settings.peer_timeout_s, settings.reoffer_s)
        if room.queued:
            return settings.waiting_timeout_s
        return settings.bootstrap_timeout_s if room.offers or self._sessions.any_mute() else settings.peer_timeout_s

    def withdraw(self, turn: PrefillTurn, number: Room, use: RankUse, prompt_hash: str, why: Why) -> None:
        """Remember that a decode rank gave a use up, under a number that no live room has."""
        known = self.known(number, turn.now)
        found, stone = standing(known, use), known.stone
        if found in (Standing.OVER, Standing.UNCLEAR):
            return
        if found is Standing.LATE or standing(known, None) is Standing.UNCLEAR:
            self.remember(turn, number, use)
            return
        self._remember(
            number,
            Tombstone(
                why,
                until=turn.now + self._settings.tombstone_s,
                requested=False,
                ended=merge(stone.ended if stone else {}, use),
                members=frozenset({use.peer}),
                prompts=frozenset({prompt_hash} - {""}),
            ),
        )

    def decline(self, turn: PrefillTurn, room: PrefillUse, use: RankUse, why: Why) -> None:
        """Break a room because a decode rank gave it up; a later generation of that rank is another use."""
        if use.generation:
            room.declined.append(use)
        self.break_(turn, room, why)

    def remember(self, turn: PrefillTurn, number: Room, use: RankUse) -> None:
        """Add a decode rank's use to a tombstone: its message came after the room had failed."""
        stone = self._graveyard.find(number, turn.now)
        assert stone is not None, "the last use is remembered"
        until = max(stone.until, turn.now + self._settings.tombstone_s)
        ended, members = merge(stone.ended, use), stone.members | {use.peer}
        self._remember(number, attrs.evolve(stone, until=until, ended=ended, members=members))

    def time_over(self, turn: PrefillTurn, number: Room) -> None:
        """Break the room whose deadline has passed, or forget the oldest tombstones."""
        if number == TOMBSTONES:
            self._graveyard.expire(turn.now)
            self._await_tombstones()
        elif room := self._live.get(number):
            self.break_(turn, room, _time_over(room, self._settings, self._patience(room)))

    def _remember(self, number: Room, stone: Tombstone) -> None:
        self._graveyard.bury(number, stone)
        self._await_tombstones()

    def _await_tombstones(self) -> None:
        if TOMBSTONES not in self._timers and (until := self._graveyard.earliest()) is not None:
            self._timers.set(TOMBSTONES, until)

    def lost(self, turn: PrefillTurn, gone: list[Session], text: str) -> None:
        """Break every room that has an offer of one of these sessions."""
        for session in gone:
            for room in self:
                if any(word.session is session for word in room.heard):
                    self.break_(turn, room, Why(Cause.PEER_LOST, f"session {session.id} lost: {text}"))

    def tell_failed(self, turn: PrefillTurn, identity: bytes, room: Room, generation: Generation, why: Why) -> None:
        if self._sessions.is_native(identity):
            turn.add(Send(identity, Failed(room, generation, why)))
        else:
            turn.add(Send(identity, Status(room, StatusCode.FAILED, Rank(self._settings.prefill_rank))))

    # ---- states

    def _entered(self, turn: PrefillTurn, room: PrefillUse) -> None:
        match room.state:
            case PrefillState.OPENED:
                self._timers.set(room.room, turn.now + self._patience(room))
            case PrefillState.OFFERED:
                self._timers.set(room.room, turn.now + self._settings.waiting_timeout_s)
                self._enter_offered(turn, room)
            case PrefillState.FAILING:
                self._bury(turn, room)
                self._enter_failing(turn, room)
                self.drain(turn, room)
            case PrefillState.SUCCEEDED:
                self._bury(turn, room)
                self._enter_succeeded(turn, room)
                self._ended(turn, room)
            case PrefillState.FAILED:
                self._ended(turn, room)
            case _:
                return

    def _bury(self, turn: PrefillTurn, room: PrefillUse) -> None:
        self._timers.drop(room.room)
        del self._live[room.room]
        uses = [*(word.part for word in room.heard), *room.declined]
        gave_up = room.before.members if room.before and room.withdrawn else frozenset()
        stone = Tombstone(
            why=room.why,
            until=turn.now + self._settings.tombstone_s,
            requested=room.request is not None,
            ended=merge(room.ended, *uses),
            members=gave_up.union(use.peer for use in uses),
            prompts=frozenset(word.prompt_hash for word in room.heard if word.prompt_hash),
        )
        if any(is_legacy(offer.session.identity) for offer in room.offers.values()):
            # Its late messages would look like those of a new use, so none may begin while they can come.
            stone = attrs.evolve(stone, until=turn.now + self._settings.bootstrap_timeout_s)
        self._remember(room.room, stone)

    def _enter_offered(self, turn: PrefillTurn, room: PrefillUse) -> None:
        assert room.request is not None, "only an opened room is offered"
        manifest = next((o.manifest for o in room.offers.values() if o.manifest is not None), None)
        prefix_len, prompt_len = (manifest.prefix_len, manifest.prompt_len) if manifest else (0, 0)
        turn.add(Offered(room.room, room.request.ticket, prefix_len, prompt_len, room.destinations))

    def _enter_failing(self, turn: PrefillTurn, room: PrefillUse) -> None:
        why = room.why or Why(Cause.INTERNAL, "unknown")
        for offer in room.heard:
            session = offer.session
            if self._sessions.knows(session.identity):
                self.tell_failed(turn, session.identity, room.room, offer.generation, why)
            if room.pushes and offer.manifest is not None:
                turn.add(CancelPush(session.id, session.life, room.room, offer.generation))
        if room.request:
            turn.add(
                Fail(room.room, room.request.ticket, RoomFailed(room.room, why.cause, why.text, tuple(room.story)))
            )
            self._draining[room.request.ticket] = room

    def _enter_succeeded(self, turn: PrefillTurn, room: PrefillUse) -> None:
        finish = room.finish
        assert finish is not None, "only a finished room succeeds"
        for offer in room.offers_by_rank():  # a decode rank that gets no bytes expects no status
            status = Status(
                room.room,
                StatusCode.SUCCESS,
                Rank(self._settings.prefill_rank),
                finish.first_token,
                finish.candidates,
                finish.cached_tokens,
                finish.logprob,
            )
            identity = offer.session.identity
            if self._sessions.is_native(identity):  # a status carries no generation: this names the one it is for
                turn.add(Send(identity, Window(room.room, offer.generation, "", finish.top)))
            turn.add(Send(identity, status))
        turn.add(Succeed(room.room, finish.ticket))

    def _ended(self, turn: PrefillTurn, room: PrefillUse) -> None:
        self.totals[room.state.value] += 1
        if room.request:
            self._draining.pop(room.request.ticket, None)
            turn.add(Release(room.room, room.request.ticket))


def _never_offered(room: PrefillUse, waited_s: float) -> Why:
    if room.queued:
        return Why(Cause.FULL, f"decode had no blocks for it in {waited_s:g} s")
    who = "not every decode rank" if room.offers else "no decode rank"
    return Why(Cause.UNMATCHED, f"{who} offered blocks in {waited_s:g} s")


def _time_over(room: PrefillUse, settings: PrefillSettings, waited_s: float) -> Why:
    if room.state is PrefillState.EARLY:
        return Why(Cause.UNMATCHED, f"no request came for this room in {settings.peer_timeout_s:g} s")
    if room.state is PrefillState.OPENED:
        return room.withdrawn or _never_offered(room, waited_s)
    return Why(Cause.TIMED_OUT, f"not finished in {settings.waiting_timeout_s:g} s")
