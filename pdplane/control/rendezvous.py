"""The HTTP rendezvous: prefill ranks PUT where they listen, decode ranks GET it.

The routes, fields and types are the legacy peers' own, so either generation can ask:

* `GET /health` answers 200 `OK`.
* `PUT /route` registers a rank: `role`, `world_size`, `dp_size`, `rank_ip`, `rank_port`, `engine_rank`, `cache_layout`,
  and from native ranks `pdplane` (1), `router_port`, `prefill_life` and `token`, which is told to nobody else.
* `GET /route?engine_rank=-1&target_dp_group=-1` answers `prefill_tp_size` (the world size), `prefill_dp_size`,
  `cache_layout`, and `pdplane` when every rank is native.
* `GET /route?engine_rank=T&target_dp_group=D` answers `rank_ip`, `rank_port`, and a native rank's extras.

`t = world_size // dp_size` ranks make a data-parallel group; rank `g` of the world is rank `g % t` of group `g // t`.
Where the legacy server answers 500 this one answers 400, 401, 404, 409 or 503 with `{"error": {...}}`, and nothing of a
refused PUT is kept. Rules: docs/legacy_wire.md section 2.

Who may replace a registration:

* A native rank renews a lease of `LEASE_S` with each PUT. Until it lapses only the same life with the same token may
  PUT for that rank; others get 409 and try again. A lapsed registration counts as missing.
* A legacy rank puts once and never again, so its registration never lapses. Another PUT with the same `rank_ip`
  from the same address replaces it, as after a restart.
* Sizes and layout belong to the registered ranks together. A PUT that differs gets 400, unless it is a native rank's
  and no other rank is registered: then it begins a new table.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import attrs
from aiohttp import web

from pdplane.errors import RendezvousError, WireError
from pdplane.ids import Life
from pdplane.net import JsonValue, parse_json
from pdplane.security import Nonces, Secret
from pdplane.wire import decode_layout, encode_layout
from pdplane.wire.frames import MAX_LAYOUT

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
    """One rank's PUT; `life` and `router_port` are None for a legacy rank.

    `token` is told to the rendezvous alone, which thereby knows a rank again: everybody is told its life.
    """

    world_rank: int
    rank_ip: str
    rank_port: int
    life: Life | None = None
    router_port: int | None = None
    token: str = attrs.field(default="", repr=False)

    @property
    def is_native(self) -> bool:
        return self.life is not None


@attrs.frozen
class _Held:
    entry: RankEntry
    renewed_at: float
    source: str
    """Where its PUT came from."""

    def is_of(self, entry: RankEntry, source: str) -> bool:
        """Return whether a PUT from there comes from the rank that registered."""
        if self.entry.is_native:
            return self.entry.life == entry.life and _same(self.entry.token, entry.token)
        return self.entry.rank_ip == entry.rank_ip and self.source == source

    def lives(self, now: float) -> bool:
        return not self.entry.is_native or now - self.renewed_at < LEASE_S


class RankTable:
    """The registrations of one prefill instance, with time as an argument.

    Refusals are RendezvousError with a status.
    """

    def __init__(self) -> None:
        self._sizes: Sizes | None = None
        self._held: dict[int, _Held] = {}

    def put(self, body: JsonValue, now: float, source: str = "") -> RankEntry:
        """Register or renew a rank whose PUT came from the address `source`; a refused PUT changes nothing."""
        sizes, entry = read_put(body)
        self._forget_lapsed(now)
        self._check_owner(entry, source)
        self._check_sizes(sizes, entry)
        self._sizes = sizes
        self._held[entry.world_rank] = _Held(entry, now, source)
        return entry

    def sync(self, now: float) -> dict[str, Any]:
        """Return the answer for all ranks at once; refuse with 503 until every rank has registered."""
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
        """Return where one rank of a group listens; refuse with 404 one that has not registered or cannot exist."""
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

    def _check_owner(self, entry: RankEntry, source: str) -> None:
        held = self._held.get(entry.world_rank)
        if held is not None and not held.is_of(entry, source):
            old = held.entry
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


def read_put(body: JsonValue) -> tuple[Sizes, RankEntry]:
    """Return what a PUT's JSON says. Raises RendezvousError with status 400, which names the field."""
    try:
        return _read_put(body)
    except WireError as error:
        raise _refusal(400, error.reason) from error


