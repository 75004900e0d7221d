"""All ranks of a split node in one process, on toy engines: real links and real planes, but no common steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs

from pdplane.api import DecodeRequest, PrefillRequest
from pdplane.control.ranks import RankListener, connect_rank
from pdplane.ids import Endpoint
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.node.ranks import Follower, Handle, LeadDecode, LeadPrefill, OnBroken, Ranks, Request, Tell
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.toy.engine import ToyDecodeEngine, ToyPrefillEngine
from pdplane.toy.model import ToyOptions
from tests.node.conftest import SHORT
from tests.waiting import PATIENCE_S, until


class ApartThread:
    """Toy engines meet nobody in their steps: a key is over before it begins."""

    def connect(self, tell: Tell, broken: OnBroken) -> None:
        self.tell, self.broken = tell, broken

    def expect(self, key: int) -> Future[None]:
        over: Future[None] = Future()
        over.set_result(None)
        return over

    def forget(self, key: int) -> None: ...

    def arrived(self, rank: int, key: int, mark: str) -> None: ...

    def abandon(self, key: int) -> None: ...

    def turn(self, key: int) -> None: ...

    def end(self, key: int) -> None: ...


@attrs.define(eq=False)
class Split:
    """One role's ranks; `holds` stop an engine while they are clear."""

    lead: Any
    ranks: Ranks
    nodes: list[Any]
    holds: list[threading.Event]
    followers: list[Follower] = attrs.field(factory=list)
    lost: list[str] = attrs.field(factory=list)

    @property
    def rendezvous(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.nodes[0].info()["bootstrap_port"])

    @property
    def idle(self) -> bool:
        counts = [node.statistics() for node in self.nodes]
        return not len(self.ranks) and not any(found["legs"] or found["blocks"]["used_blocks"] for found in counts)

    def close(self) -> None:
        """Rank 0 parts from the others, each of which ends then, as its process would."""
        with ThreadPoolExecutor(1) as other:
            closed = other.submit(self.lead.close)
            for follower, node in zip(self.followers, self.nodes[1:], strict=False):
                assert follower.bye.wait(PATIENCE_S) or follower.trouble
                node.close()
                follower.close()
            closed.result()


def _holds(size: int) -> list[threading.Event]:
    found = [threading.Event() for _ in range(size)]
    for hold in found:
        hold.set()
    return found


def split_prefill(stack: contextlib.ExitStack, options: Sequence[ToyOptions]) -> Split:
    """A prefill of as many ranks as there are options, up."""
    size, holds = len(options), _holds(len(options))
    common: Mapping[str, Any] = SHORT | {"bootstrap_port": 0, "tp_size": size}
    ranks = Ranks(ApartThread(), size)
    first = PrefillNode(ToyPrefillEngine(options[0], hold=holds[0]), PrefillConfig(**common), gate=ranks.gate)

    def make(rank: int, follower: Follower) -> PrefillNode:
        config = PrefillConfig(**common, tp_rank=rank, rendezvous=follower.rendezvous())
        return PrefillNode(ToyPrefillEngine(options[rank], hold=holds[rank]), config, gate=follower.gate)

    def begin(node: PrefillNode, request: Request) -> Handle[Any]:
        assert isinstance(request, PrefillRequest)
        return node.prefill(request)

    return _split(stack, LeadPrefill, first, ranks, holds, make, begin)


def split_decode(stack: contextlib.ExitStack, options: Sequence[ToyOptions]) -> Split:
    """A decode of as many ranks as there are options, up."""
    size, holds = len(options), _holds(len(options))
    common: Mapping[str, Any] = SHORT | {"tp_size": size}
    ranks = Ranks(ApartThread(), size)
    first = DecodeNode(ToyDecodeEngine(options[0], hold=holds[0]), DecodeConfig(**common))

    def make(rank: int, _follower: Follower) -> DecodeNode:
        return DecodeNode(ToyDecodeEngine(options[rank], hold=holds[rank]), DecodeConfig(**common, tp_rank=rank))

    def begin(node: DecodeNode, request: Request) -> Handle[Any]:
        assert isinstance(request, DecodeRequest)
        return node.decode(request, lambda _token: None)

    return _split(stack, LeadDecode, first, ranks, holds, make, begin)


def _split(
    stack: contextlib.ExitStack,
    lead_class: Callable[..., Any],
    first: Any,  # noqa: ANN401  (a node of either role)
    ranks: Ranks,
    holds: list[threading.Event],
    make: Callable[[int, Follower], Any],
    begin: Callable[[Any, Request], Handle[Any]],
) -> Split:
    size = len(holds)
    found = Split(None, ranks, [first], holds)
    stack.callback(found.close)
    with contextlib.closing(RankListener("127.0.0.1")) as listener, ThreadPoolExecutor(1) as other:
        found.lead = lead_class(first, ranks, lambda: listener.accept(size), found.lost.append)
        started = other.submit(found.lead.start)
        for rank in range(1, size):
            link = connect_rank(Endpoint("127.0.0.1", listener.port), listener.word, rank)
            found.followers.append(Follower(link, ApartThread(), found.lost.append))
        started.result(PATIENCE_S)
    for rank, follower in enumerate(found.followers, start=1):
        follower.start()
        node = make(rank, follower)
        found.nodes.append(node)
        node.start()
        until(lambda node=node: node.ready, "a rank's readiness")
        follower.up(partial(begin, node))
    until(lambda: found.lead.ready, "the readiness of all ranks")
    return found
