"""Which prefill ranks have registered: the table behind the rendezvous, without HTTP and with time as an argument.

Placement as the legacy peers do it: `t = world_size // dp_size` ranks a data-parallel group, rank `g` of the world is
rank `g % t` of group `g // t`.

Who may replace a registration:

* a native rank renews a lease of `LEASE_S` with each PUT; until it lapses only the same life may PUT for that rank,
  another one gets 409 and tries again. A lapsed registration counts as missing.
* a legacy rank puts once and never again, so its registration never lapses; another PUT from the same `rank_ip`
  replaces it (the legacy restart).
* sizes and layout belong to the registered ranks together. A PUT that differs gets 400, unless it is a native rank's
  and no other rank is registered: then it begins a new table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import attrs

from pdplane.errors import RendezvousError, WireError
from pdplane.ids import Life
from pdplane.wire import decode_layout, encode_layout

LEASE_S = 15.0
MAX_WORLD_SIZE = 4096
MARKER = "pdplane"
VERSION = 1

_DECIMAL = re.compile(r"[0-9]{1,9}\Z")
_LIFE = re.compile(r"[0-9a-f]{32}\Z")
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}\Z")


@attrs.frozen
class Sizes:
    """What all ranks of a prefill instance share; `layout` is canonical layout JSON."""

    world_size: int
    dp_size: int
    layout: str

    @property
    def tp_size(self) -> int:
        return self.world_size // self.dp_size


@attrs.frozen
class RankEntry:
    """One rank's PUT; `life` and `router_port` are None for a legacy rank."""

    world_rank: int
    rank_ip: str
    rank_port: int
    life: Life | None = None
    router_port: int | None = None

    @property
    def is_native(self) -> bool:
        return self.life is not None


@attrs.frozen
class _Held:
    entry: RankEntry
    renewed_at: float

    def lives(self, now: float) -> bool:
        return not self.entry.is_native or now - self.renewed_at < LEASE_S


class RankTable:
    """The registrations of one prefill instance. Refusals are RendezvousError with the HTTP status."""

    def __init__(self) -> None:
        self._sizes: Sizes | None = None
        self._held: dict[int, _Held] = {}

    def put(self, body: object, now: float) -> RankEntry:
        """Register or renew a rank; a refused PUT changes nothing."""
        sizes, entry = read_put(body)
        self._forget_lapsed(now)
        self._check_owner(entry)
        self._check_sizes(sizes, entry)
        self._sizes = sizes
        self._held[entry.world_rank] = _Held(entry, now)
        return entry

    def sync(self, now: float) -> dict[str, Any]:
        """The answer for all ranks at once; 503 until every rank has registered."""
        self._forget_lapsed(now)
        sizes = self._sizes
        if sizes is None:
            raise _refusal(503, "no prefill rank has registered yet")
        missing = [rank for rank in range(sizes.world_size) if rank not in self._held]
        if missing:
            some = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
            raise _refusal(503, f"{len(missing)} of {sizes.world_size} prefill ranks have not registered: {some}")
        answer: dict[str, Any] = {
            "prefill_tp_size": sizes.world_size,  # the legacy name; it has always meant the world size
            "prefill_dp_size": sizes.dp_size,
            "cache_layout": sizes.layout,
        }
        if all(held.entry.is_native for held in self._held.values()):
            answer[MARKER] = VERSION
        return answer

    def rank(self, dp_group: int, tp_rank: int, now: float) -> dict[str, Any]:
        """Where one rank of one data-parallel group listens; 404 when it has not registered or cannot exist."""
        self._forget_lapsed(now)
        sizes = self._sizes
        if sizes is None or not (0 <= dp_group < sizes.dp_size and 0 <= tp_rank < sizes.tp_size):
            raise _refusal(404, f"there is no prefill rank {tp_rank} in group {dp_group}")
        held = self._held.get(dp_group * sizes.tp_size + tp_rank)
        if held is None:
            raise _refusal(404, f"prefill rank {tp_rank} of group {dp_group} has not registered")
        entry = held.entry
        answer: dict[str, Any] = {"rank_ip": entry.rank_ip, "rank_port": entry.rank_port}
        if entry.is_native:
            answer |= {MARKER: VERSION, "router_port": entry.router_port, "prefill_life": entry.life}
        return answer

    def _forget_lapsed(self, now: float) -> None:
        self._held = {rank: held for rank, held in self._held.items() if held.lives(now)}
        if not self._held:
            self._sizes = None

    def _check_owner(self, entry: RankEntry) -> None:
        held = self._held.get(entry.world_rank)
        if held is None:
            return
        old = held.entry
        mine = old.life == entry.life if old.is_native else old.rank_ip == entry.rank_ip
        if not mine:
            owner = f"life {old.life}" if old.is_native else f"a legacy rank at {old.rank_ip}"
            raise _refusal(409, f"prefill rank {entry.world_rank} is registered by {owner}, which still lives")

    def _check_sizes(self, sizes: Sizes, entry: RankEntry) -> None:
        alone = not self._held.keys() - {entry.world_rank}
        if self._sizes is None or (alone and entry.is_native):
            return
        for field in attrs.fields(Sizes):
            if getattr(sizes, field.name) != getattr(self._sizes, field.name):
                name = "cache_layout" if field.name == "layout" else field.name
                raise _refusal(400, f"{name} differs from that of the ranks that are registered")