def _read_put(body: JsonValue) -> tuple[Sizes, RankEntry]:
    role = body.member("role")
    if role.json != "Prefill":
        role.refuse(f"{str(role.json)[:40]!r} does not register here, only 'Prefill' does")
    world_size = _number(body, "world_size", 1, MAX_WORLD_SIZE)
    dp_size = _number(body, "dp_size", 1, world_size)
    if world_size % dp_size:
        body.member("world_size").refuse(f"{world_size} is no multiple of dp_size {dp_size}")
    refuse_pipelines(body, "pp_size")
    world_rank = _number(body, "engine_rank", 0, world_size - 1)
    rank_ip = body.member("rank_ip")
    if not _HOST.match(rank_ip.text()):
        rank_ip.refuse("is no host name or address")
    rank_port = _number(body, "rank_port", 1, 65535)
    life, router_port, token = _native(body)
    sizes = Sizes(world_size, dp_size, _layout(body.member("cache_layout")))
    return sizes, RankEntry(world_rank, rank_ip.text(), rank_port, life, router_port, token)


def refuse_pipelines(found: JsonValue, key: str) -> None:
    """Raise WireError for a prefill of a newer generation that is split over pipeline stages."""
    stages = found.optional(key)
    if stages is not None and stages.json not in (1, "1"):
        stages.refuse(f"is {stages.json!r}: a newer legacy engine with pipeline stages, which pdplane does not speak")


def _native(body: JsonValue) -> tuple[Life | None, int | None, str]:
    if body.optional(MARKER) is None:
        return None, None, ""
    _number(body, MARKER, VERSION, VERSION)
    life = body.member("prefill_life")
    if not _LIFE.match(life.text()):
        life.refuse("is not 32 hex digits")
    token = body.optional("token")  # older ranks send none
    return Life(life.text()), _number(body, "router_port", 1, 65535), "" if token is None else token.text()


def _number(body: JsonValue, key: str, low: int, high: int) -> int:
    value = body.member(key)
    if isinstance(value.json, str) and _DECIMAL.match(value.json):
        value = JsonValue(int(value.json), value.path)  # legacy ranks send some numbers as text
    return value.whole(low, high)


def _layout(value: JsonValue) -> str:
    text = value.text(MAX_LAYOUT)
    if not text.isascii():
        value.refuse("is not ASCII")
    try:
        return encode_layout(decode_layout(text.encode("ascii"))).decode("ascii")
    except WireError as error:
        raise WireError(error.field, f"cache_layout: {error.reason}") from error


def _refusal(status: int, reason: str) -> RendezvousError:
    return RendezvousError("/route", status, reason)


# ---- HTTP


logger = logging.getLogger(__name__)

_BODY_S = 10.0
MAX_BODY = 1 << 20  # a layout has at most 262,144 bytes, each at most doubled by JSON's quoting

SCHEME, NONCE_HEADER, PROOF_HEADER = "Pdplane", "Pdplane-Nonce", "Pdplane-Proof"

_INTEGER = re.compile(r"-?[0-9]{1,9}\Z")
_KINDS = {400: "bad_request", 401: "unauthorized", 404: "not_found", 409: "conflict", 503: "unavailable"}


def request_proof(secret: Secret, nonce: str, method: str, host: str, path: str, body: bytes) -> str:
    """Return the proof of a request, good for the nonce that the listener gave and for this very request."""
    return secret.answer(
        "rendezvous client", *(part.encode("utf-8", "replace") for part in (nonce, method, host, path)), body
    ).hex()


def answer_proof(secret: Secret, nonce: str, status: int, body: bytes) -> str:
    """Return the proof of an answer, good for the nonce that the request carried."""
    return secret.answer("rendezvous server", nonce.encode("utf-8", "replace"), str(status).encode(), body).hex()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _bytes_of(answer: web.Response) -> bytes:
    return answer.body if isinstance(answer.body, bytes) else b""


