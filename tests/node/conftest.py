"""Two daemons in this process: planes, toy engines, and the requests between them."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import pytest

from pdplane.api import DecodeRequest, Finished, PrefillRequest
from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, Room, new_room
from pdplane.node.decode import DecodeLeg, DecodeNode
from pdplane.node.prefill import PrefillLeg, PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.toy.engine import ToyDecodeEngine, ToyPrefillEngine
from pdplane.toy.model import ToyOptions, toy_answer
from tests.waiting import PATIENCE_S, until

SHORT: dict[str, Any] = {"bootstrap_timeout_s": 5, "waiting_timeout_s": 5, "tombstone_s": 0.1}


def prompt(seed: int, length: int | None = None) -> tuple[int, ...]:
    """Tokens that no other seed gives."""
    source = random.Random(seed)
    return tuple(source.randrange(2, 256) for _ in range(length or source.randrange(1, 60)))


@attrs.define(eq=False)
class Prefill:
    """A prefill daemon; clear `hold` to stop its engine before the next chunk."""

    node: PrefillNode
    hold: threading.Event
    parents: int
    port: int

    @property
    def rendezvous(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)


@attrs.define(eq=False)
class Decode:
    """A decode daemon; clear `hold` to stop its engine before the next token."""

    node: DecodeNode
    engine: ToyDecodeEngine
    hold: threading.Event
    parents: int


@attrs.define(eq=False)
class Call:
    """Both legs of one request, as a gateway sends them."""

    tokens: tuple[int, ...]
    max_tokens: int
    prefill: PrefillLeg | None
    decode: DecodeLeg | None
    got: list[int]

    def finish(self) -> Finished:
        """Wait for both legs."""
        assert self.decode is not None
        finished = self.decode.done.result(PATIENCE_S)
        if self.prefill is not None:
            self.prefill.done.result(PATIENCE_S)
        return finished

    def cancel(self, cause: str = "the client left") -> None:
        """End both legs, as a gateway does whose client is gone."""
        for leg in (self.decode, self.prefill):
            if leg is not None:
                leg.cancel(cause)

    def causes(self) -> set[str]:
        """Why the legs failed, which both must have done."""
        found = set()
        for leg in (self.decode, self.prefill):
            if leg is not None:
                error = leg.done.exception(PATIENCE_S)
                assert isinstance(error, RoomFailed), error
                found.add(error.text)
        return found

    def is_right(self, options: ToyOptions) -> bool:
        """Whether the answer is what one process gives."""
        self.finish()
        return self.got == [token for token, _ in toy_answer(options, self.tokens, self.max_tokens)]


def call(
    prefill: Prefill | None,
    decode: Decode | None,
    tokens: tuple[int, ...],
    *,
    at: Endpoint | None = None,
    max_tokens: int = 5,
    room: int | None = None,
    **decodes: Any,  # noqa: ANN401  (whatever else a DecodeRequest takes)
) -> Call:
    """Send the legs of one request to the sides that are given."""
    number, got = Room(new_room() if room is None else room), list[int]()
    waiting = work = None
    if decode is not None:
        where = at or (prefill.rendezvous if prefill else None)
        assert where is not None
        request = DecodeRequest(number, tokens, where, max_tokens, **decodes)
        waiting = decode.node.decode(request, lambda token: got.append(token.id))
    if prefill is not None:
        work = prefill.node.prefill(PrefillRequest(number, tokens))
    return Call(tokens, max_tokens, work, waiting, got)


def idle(*sides: Prefill | Decode, but: str = "") -> bool:
    """Whether every count but the growing ones, and but the one of this name, is at its start value."""
    return not any(_busy(side, but) for side in sides)


def _busy(side: Prefill | Decode, but: str) -> Sequence[object]:
    counts = side.node.statistics()
    blocks, fence = counts["blocks"], counts.get("fence", {"open_rooms": 0})
    found = [counts.get(name) for name in ("legs", "rooms", "tombstones", "handles", "pushes") if name != but]
    found += [blocks["used_blocks"], blocks["waiting"], blocks["free_parents"] - side.parents, fence["open_rooms"]]
    return [value for value in found if value]


@attrs.define
class Daemons:
    """Starts daemons with toy engines; everything is closed after the test."""

    options: ToyOptions
    stack: contextlib.ExitStack

    def prefill(self, options: ToyOptions | None = None, **config: Any) -> Prefill:  # noqa: ANN401  (settings)
        """A prefill daemon that is ready."""
        hold = threading.Event()
        hold.set()
        engine = ToyPrefillEngine(options or self.options, hold=hold)
        node = PrefillNode(engine, PrefillConfig(**SHORT | {"bootstrap_port": 0} | config))
        self.stack.callback(node.close)
        node.start()
        until(lambda: node.ready or "rendezvous" in config, "prefill's readiness")
        return Prefill(node, hold, node.statistics()["blocks"]["free_parents"], node.info()["bootstrap_port"])

    def decode(
        self,
        options: ToyOptions | None = None,
        cache_bytes: int | None = None,
        **config: Any,  # noqa: ANN401  (settings)
    ) -> Decode:
        """A decode daemon."""
        hold = threading.Event()
        hold.set()
        engine = ToyDecodeEngine(options or self.options, hold=hold)
        node = DecodeNode(engine, DecodeConfig(**SHORT | config), cache_bytes=cache_bytes)
        self.stack.callback(node.close)
        node.start()
        return Decode(node, engine, hold, node.statistics()["blocks"]["free_parents"])

    def pair(self, options: ToyOptions | None = None, **config: Any) -> tuple[Prefill, Decode]:  # noqa: ANN401  (settings)
        """One of each, with the same settings."""
        return self.prefill(options, **config), self.decode(options, **config)


@pytest.fixture
def daemons() -> Iterator[Daemons]:
    with contextlib.ExitStack() as stack:
        yield Daemons(ToyOptions(), stack)
