"""The node of rank 0 of a split model, with the other ranks behind it: HTTP sees one node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pdplane.control.rank_link import RankLink
from pdplane.errors import LocalProtocolError
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.node.protocols import DecodeRequest, Finished, FirstToken, PrefillRequest, Token, Tokenizer
from pdplane.node.ranks import Ranks, SharedLeg

Meet = Callable[[], Sequence[RankLink]]
"""Meets the other ranks; blocks until all are there and raises ConfigError."""


class Lead:
    """What both roles' rank 0 has in common. `on_lost` is told once why the ranks cannot go on together."""

    def __init__(
        self, node: PrefillNode | DecodeNode, ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]
    ) -> None:
        self._inner, self._ranks, self._meet, self._on_lost = node, ranks, meet, on_lost
        self._draining = False

    def start(self) -> None:
        """Meet the other ranks, load this one's part, open the plane. Raises ConfigError with nothing left open."""
        self._ranks.start(self._meet(), self._on_lost)
        self._inner.start()
        found = self._inner.info()
        if "bootstrap_port" in found:
            self._ranks.tell("rendezvous", int(found["bootstrap_port"]), str(found["bootstrap_host"]))

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more, wait up to `drain_s` for what runs, end the rest on every rank; idempotent."""
        self._draining = True
        self._ranks.wait_idle(drain_s)
        self._inner.close()
        self._ranks.close()

    @property
    def ready(self) -> bool:
        """All ranks are."""
        return not self._draining and self.alive and self._inner.ready and self._ranks.all_up

    @property
    def alive(self) -> bool:
        return self._inner.alive and self._ranks.trouble is None and not self._ranks.parting

    @property
    def tokenizer(self) -> Tokenizer:
        return self._inner.tokenizer

    def info(self) -> dict[str, Any]:
        return self._inner.info()

    def statistics(self) -> dict[str, Any]:
        """The counts of this rank, and the legs that are left on any."""
        return {**self._inner.statistics(), "shared_legs": len(self._ranks)}

    def _check(self) -> None:
        if self._draining or not self._ranks.all_up:
            raise LocalProtocolError("the ranks take no requests now")


class LeadPrefill(Lead):
    """Rank 0 of prefill."""

    def __init__(self, node: PrefillNode, ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]) -> None:
        super().__init__(node, ranks, meet, on_lost)
        self._node = node

    def prefill(self, request: PrefillRequest) -> SharedLeg[FirstToken]:
        """Begin a prefill leg on every rank; errors as for `PrefillNode.prefill`."""
        self._check()
        return self._ranks.begin(request, lambda: self._node.prefill(request))


class LeadDecode(Lead):
    """Rank 0 of decode."""

    def __init__(self, node: DecodeNode, ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]) -> None:
        super().__init__(node, ranks, meet, on_lost)
        self._node = node

    def decode(self, request: DecodeRequest, on_token: Callable[[Token], None]) -> SharedLeg[Finished]:
        """Begin a decode leg on every rank; errors as for `DecodeNode.decode`."""
        self._check()
        return self._ranks.begin(request, lambda: self._node.decode(request, on_token))
