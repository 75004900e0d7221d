"""From one start to one close: what the lives of both nodes have in common."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from pdplane.api import DecodeEngine, PrefillEngine, Tokenizer
from pdplane.control.http_thread import HttpThread
from pdplane.errors import Cause, LocalProtocolError
from pdplane.messages import Fingerprint
from pdplane.node.legs import BlockQueue, Leg, Legs
from pdplane.plane.config import PlaneConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane

EngineKind = TypeVar("EngineKind", bound=PrefillEngine | DecodeEngine)
PlaneKind = TypeVar("PlaneKind", bound=PrefillPlane | DecodePlane)


class NodeLife(abc.ABC, Generic[EngineKind, PlaneKind, Leg]):
    """A node: an engine and a plane that come up together and end together; the constructor opens nothing."""

    role: str

    def __init__(
        self,
        engine: EngineKind,
        config: PlaneConfig,
        *,
        http: HttpThread | None,
        max_waiting: int,
        line_timeout_s: float,
        facts: Mapping[str, Any] | None,
    ) -> None:
        """Take the parts; `line_timeout_s` bounds a leg's wait for blocks, `max_waiting` is how many may wait."""
        self._engine = engine
        self._settings, self._max_waiting, self._line_timeout_s = config, max_waiting, line_timeout_s
        self._http, self._owns_http = http or HttpThread("pdplane-http"), http is None
        self._facts = dict(facts or {})
        self._plane: PlaneKind | None = None
        self._queue: BlockQueue | None = None
        self._legs: Legs[Leg] = Legs()
        self._draining = False

    # ---- for the two nodes

    @abc.abstractmethod
    def _make_plane(self, fingerprint: Fingerprint) -> PlaneKind:
        """Return the plane around the engine's layout and arena, not started."""

    @abc.abstractmethod
    def _addresses(self, plane: PlaneKind) -> dict[str, Any]:
        """Return where the plane can be reached."""

    def _more_counts(self) -> dict[str, Any]:
        """Return what this role counts beside its legs, its blocks and its plane."""
        return {}

    def _announce_drain(self) -> None:
        """Tell the peers that no new rooms are taken, where that is of use to them."""

    # ---- life

    def start(self) -> None:
        """Load the model, then open the plane. Raises ConfigError with nothing left open."""
        try:
            self._http.start()
            self._engine.start()
            self._facts |= {key: value for key, value in self._engine.facts().items() if value is not None}
            facts = self._engine.fingerprint
            plane = self._make_plane(Fingerprint(facts.required, facts.advisory))
            plane.start()
            self._plane = plane
            self._queue = BlockQueue(
                self._engine.layout, self._http, timeout_s=self._line_timeout_s, max_waiting=self._max_waiting
            )
        except BaseException:
            self.close()
            raise

    def drain(self) -> None:
        """Take no more, and say so; return at once."""
        self._draining = True
        self._announce_drain()

    def close(self, drain_s: float = 0.0) -> None:
        """Take no more, wait up to `drain_s` for what runs, end the rest, join every thread; idempotent."""
        self.drain()
        self._legs.drain(drain_s)
        self._legs.cancel_all(f"{self.role} is shutting down", Cause.CLOSING)
        if self._plane is not None:
            self._plane.close()
        self._engine.close()
        if self._owns_http:
            self._http.close()

    # ---- state

    @property
    def ready(self) -> bool:
        return not self._draining and self._plane is not None and self._plane.ready

    @property
    def alive(self) -> bool:
        return self._plane is not None and self._plane.alive

    def trouble(self) -> str | None:
        """Return what does not go on, None while all of it does, and before `start`."""
        return None if self._plane is None else self._plane.trouble() or self._engine.trouble()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def info(self) -> dict[str, Any]:
        """Return facts of the model given at construction, and every address."""
        plane, config = self._plane, self._settings
        found: dict[str, Any] = {**self._facts, "disaggregation_mode": self.role, "tp_size": config.tp_size}
        found |= {"dp_size": config.groups, "transport": config.transport}
        if plane is not None:
            found |= {"life": plane.life, **self._addresses(plane)}
        return found

    def statistics(self) -> dict[str, Any]:
        """Return every count, JSON-able. Raises LocalProtocolError unless the node runs."""
        if self._plane is None or self._queue is None:
            raise LocalProtocolError(f"this {self.role} has not started", Cause.CLOSING)
        counts = {
            "legs": len(self._legs),
            **self._more_counts(),
            "blocks": self._queue.counts(),
            "http": self._http.counts(),
        }
        return {**counts, **self._plane.statistics()}
