"""A prefill rank: a plane and an engine. Read it downwards: one method an arrow.

request -> offered -> line up -> compute -> push -> finish -> released
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import attrs

from pdplane.api import EngineJob, FirstToken, PrefillEngine, PrefillRequest, Token
from pdplane.control.http_thread import HttpThread
from pdplane.errors import Cause, InternalError, LocalProtocolError, PdplaneError, PoolExhausted, Why
from pdplane.ids import GroupId, Room
from pdplane.kv.copies import expected_bytes
from pdplane.kv.manifest import blocks_behind
from pdplane.messages import Fingerprint, hash_prompt
from pdplane.node.legs import Blocks, Place, arrow, check_prompt, why_ended
from pdplane.node.life import NodeLife
from pdplane.plane.config import PrefillConfig
from pdplane.plane.prefill import PrefillPlane
from pdplane.plane.rooms import PrefillRoom, RoomWindow, open_future

Gate: TypeAlias = Callable[[Room, Callable[[], None]], None]
"""Called with (room, go on) when decode's offer is there; calls `go on` once, on any thread, when all ranks have it."""


def pass_at_once(_room: Room, go_on: Callable[[], None]) -> None:
    """Go on at once: the gate of a single rank."""
    go_on()


@attrs.define(eq=False)
class PrefillLeg:
    """One request. Its blocks are released when neither the engine nor a push touches them any more."""

    request: PrefillRequest
    room: PrefillRoom
    done: Future[FirstToken] = attrs.field(factory=open_future)
    began: float = attrs.field(factory=time.monotonic)
    timings: dict[str, float] = attrs.field(factory=dict)
    place: Place[Mapping[GroupId, int], Blocks] | None = None
    blocks: Blocks | None = None
    gone: set[str] = attrs.field(factory=set)
    job: EngineJob[Token] | None = None
    nbytes: int = 0
    cached_tokens: int = 0
    first: FirstToken | None = None
    pushed: float | None = None
    computed: float = 0.0

    @property
    def number(self) -> Room:
        return self.request.room

    def cancel(self, text: str, cause: Cause = Cause.CANCELLED) -> None:
        self.room.cancel(text, cause)

    def reuse(self, tokens: int) -> None:
        """Note how many tokens come from another prompt's cache."""
        self.cached_tokens = tokens

    def mark(self, name: str, since: float) -> None:
        self.timings[name] = (time.monotonic() - since) * 1e3


