"""What the ranks of one split model say to each other, beside the engine's `turn`, `end` and `ready`.

Rank 0 says: `request` (a leg begins; the text is the request), `start` (all have their offer: line up for blocks, in
this order), `cancel` (the leg failed; the text is the cause), `rendezvous` (its address), `bye`. The others say:
`offered`, `failed` (with the cause), `done` (nothing of the leg is left here), `up`, `leave` (asked to stop).
The number is the room's: it is not used again before every rank is done with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint, Room
from pdplane.node.protocols import DecodeRequest, PrefillRequest

Request: TypeAlias = PrefillRequest | DecodeRequest
Tell: TypeAlias = Callable[[str, int, str], None]
OnBroken: TypeAlias = Callable[[str], None]


class SharedThread(Protocol):
    """What a node needs of the engine's thread on a rank; see `pdplane.engine.lockstep.RankThread`."""

    def connect(self, tell: Tell, broken: OnBroken) -> None: ...

    def expect(self, key: int) -> Future[None]: ...

    def forget(self, key: int) -> None: ...

    def arrived(self, rank: int, key: int, mark: str) -> None: ...

    def abandon(self, key: int) -> None: ...

    def turn(self, key: int) -> None: ...

    def end(self, key: int) -> None: ...


def cause_of(error: BaseException) -> str:
    """Why a leg failed, without the room and its story, which the other ranks have of their own."""
    return error.cause if isinstance(error, RoomFailed) else str(error)


def write_request(request: Request) -> str:
    """The request as JSON."""
    if isinstance(request, PrefillRequest):
        return json.dumps({"tokens": request.tokens})
    return json.dumps(
        {
            "tokens": request.tokens,
            "prefill": str(request.prefill),
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "stop_ids": sorted(request.stop_ids),
        }
    )


def read_request(room: int, text: str) -> Request:
    """The request again; ValueError, KeyError or TypeError for what rank 0 would not write."""
    found = json.loads(text)
    tokens = tuple(map(int, found["tokens"]))
    if "prefill" not in found:
        return PrefillRequest(Room(room), tokens)
    return DecodeRequest(
        Room(room),
        tokens,
        Endpoint.parse(found["prefill"]),
        int(found["max_tokens"]),
        bool(found["ignore_eos"]),
        frozenset(map(int, found["stop_ids"])),
    )
