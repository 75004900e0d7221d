"""A decode rank: a plane and an engine. Read it downwards: one method an arrow.

request -> blocks -> open -> delivered -> tokens -> finished
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import attrs

from pdplane.api import (
    DecodeEngine,
    DecodeRequest,
    EngineAssembly,
    EngineDecodeRequest,
    EngineJob,
    EnginePrefix,
    Finished,
    FinishReason,
    Token,
)
from pdplane.control.http_thread import HttpThread
from pdplane.errors import (
    Cause,
    ConfigError,
    InternalError,
    LocalProtocolError,
    PdplaneError,
    PoolExhausted,
    RoomFailed,
    Why,
)
from pdplane.ids import GroupId, Room
from pdplane.kv.layout import U64
from pdplane.kv.manifest import Manifest, build_manifest
from pdplane.machine.actions import Delivered
from pdplane.messages import Fingerprint, hash_prompt
from pdplane.node.legs import Blocks, Place, RunningLine, arrow, check_prompt, why_ended
from pdplane.node.life import NodeLife
from pdplane.plane.config import DecodeConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.rooms import DecodeRoom, open_future

_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def default_cache_bytes() -> int:
    """Return a quarter of the memory that this process may use: padding in batches may double what caches take."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # there is no limit
        found = min(found, int(_LIMIT.read_text("ascii")))
    return found // 4


@attrs.define(eq=False)
class DecodeLeg:
    """One request. Its blocks are released when nothing can land in them and the engine has read them."""

    request: DecodeRequest
    on_token: Callable[[Token], None]
    stop_ids: frozenset[int]
    done: Future[Finished] = attrs.field(factory=open_future)
    began: float = attrs.field(factory=time.monotonic)
    timings: dict[str, float] = attrs.field(factory=dict)
    opened: float | None = None
    place: Place[Mapping[GroupId, int], Blocks] | None = None
    blocks: Blocks | None = None
    waiting: Place[int, int] | None = None
    seat: int | None = None
    gone: set[str] = attrs.field(factory=set)
    room: DecodeRoom | None = None
    prefix: EnginePrefix | None = None
    assembly: EngineAssembly | None = None
    job: EngineJob[FinishReason] | None = None
    why: Why | None = None
    count: int = 0
    cached_tokens: int = 0
    _give_up: Callable[[DecodeLeg], None] = attrs.field(kw_only=True)

    @property
    def number(self) -> Room:
        return self.request.room

    def cancel(self, text: str, cause: Cause = Cause.CANCELLED) -> None:
        """End the leg at whatever step it is; return at once."""
        self.why = self.why or Why(cause, text)
        self._give_up(self)

    @property
    def prefix_len(self) -> int:
        """How many of the prompt's tokens the engine has kept, so that they need not be sent."""
        return 0 if self.prefix is None else self.prefix.tokens

    def let_go(self) -> None:
        """Let the engine forget what it kept for this leg."""
        if self.prefix is not None:
            self.prefix.release()

    def mark(self, name: str, since: float) -> None:
        self.timings[name] = (time.monotonic() - since) * 1e3


