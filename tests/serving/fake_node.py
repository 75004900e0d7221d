"""A node of plain Python: what it is asked is kept, and the test decides how each leg goes on."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import attrs

from pdplane.api import DecodeRequest, Finished, FirstToken, PrefillRequest, Token
from pdplane.errors import Cause, LocalProtocolError, RoomFailed, Why
from pdplane.toy.engine import ToyTokenizer

PATIENCE_S = 20


@attrs.define
class Leg:
    """One leg: the test ends `done`, and reads from `cancels` why it was cancelled."""

    request: Any
    on_token: Callable[[Token], None] = lambda _token: None
    done: Future[Any] = attrs.Factory(Future)
    cancels: queue.Queue[str] = attrs.Factory(queue.Queue)
    timings: dict[str, float] = attrs.Factory(dict)
    cached_tokens: int = 0

    def cancel(self, text: str) -> None:
        self.cancels.put(text)
        if not self.done.done():
            self.done.set_exception(RoomFailed(self.request.room, Cause.CANCELLED, text))

    def cancelled(self) -> str:
        return self.cancels.get(timeout=PATIENCE_S)


class FakeNode:
    """Both roles' protocol; legs come out of `legs` as they begin, or are answered at once by `script`."""

    def __init__(self) -> None:
        self.ready = self.alive = True
        self.hangs: str | None = None
        self.tokenizer = ToyTokenizer()
        self.legs: queue.Queue[Leg] = queue.Queue()
        self.refused: list[tuple[Any, Why]] = []
        self.script: Callable[[Leg], None] | None = None
        self.extra: dict[str, Any] = {}
        self.counts: dict[str, Any] = {"rooms": {"opened": 2, "waiting": 3}, "threads": 4, "name": "fake"}

    def trouble(self) -> str | None:
        return self.hangs

    def start(self) -> None: ...

    def close(self, drain_s: float = 0.0) -> None: ...

    def info(self) -> dict[str, Any]:
        return {
            "model_path": "/models/toy",
            "context_length": 100,
            "vocab_size": 256,
            "bootstrap_port": 8998,
        } | self.extra

    def statistics(self) -> dict[str, Any]:
        if not self.alive:
            raise LocalProtocolError("this node has not started")
        return self.counts

    def prefill(self, request: PrefillRequest) -> Leg:
        return self._begin(Leg(request))

    def decode(self, request: DecodeRequest, on_token: Callable[[Token], None]) -> Leg:
        return self._begin(Leg(request, on_token))

    def refuse(self, request: PrefillRequest | DecodeRequest, why: Why) -> None:
        self.refused.append((request, why))

    def next_leg(self) -> Leg:
        return self.legs.get(timeout=PATIENCE_S)

    def _begin(self, leg: Leg) -> Leg:
        if self.script is not None:
            self.script(leg)
        self.legs.put(leg)
        return leg


def answers(text: str, reason: str = "length", **timings: float) -> Callable[[Leg], None]:
    """A script: the bytes of a text as tokens, with the logprobs -0.5, -1.5, ..."""

    def script(leg: Leg) -> None:
        tokens = list(text.encode())
        for index, token in enumerate(tokens):
            leg.on_token(Token(token, -0.5 - index))
        prompt = len(leg.request.tokens)
        leg.timings |= timings
        leg.done.set_result(Finished(reason, prompt, len(tokens), 0, timings))  # type: ignore[arg-type]  # a test's text

    return script


def first(token: str) -> Callable[[Leg], None]:
    """A script: prefill's leg ends with this token."""
    return lambda leg: leg.done.set_result(FirstToken(ord(token), -0.5))


def fails(error: BaseException) -> Callable[[Leg], None]:
    """A script: the leg ends with an error."""
    return lambda leg: leg.done.set_exception(error)