class PrefillNode(NodeLife[PrefillEngine, PrefillPlane, PrefillLeg]):
    """A plane and an engine that make one prefill rank."""

    role = "prefill"

    def __init__(
        self,
        engine: PrefillEngine,
        config: PrefillConfig,
        *,
        http: HttpThread | None = None,
        max_waiting: int = 256,
        facts: Mapping[str, Any] | None = None,
        gate: Gate = pass_at_once,
    ) -> None:
        super().__init__(
            engine,
            config,
            http=http,
            max_waiting=max_waiting,
            line_timeout_s=config.waiting_timeout_s,
            facts=facts,
        )
        self._config, self._gate = config, gate

    def _make_plane(self, fingerprint: Fingerprint) -> PrefillPlane:
        engine, config = self._engine, self._config
        return PrefillPlane(config, layout=engine.layout, arena=engine.arena, fingerprint=fingerprint, http=self._http)

    def _announce_drain(self) -> None:
        if self._plane is not None:
            self._plane.drain()

    def _addresses(self, plane: PrefillPlane) -> dict[str, Any]:
        config = self._config
        found = {"bootstrap_host": config.advertised, "bootstrap_port": plane.rendezvous.port}
        found["advertised"], found["control"] = config.advertised, str(config.reached(plane.control))
        if plane.legacy_control is not None:
            found["legacy_control"] = str(config.reached(plane.legacy_control))
        return found

    # ---- one request

    def prefill(self, request: PrefillRequest) -> PrefillLeg:
        """Begin a prefill leg; ends in its `done`. Raises ConfigError for a prompt that can never fit."""
        plane = self._plane
        try:
            if plane is None or self._queue is None or self._draining:
                raise LocalProtocolError("this prefill takes no requests now", Cause.CLOSING)
            check_prompt(self._engine, request.tokens)
        except PdplaneError as error:
            self.refuse(request, error.why)
            raise
        room = plane.open(request.room, prompt_len=len(request.tokens), prompt_hash=hash_prompt(request.tokens))
        leg = PrefillLeg(request, room)
        try:
            self._legs.add(leg)
        except LocalProtocolError as live:
            room.cancel(str(live), live.cause)
            raise
        room.window.add_done_callback(lambda window: self._offered(leg, window))
        room.done.add_done_callback(lambda done: self._ended(leg, done))
        room.released.add_done_callback(lambda _: self._released(leg))
        return leg

    def refuse(self, request: PrefillRequest, why: Why) -> None:
        """Tell decode that this half of the request will not be served, so that the other one ends at once."""
        if self._plane is not None:
            with contextlib.suppress(PdplaneError):  # a closed plane, or a room of another group
                self._plane.open(request.room).cancel(why.text, why.cause)

    @arrow
    def _offered(self, leg: PrefillLeg, window: Future[RoomWindow]) -> None:
        """Go on to the gate, since decode has offered its blocks."""
        if window.exception() is not None:
            return  # `_ended` takes it
        offer = window.result()
        leg.mark("bootstrap_ms", leg.began)
        for destination in offer.destinations:
            leg.nbytes += expected_bytes(destination.layout, destination.manifest, destination.route)
        self._gate(leg.number, lambda: self._line_up(leg))

    @arrow
    def _line_up(self, leg: PrefillLeg) -> None:
        """Stand in line for blocks of our own, since every rank has its offer."""
        queue = self._queue
        assert queue is not None
        try:
            counts = self._engine.blocks_needed(len(leg.request.tokens))
            leg.place = queue.acquire(counts, lambda blocks: self._compute(leg, blocks))
        except PdplaneError as error:
            leg.cancel(str(error), error.cause)
            return
        if leg.room.done.done():  # it ended before it had a place in line
            queue.leave(leg.place)

    @arrow
    def _compute(self, leg: PrefillLeg, blocks: Blocks | PoolExhausted) -> None:
        """Let the engine fill the allocated blocks."""
        if isinstance(blocks, PoolExhausted):
            leg.cancel(f"prefill has no blocks: {blocks}", blocks.cause)
            return
        self._legs.hold(leg, blocks)
        leg.mark("alloc_ms", leg.began)
        started = time.monotonic()
        try:
            if leg.room.done.done():
                raise LocalProtocolError("the room ended while it stood in line", Cause.CANCELLED)
            leg.job = self._engine.prefill(
                leg.request.tokens,
                blocks,
                lambda steps, chunk: self._push(leg, blocks, steps, chunk),
                leg.number,
                leg.request.sampling,
                leg.reuse,
            )
        except PdplaneError as error:
            leg.cancel(str(error), error.cause)
            self._release(leg, "engine")
            return
        leg.job.future.add_done_callback(lambda job: self._finish(leg, job, started))
        if leg.room.done.done():
            leg.job.cancel()

    def _push(self, leg: PrefillLeg, blocks: Mapping[GroupId, Sequence[int]], steps: range, chunk: range) -> None:
        """Send the pages of some layers that are complete up to the chunk's end, while the rest is computed.

        The whole prompt is computed here; what decode has already is not sent.
        """
        if not leg.room.done.done():
            window = leg.room.window.result()
            wanted = blocks_behind(self._engine.layout, blocks, window.prefix_len, window.prompt_len)
            leg.pushed = leg.pushed or time.monotonic()
            try:
                leg.room.push(wanted, steps, chunk)
            except PdplaneError as error:  # the engine goes on: other ranks may be in the middle of the same step
                leg.cancel(str(error), error.cause)

    @arrow
    def _finish(self, leg: PrefillLeg, job: Future[Token], started: float) -> None:
        """Finish the room, or fail it, as the engine's job ended."""
        leg.mark("prefill_ms", started)
        leg.computed = time.monotonic()
        if job.cancelled() or job.exception() is not None:
            why = why_ended("prefill", job)
            leg.cancel(why.text, why.cause)
        else:
            first = job.result()
            self._succeed(leg, FirstToken(first.id, first.logprob, top=first.top))
        self._release(leg, "engine")

    def _succeed(self, leg: PrefillLeg, first: FirstToken) -> None:
        leg.first = first
        try:
            leg.room.finish(first.token, first.logprob, cached_tokens=leg.cached_tokens, top=first.top)
        except PdplaneError as error:  # a token that no status can carry
            leg.cancel(f"prefill failed: {error}", error.cause)

    @arrow
    def _ended(self, leg: PrefillLeg, done: Future[None]) -> None:
        """End the leg: Success has gone out, or the room failed. Its number is free."""
        self._legs.remove(leg)
        if leg.done.done():
            return  # it crashed
        error = done.exception()
        if error is not None:
            if leg.place is not None and self._queue is not None:
                self._queue.leave(leg.place)
            if leg.job is not None:
                leg.job.cancel()
            leg.done.set_exception(error)
            return
        first = leg.first
        if first is None:
            leg.done.set_exception(InternalError("a room succeeded without a first token"))
            return
        leg.mark("transfer_ms", leg.computed)
        seconds = time.monotonic() - (leg.pushed or leg.computed)
        leg.timings |= {"transfer_mb": leg.nbytes / 1e6, "transfer_gb_s": leg.nbytes / 1e9 / max(seconds, 1e-9)}
        leg.done.set_result(attrs.evolve(first, timings=dict(leg.timings)))

    def _released(self, leg: PrefillLeg) -> None:
        """Release the room's hold on the blocks, which no push reads any more."""
        self._release(leg, "room")

    def crashed(self, leg: PrefillLeg, error: InternalError) -> None:
        """End this leg, and nothing else, after a bug of ours; called by `arrow`."""
        if not leg.done.done():
            leg.done.set_exception(error)
        leg.cancel(str(error), error.cause)
        if leg.job is not None:
            leg.job.cancel()
        else:
            self._release(leg, "engine")

    def _release(self, leg: PrefillLeg, user: str) -> None:
        blocks = self._legs.release(leg, user)
        if blocks is not None and self._queue is not None:
            self._queue.release(blocks)

    def _more_counts(self) -> dict[str, Any]:
        return {"prompt_caches": dict(self._engine.prompt_caches())}