class DecodeNode(NodeLife[DecodeEngine, DecodePlane, DecodeLeg]):
    """A plane and an engine that make one decode rank."""

    role = "decode"

    def __init__(
        self,
        engine: DecodeEngine,
        config: DecodeConfig,
        *,
        http: HttpThread | None = None,
        max_waiting: int = 256,
        facts: Mapping[str, Any] | None = None,
        cache_bytes: int | None = None,
        decides: bool = True,
    ) -> None:
        """Take the parts. `cache_bytes` bounds the caches of running sequences, by default a quarter of the memory.

        A rank that does not decide runs what rank 0 runs, which waits for a place for all of them.
        """
        super().__init__(
            engine,
            config,
            http=http,
            max_waiting=max_waiting,
            line_timeout_s=config.waiting_timeout_s,
            facts=facts,
        )
        self._config, self._decides = config, decides
        self._cache_bytes = default_cache_bytes() if cache_bytes is None else cache_bytes
        self._running: RunningLine | None = None

    def _make_plane(self, fingerprint: Fingerprint) -> DecodePlane:
        engine, config = self._engine, self._config
        self._facts |= {"max_running_requests": engine.concurrency, "decode_cache_bytes": self._cache_bytes}
        self._running = RunningLine(
            self._http, count=engine.concurrency, nbytes=self._cache_bytes, timeout_s=config.waiting_timeout_s
        )
        return DecodePlane(config, layout=engine.layout, arena=engine.arena, fingerprint=fingerprint, http=self._http)

    def _addresses(self, plane: DecodePlane) -> dict[str, Any]:
        config = self._config
        return {"advertised": config.advertised, "data": str(config.reached(plane.data)), "session": plane.session}

    def _more_counts(self) -> dict[str, Any]:
        found = {"sequences": dict(self._engine.counts()), "prompt_caches": dict(self._engine.prompt_caches())}
        return found | {"running": self._running.counts() if self._running is not None else {}}

    # ---- one request

    def decode(self, request: DecodeRequest, on_token: Callable[[Token], None]) -> DecodeLeg:
        """Begin a decode leg; ends in its `done`. Raises ConfigError, PoolExhausted, LocalProtocolError (live room)."""
        queue = self._queue
        try:
            if queue is None or self._draining:
                raise LocalProtocolError("this decode takes no requests now", Cause.CLOSING)
            check_prompt(self._engine, request.tokens)
            self._check_cache(request)
        except PdplaneError as error:
            self.refuse(request, error.why)
            raise
        stop_ids = request.stop_ids | (frozenset() if request.ignore_eos else self._engine.tokenizer.eos_ids)
        leg = DecodeLeg(request, on_token, stop_ids, give_up=self._give_up)
        self._legs.add(leg)
        try:
            leg.prefix = self._engine.hold(request.tokens)
            counts = self._engine.blocks_needed(len(request.tokens), leg.prefix_len)
            leg.place = queue.acquire(
                counts, lambda blocks: self._open(leg, blocks), lambda: self._open_room(leg, None)
            )
        except PdplaneError as error:
            leg.let_go()
            self._legs.remove(leg)
            self.refuse(request, error.why)
            raise
        if leg.why is not None:  # cancelled by our closing before it had a place in line
            self._give_up(leg)
        elif leg.done.done():  # its prefill was lost before it had one
            queue.leave(leg.place)
        return leg

    def _open_room(self, leg: DecodeLeg, manifest: Manifest | None) -> None:
        """Open the room with its blocks, or without while it stands in line for them: prefill hears of it then."""
        plane, request = self._plane, leg.request
        assert plane is not None

        def landed(offsets: U64, lengths: U64) -> None:
            if leg.assembly is not None:
                leg.assembly.landed(offsets, lengths)

        leg.room = room = plane.open(
            request.room,
            prefill=request.prefill,
            manifest=manifest,
            prompt_hash=hash_prompt(request.tokens),
            on_landed=landed if request.max_tokens > 1 else None,
        )
        room.released.add_done_callback(lambda _released: self._release(leg, "room"))
        room.done.add_done_callback(lambda done: self._delivered(leg, done))
        if leg.why is not None:
            room.cancel(leg.why.text, leg.why.cause)

    @arrow
    def _open(self, leg: DecodeLeg, blocks: Blocks | PoolExhausted) -> None:
        """Offer the room's blocks, since they are allocated."""
        if isinstance(blocks, PoolExhausted):
            self._refuse_blocks(leg, blocks)
            return
        self._legs.hold(leg, blocks)
        if leg.room is not None and leg.room.done.done():  # it ended in line
            self._release(leg, "room", "engine")
            return
        leg.mark("alloc_ms", leg.began)
        leg.opened = time.monotonic()
        tokens = leg.request.tokens
        try:
            manifest = build_manifest(self._engine.layout, blocks, leg.prefix_len, len(tokens))
            if leg.request.max_tokens > 1:  # else the first token, from prefill, is the whole answer
                leg.assembly = self._engine.assemble(len(tokens), blocks, leg.prefix)
            if leg.room is None:
                self._open_room(leg, manifest)
            else:
                leg.room.offer(manifest)
        except PdplaneError as error:
            self._release(leg, "room", "engine")
            self._refuse_blocks(leg, error)

    def _refuse_blocks(self, leg: DecodeLeg, error: PdplaneError) -> None:
        """End a leg that has offered nothing yet."""
        if leg.room is not None:
            leg.room.cancel(f"decode has no blocks: {error}", error.cause)
        self._fail(leg, error)

    @arrow
    def _delivered(self, leg: DecodeLeg, done: Future[Delivered]) -> None:
        """Begin to generate, since the cache is whole, or fail with the room."""
        if leg.place is not None and self._queue is not None:
            self._queue.leave(leg.place)  # it ended in line
        if leg.opened is not None:
            leg.mark("transfer_wait_ms", leg.opened)
        whole = time.monotonic()
        try:
            delivered = done.result()
            leg.cached_tokens = delivered.cached_tokens
            leg.timings["transfer_mb"] = delivered.nbytes / 1e6
            if leg.why is not None:
                raise RoomFailed(leg.request.room, leg.why.cause, leg.why.text)
            if delivered.first_token is None:  # every daemon's prefill draws one; a serving stack's own need not
                raise RoomFailed(leg.request.room, Cause.PEER_FAILED, "prefill sent no first token")
            request = self._continue(leg, delivered, delivered.first_token)
            self._stand(leg, lambda seat: self._run(leg, seat, request, whole))
        except PdplaneError as error:
            self._release(leg, "engine")
            self._fail(leg, error)

    def _stand(self, leg: DecodeLeg, then: Callable[[int | PoolExhausted | None], None]) -> None:
        """Stand in line for a place to run, unless nothing will run here, or rank 0 stands there for us."""
        line = self._running
        assert line is not None
        if leg.request.max_tokens == 1 or not self._decides:
            then(None)
            return
        leg.waiting = line.acquire(self._cache_nbytes(leg.request), then)
        if leg.why is not None:  # it was given up before it had a place in line
            self._give_up(leg)

    @arrow
    def _run(
        self, leg: DecodeLeg, seat: int | PoolExhausted | None, request: EngineDecodeRequest, whole: float
    ) -> None:
        """Generate, since there is a place to run."""
        try:
            if isinstance(seat, PoolExhausted):
                text = f"no other sequence ended in {self._config.waiting_timeout_s:g} s, and no more may run at once"
                raise RoomFailed(leg.request.room, Cause.FULL, text)
            leg.seat = seat
            if leg.why is not None:
                raise RoomFailed(leg.request.room, leg.why.cause, leg.why.text)
            leg.job = self._engine.decode(
                request, lambda token: self._token(leg, token), lambda: self._assembled(leg, whole)
            )
        except PdplaneError as error:
            self._release(leg, "engine")
            self._fail(leg, error)
            return
        leg.job.future.add_done_callback(lambda job: self._finished(leg, job))
        if leg.why is not None:
            leg.job.cancel()

    def _cache_nbytes(self, request: DecodeRequest) -> int:
        """Return the bytes to which the caches of this sequence may grow."""
        context, wanted = self._engine.context_length, len(request.tokens) + request.max_tokens
        return self._engine.cache_nbytes(wanted if context is None else min(wanted, context))

    def _check_cache(self, request: DecodeRequest) -> None:
        """Raise ConfigError for a sequence that could not even run by itself."""
        nbytes = self._cache_nbytes(request) if request.max_tokens > 1 else 0
        if nbytes > self._cache_bytes:
            raise ConfigError(
                f"{len(request.tokens)} prompt tokens and max_tokens {request.max_tokens} may need {nbytes} bytes of "
                f"cache, more than the {self._cache_bytes} that running sequences have; ask for fewer tokens"
            )

    def _continue(self, leg: DecodeLeg, delivered: Delivered, first_token: int) -> EngineDecodeRequest:
        logprob = float("nan") if delivered.logprob is None else delivered.logprob
        return EngineDecodeRequest(
            leg.request.tokens,
            dict(leg.blocks or {}),
            Token(first_token, logprob, delivered.top),
            leg.request.max_tokens,
            leg.stop_ids,
            leg.request.sampling,
            assembly=leg.assembly,
            prefix=leg.prefix,
            key=leg.request.room,
        )

    def _assembled(self, leg: DecodeLeg, whole: float) -> None:
        """Release the blocks, since the engine has its own copy; the first step begins."""
        leg.mark("assembly_ms", whole)
        leg.let_go()
        self._release(leg, "engine")

    def _token(self, leg: DecodeLeg, token: Token) -> None:
        """Pass a token on, the first one included."""
        leg.count += 1
        if leg.count == 1:
            leg.mark("first_token_ms", leg.began)
        leg.on_token(token)

    @arrow
    def _finished(self, leg: DecodeLeg, job: Future[FinishReason]) -> None:
        """End the leg, since the sequence has ended."""
        self._leave_seat(leg)
        leg.let_go()
        self._release(leg, "engine")
        if job.cancelled() or job.exception() is not None:
            why = leg.why or why_ended("decode", job)
            self._fail(leg, RoomFailed(leg.request.room, why.cause, why.text))
            return
        leg.mark("decode_ms", leg.began + leg.timings.get("first_token_ms", 0.0) / 1e3)
        self._legs.remove(leg)
        finished = Finished(job.result(), len(leg.request.tokens), leg.count, leg.cached_tokens, dict(leg.timings))
        leg.done.set_result(finished)

    def _give_up(self, leg: DecodeLeg) -> None:
        """Stop the leg at the step that it has reached; later steps look at `why`."""
        why = leg.why or Why(Cause.CANCELLED, "cancelled")
        if leg.place is not None and self._queue is not None and self._queue.leave(leg.place):
            if leg.room is not None:
                leg.room.cancel(why.text, why.cause)
            self._fail(leg, RoomFailed(leg.request.room, why.cause, why.text))
        elif leg.waiting is not None and self._running is not None and self._running.leave(leg.waiting):
            self._release(leg, "engine")
            self._fail(leg, RoomFailed(leg.request.room, why.cause, why.text))
        elif leg.job is not None:
            leg.job.cancel()
        elif leg.room is not None:
            leg.room.cancel(why.text, why.cause)

    def _leave_seat(self, leg: DecodeLeg) -> None:
        """Give the place to run to the next sequence, once."""
        seat, leg.seat = leg.seat, None
        if seat is not None and self._running is not None:
            self._running.release(seat)

    def _fail(self, leg: DecodeLeg, error: PdplaneError) -> None:
        if leg.assembly is not None:
            leg.assembly.drop()
        leg.let_go()
        self._leave_seat(leg)
        self._legs.remove(leg)
        if leg.room is None:
            self.refuse(leg.request, error.why)
        if not leg.done.done():
            leg.done.set_exception(error)

    def refuse(self, request: DecodeRequest, why: Why) -> None:
        """Tell prefill that this half of the request will not be served, so that the other one ends at once."""
        if self._plane is None:
            return
        try:
            prompt_hash = hash_prompt(request.tokens)
        except OverflowError:
            return  # no vocabulary has such a token, so prefill refuses the request too
        at = request.prefill
        self._plane.decline(request.room, prefill=at, prompt_hash=prompt_hash, text=why.text, cause=why.cause)

    def crashed(self, leg: DecodeLeg, error: InternalError) -> None:
        """End this leg, and nothing else, after a bug of ours; called by `arrow`."""
        self._fail(leg, error)
        if leg.room is not None:
            leg.room.cancel(str(error), error.cause)
        else:
            self._release(leg, "room")
        if leg.job is not None:
            leg.job.cancel()
        else:
            self._release(leg, "engine")

    def _release(self, leg: DecodeLeg, *users: str) -> None:
        for user in users:
            blocks = self._legs.release(leg, user)
            if blocks is not None and self._queue is not None:
                self._queue.release(blocks)