def read_put(body: object) -> tuple[Sizes, RankEntry]:
    """Check a PUT's JSON value. Raises RendezvousError 400 that names the field."""
    if not isinstance(body, Mapping):
        raise _refusal(400, "the body is not a JSON object")
    role = _text(body, "role")
    if role != "Prefill":
        raise _refusal(400, f"role {role[:40]!r} does not register here, only 'Prefill' does")
    world_size = _number(body, "world_size", 1, MAX_WORLD_SIZE)
    dp_size = _number(body, "dp_size", 1, world_size)
    if world_size % dp_size:
        raise _refusal(400, f"world_size {world_size} is no multiple of dp_size {dp_size}")
    world_rank = _number(body, "engine_rank", 0, world_size - 1)
    rank_ip = _text(body, "rank_ip")
    if not _HOST.match(rank_ip):
        raise _refusal(400, "rank_ip is no host name or address")
    rank_port = _number(body, "rank_port", 1, 65535)
    life, router_port = _native(body)
    sizes = Sizes(world_size, dp_size, _layout(_text(body, "cache_layout")))
    return sizes, RankEntry(world_rank, rank_ip, rank_port, life, router_port)


def _native(body: Mapping[str, object]) -> tuple[Life | None, int | None]:
    if body.get(MARKER) is None:
        return None, None
    _number(body, MARKER, VERSION, VERSION)
    life = _text(body, "prefill_life")
    if not _LIFE.match(life):
        raise _refusal(400, "prefill_life is not 32 hex digits")
    return Life(life), _number(body, "router_port", 1, 65535)


def _text(body: Mapping[str, object], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise _refusal(400, f"{key} is missing" if value is None else f"{key} is not a string")
    return value


def _number(body: Mapping[str, object], key: str, low: int, high: int) -> int:
    value = body.get(key)
    if isinstance(value, str) and _DECIMAL.match(value):
        value = int(value)  # legacy ranks send some numbers as text
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refusal(400, f"{key} is missing" if value is None else f"{key} is not an integer")
    if not low <= value <= high:
        raise _refusal(400, f"{key} {str(value)[:20]} is outside {low}..{high}")
    return value


def _layout(text: str) -> str:
    if not text.isascii():
        raise _refusal(400, "cache_layout is not ASCII")
    try:
        return encode_layout(decode_layout(text.encode("ascii"))).decode("ascii")
    except WireError as error:
        raise _refusal(400, f"cache_layout: {error}") from error


def _refusal(status: int, reason: str) -> RendezvousError:
    return RendezvousError("/route", status, reason)