def rendezvous_app(
    secret: Secret | None = None, *, open_reads: bool = False, clock: Callable[[], float] = time.monotonic
) -> web.Application:
    """Return the application of one prefill instance, with an empty table.

    With a secret, /route asks for a proof of it and proves it in its answers; `open_reads` lets legacy decodes GET
    without a proof.
    """
    app = web.Application(client_max_size=MAX_BODY)
    routes = _Routes(RankTable(), secret, open_reads=open_reads, clock=clock)
    app.router.add_get("/health", routes.health)
    app.router.add_route("*", "/route", routes.route)
    return app


class _Routes:
    def __init__(
        self, table: RankTable, secret: Secret | None, *, open_reads: bool, clock: Callable[[], float]
    ) -> None:
        self._table = table
        self._secret = secret
        self._open_reads = open_reads
        self._clock = clock
        self._nonces = Nonces()

    async def health(self, _request: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def route(self, request: web.Request) -> web.Response:
        try:
            answer = await self._answer(request)
        except RendezvousError as error:
            answer = _error(error)
            if error.status == 401:
                answer.headers["WWW-Authenticate"] = f"{SCHEME} {self._nonces.issue(self._clock())}"
        asked = request.headers.get(NONCE_HEADER)
        if self._secret is not None and asked is not None:
            answer.headers[PROOF_HEADER] = answer_proof(self._secret, asked, answer.status, _bytes_of(answer))
        return answer

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method == "PUT":
            return await self._put(request)
        if request.method == "GET":
            if not self._open_reads:
                self._authorize(request, b"")
            return self._get(request)
        return web.Response(text="Method not allowed", status=405, content_type="application/json")

    def _authorize(self, request: web.Request, body: bytes) -> None:
        """Raise RendezvousError unless the request proves that its sender knows the secret."""
        if self._secret is None:
            return
        scheme, nonce, proof = [*request.headers.get("Authorization", "").split(" "), "", "", ""][:3]
        right = request_proof(self._secret, nonce, request.method, request.host, request.path_qs, body)
        if scheme != SCHEME or not self._nonces.knows(nonce, self._clock()) or not _same(proof, right):
            raise RendezvousError("/route", 401, "this rendezvous wants a proof of its secret")

    async def _put(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(_BODY_S):
                data = await request.read()
        except TimeoutError as error:
            raise RendezvousError("/route", 400, f"the body did not come within {_BODY_S:g} s") from error
        except web.HTTPRequestEntityTooLarge as error:
            raise RendezvousError("/route", 400, f"the body is longer than {MAX_BODY} bytes") from error
        self._authorize(request, data)
        try:
            body = parse_json(data, "body", MAX_BODY)
        except WireError as error:
            raise RendezvousError("/route", 400, error.reason) from error
        entry = self._table.put(body, self._clock(), request.remote or "")
        logger.debug("prefill rank %d registered from %s port %d", entry.world_rank, entry.rank_ip, entry.rank_port)
        return web.Response(text="OK")

    def _get(self, request: web.Request) -> web.Response:
        asked_rank, asked_group = request.query.get("engine_rank"), request.query.get("target_dp_group")
        if not asked_rank or not asked_group:
            return web.Response(text="Missing inputs for bootstrap server.", status=400)  # as the legacy server answers
        tp_rank, dp_group = _integer("engine_rank", asked_rank), _integer("target_dp_group", asked_group)
        if tp_rank == dp_group == -1:
            return web.json_response(self._table.sync(self._clock()))
        if tp_rank < 0 or dp_group < 0:
            raise RendezvousError("/route", 400, "engine_rank and target_dp_group are both -1, or both not negative")
        return web.json_response(self._table.rank(dp_group, tp_rank, self._clock()))


def _integer(name: str, text: str) -> int:
    if not _INTEGER.match(text):
        raise RendezvousError("/route", 400, f"{name} is not an integer")
    return int(text)


def _error(error: RendezvousError) -> web.Response:
    body = {"error": {"message": error.reason, "type": _KINDS.get(error.status, "error"), "code": error.status}}
    headers = {"Retry-After": "1"} if error.status == 503 else {}
    return web.json_response(body, status=error.status, headers=headers)
