"""The client half of the rendezvous, on the HTTP thread: decode's look-ups and a prefill rank's own PUT.

Nothing here runs on the reactor, and no answer of another machine is trusted before it is checked. The PUT is retried
until it is accepted and then repeated for ever: that renews the lease of `RankTable` and fills the table again after
the rendezvous has restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Hashable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

import aiohttp
import attrs
from yarl import URL

from pdplane.control.http_thread import HttpThread
from pdplane.control.rendezvous import (
    LEASE_S,
    MARKER,
    MAX_WORLD_SIZE,
    NONCE_HEADER,
    PROOF_HEADER,
    SCHEME,
    VERSION,
    answer_proof,
    refuse_pipelines,
    request_proof,
)
from pdplane.errors import LocalProtocolError, RendezvousError, WireError
from pdplane.ids import Endpoint, Life, Rank, Room
from pdplane.kv.copies import dp_group
from pdplane.net import HELD_UP_S, NAMES, JsonValue, parse_json
from pdplane.security import Secret
from pdplane.wire.frames import MAX_LAYOUT

MAX_ANSWER = 1 << 20


class SlowRendezvous(RendezvousError):
    """Somebody accepts connections there and has not answered yet, as a busy process does."""


async def exchange(
    http: HttpThread,
    method: str,
    url: str,
    secret: Secret | None,
    connect_timeout_s: float,
    request_timeout_s: float,
    *,
    body: str | None = None,
    unproved: bool = False,
) -> tuple[int, str]:
    """Return status and text of one HTTP exchange.

    Raises RendezvousError, with status 0, when nobody is there, and SlowRendezvous when no answer comes in time.
    With a secret both sides prove that they know it, over nonces of this exchange; neither learns anything that it
    could use elsewhere. `unproved` takes answers without proof too, as legacy peers give them.
    """
    data = (body or "").encode()
    headers = {} if body is None else {"Content-Type": "application/json"}
    nonce = secrets.token_hex(24)
    if secret is not None:
        headers[NONCE_HEADER] = nonce
    timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=connect_timeout_s)
    status, text, answered = await _one_exchange(http, method, url, data, headers, timeout)
    scheme, _, challenge = answered.get("WWW-Authenticate", "").partition(" ")
    if secret is not None and status == 401 and scheme == SCHEME:
        asked = URL(url)
        proof = request_proof(secret, challenge, method, _host_header(asked), asked.raw_path_qs, data)
        headers["Authorization"] = f"{SCHEME} {challenge} {proof}"
        status, text, answered = await _one_exchange(http, method, url, data, headers, timeout)
    if secret is not None and not unproved:
        right = answer_proof(secret, nonce, status, text)
        if not hmac.compare_digest(answered.get(PROOF_HEADER, "").encode("utf-8", "replace"), right.encode()):
            raise RendezvousError(url, status, "it does not prove that it knows our secret")
    return status, text.decode("utf-8", "replace")


async def _one_exchange(
    http: HttpThread, method: str, url: str, data: bytes, headers: Mapping[str, str], timeout: aiohttp.ClientTimeout
) -> tuple[int, bytes, Mapping[str, str]]:
    began = time.monotonic()
    try:
        async with http.session().request(
            method, url, data=data or None, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            return response.status, await _read(response), response.headers
    except aiohttp.ConnectionTimeoutError as error:
        limit_s = timeout.sock_connect or 0
        if time.monotonic() - began > limit_s + HELD_UP_S:
            raise SlowRendezvous(url, 0, "this process was held up while it connected") from error
        raise RendezvousError(url, 0, f"nobody accepted a connection within {limit_s:g} s") from error
    except TimeoutError as error:
        raise SlowRendezvous(url, 0, f"no answer came within {timeout.total:.3g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:  # ValueError: a host that cannot be a name
        raise RendezvousError(url, 0, str(error) or type(error).__name__) from error


def _host_header(url: URL) -> str:
    """Return the Host header that aiohttp sends."""
    return (url.host_port_subcomponent or "").rstrip(".")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_chunked(65536):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER:
            raise ValueError(f"the answer is longer than {MAX_ANSWER} bytes")
    return b"".join(parts)


def reason_in(text: str) -> str:
    """Return the message inside an error body of ours, or the first line of another server's."""
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, RecursionError, KeyError, TypeError):
        message = text.strip().partition("\n")[0]
    return str(message)[:300] or "no reason given"


# ---- Host names to addresses, on the HTTP thread
#
# libzmq would look a name up on the thread that serves all its sockets, where a slow name server stalls them all, and
# would try only the first of several addresses.


_ADDRESSES = 8  # tried at most


async def find_address(host: str, port: int, timeout_s: float) -> str:
    """Return the name's first address at which something listens; an address is returned as it is.

    Raises OSError, after at most `timeout_s` for the name and as much for each address.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return host
    failure = OSError(f"{host} has no address")
    for address in await _addresses(host, port, timeout_s):
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(address, port), timeout_s)
        except OSError as error:  # a TimeoutError is one
            failure = OSError(f"cannot connect to {host}:{port} at {address}: {error}")
            continue
        writer.close()
        return address
    raise failure


async def _addresses(host: str, port: int, timeout_s: float) -> list[str]:
    try:
        found = await asyncio.wait_for(asyncio.wrap_future(NAMES.begin(host, port)), timeout_s)
    except TimeoutError:
        raise OSError(f"no name server answered for {host} in {timeout_s:g} s") from None
    return [str(entry[4][0]) for entry in found][:_ADDRESSES]


# ---- Look-ups and the announcement


logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_NOT_YET = 503  # our mark for "no ranks yet", whatever the server answered


@attrs.frozen
class RankAddress:
    """Where one prefill rank of the room's group listens; a legacy rank has no `router_port` and no `life`."""

    prefill_rank: Rank
    host: str
    port: int
    router_port: int | None = None
    life: Life | None = None


@attrs.frozen
class PrefillFound:
    """A prefill instance as its rendezvous describes it; `tp_size` counts the ranks of one group."""

    bootstrap: Endpoint
    tp_size: int
    dp_size: int
    dp_group: int
    layout: bytes
    ranks: tuple[RankAddress, ...]


@attrs.frozen
class _Instance:
    """What a rendezvous says of all ranks at once; `tp_size` counts those of one group."""

    tp_size: int
    dp_size: int
    layout: bytes


@attrs.frozen
class PrefillNotFound:
    """No usable answer; `cause` names the address and the last reason."""

    bootstrap: Endpoint
    cause: str


@attrs.frozen
class LookUpOptions:
    """How long a look-up tries.

    `deadline_s` bounds the whole of it: while the rendezvous answers that ranks are missing, and while it is slow to
    answer. An address where nobody accepts a connection is given up after `unreachable_s`, so that clients of a dead
    prefill get their error soon. After `request_timeout_s` without an answer the question is asked once more, on a
    connection of its own, in case the old one leads nowhere; that one has the time that is left.
    """

    deadline_s: float = 120.0
    unreachable_s: float = 1.5
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 5.0
    first_pause_s: float = 0.05
    longest_pause_s: float = 1.0
    unproved: bool = False
    """With a secret: take the answers of a rendezvous that does not prove it, as those of legacy peers do not."""


class SharedQuestions(Generic[Answer]):
    """Questions that several ask at one time: one is under way for each key, and one answer serves all that wait.

    An answer is never older than its question: who comes while one is under way waits for the next one. For
    coroutines of one loop only.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[Answer]] = {}
        self._next: dict[Hashable, asyncio.Task[Answer]] = {}

    async def ask(self, key: Hashable, question: Callable[[], Coroutine[Any, Any, Answer]]) -> Answer:
        """Return the answer to a question that is put from now on, or raise what it raises."""
        task = self._next.get(key)
        if task is None:
            running = self._running.get(key)
            tasks = self._running if running is None else self._next
            task = tasks[key] = asyncio.create_task(self._put(key, running, question))
            task.add_done_callback(partial(self._ended, key))
        return await asyncio.shield(task)

    async def _put(
        self, key: Hashable, before: asyncio.Task[Answer] | None, question: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Answer:
        if before is not None:
            await asyncio.wait([before])
            self._running[key] = self._next.pop(key)
        return await question()

    def _ended(self, key: Hashable, task: asyncio.Task[Answer]) -> None:
        for tasks in (self._running, self._next):
            if tasks.get(key) is task:
                del tasks[key]
        if not task.cancelled():
            task.exception()  # whoever asked may have left; asyncio would complain


class RendezvousClient:
    """Asks rendezvous servers for a room's prefill ranks; nothing is cached, so a restarted prefill is seen at once.

    Rooms that ask the same server at one time share its answers.
    """

    def __init__(self, http: HttpThread, options: LookUpOptions | None = None, secret: Secret | None = None) -> None:
        self._http = http
        self._options = options or LookUpOptions()
        self._secret = secret
        self._instances: SharedQuestions[_Instance] = SharedQuestions()
        self._groups: SharedQuestions[tuple[RankAddress, ...]] = SharedQuestions()

    def find(self, bootstrap: Endpoint, room: Room, done: Callable[[PrefillFound | PrefillNotFound], None]) -> None:
        """Look up, and call `done` exactly once (on the HTTP thread, or here when that is closed); never blocks."""

        def ended(search: Future[PrefillFound | PrefillNotFound]) -> None:
            if search.cancelled():
                done(PrefillNotFound(bootstrap, f"the look-up at {bootstrap} was stopped"))
                return
            failure = search.exception()
            done(search.result() if failure is None else PrefillNotFound(bootstrap, f"look-up broke: {failure!r}"))

        try:
            search = self._http.run(self._search(bootstrap, room))
        except LocalProtocolError as error:
            done(PrefillNotFound(bootstrap, f"no look-up at {bootstrap}: {error}"))
            return
        search.add_done_callback(ended)

    def check(self, bootstrap: Endpoint, dp_group: int, tp_rank: int, done: Callable[[Endpoint | None], None]) -> None:
        """Ask once where a rank listens; `done` gets None without an answer. Never blocks."""

        def ended(question: Future[RankAddress]) -> None:
            answered = not question.cancelled() and question.exception() is None
            done(Endpoint(question.result().host, question.result().port) if answered else None)

        try:
            question = self._http.run(self._rank(bootstrap, dp_group, tp_rank, self._options.request_timeout_s))
        except LocalProtocolError:
            done(None)
            return
        question.add_done_callback(ended)

    async def _search(self, bootstrap: Endpoint, room: Room) -> PrefillFound | PrefillNotFound:
        options, began, pause = self._options, time.monotonic(), self._options.first_pause_s
        answer_s, slow, why = min(options.request_timeout_s, options.deadline_s), False, ""
        while True:
            try:
                async with asyncio.timeout(began + options.deadline_s - time.monotonic()):
                    return await self._ask(bootstrap, room, answer_s, slow=slow)
            except TimeoutError:  # what several share may outlast one of them
                return PrefillNotFound(bootstrap, why or f"no answer came within {options.deadline_s:.3g} s")
            except RendezvousError as error:
                why = str(error)
                slow = isinstance(error, SlowRendezvous)
                patience_s = options.unreachable_s if error.status == 0 and not slow else options.deadline_s
                left_s = began + patience_s - time.monotonic()
                if left_s <= 0 or not _is_worth_asking_again(error.status):
                    return PrefillNotFound(bootstrap, why)
                answer_s = left_s if slow else answer_s
            await asyncio.sleep(min(pause, left_s))
            pause = min(2 * pause, options.longest_pause_s)

    async def _ask(self, bootstrap: Endpoint, room: Room, answer_s: float, *, slow: bool) -> PrefillFound:
        found = await self._instances.ask((bootstrap, slow), partial(self._instance, bootstrap, answer_s))
        group = dp_group(room, found.dp_size)
        question = partial(self._group, bootstrap, group, found.tp_size, answer_s)
        ranks = await self._groups.ask((bootstrap, group, slow), question)
        return PrefillFound(bootstrap, found.tp_size, found.dp_size, group, found.layout, ranks)

    async def _group(self, bootstrap: Endpoint, group: int, tp_size: int, answer_s: float) -> tuple[RankAddress, ...]:
        return tuple(await asyncio.gather(*(self._rank(bootstrap, group, rank, answer_s) for rank in range(tp_size))))

    async def _instance(self, bootstrap: Endpoint, answer_s: float) -> _Instance:
        sync = await self._get(bootstrap, -1, -1, answer_s)
        if sync.optional("cache_layout") is None:
            raise RendezvousError(bootstrap.url("http"), _NOT_YET, "no prefill rank has registered yet")
        with _refusing(bootstrap):
            world_size = sync.member("prefill_tp_size").whole(1, MAX_WORLD_SIZE)
            dp_size = sync.member("prefill_dp_size").whole(1, world_size)
            if world_size % dp_size:
                sync.refuse(f"has the world size {world_size}, no multiple of the dp size {dp_size}")
            refuse_pipelines(sync, "prefill_pp_size")
            layout = sync.member("cache_layout").text(MAX_LAYOUT)
            if not layout.isascii():
                sync.member("cache_layout").refuse("is not ASCII")
        return _Instance(world_size // dp_size, dp_size, layout.encode("ascii"))

    async def _rank(self, bootstrap: Endpoint, dp_group: int, tp_rank: int, answer_s: float) -> RankAddress:
        answer = await self._get(bootstrap, tp_rank, dp_group, answer_s)
        with _refusing(bootstrap):
            found = _read_rank(Rank(tp_rank), answer)
        return attrs.evolve(found, host=await self._address(bootstrap, found.host, found.router_port or found.port))

    async def _address(self, bootstrap: Endpoint, host: str, port: int) -> str:
        try:
            return await find_address(host, port, self._options.connect_timeout_s)
        except OSError as error:
            raise RendezvousError(bootstrap.url("http"), _NOT_YET, str(error)) from error

    async def _get(self, bootstrap: Endpoint, tp_rank: int, dp_group: int, answer_s: float) -> JsonValue:
        query = f"engine_rank={tp_rank}&target_dp_group={dp_group}"
        url = f"{bootstrap.url('http')}/route?{query}"
        options = self._options
        status, text = await exchange(
            self._http,
            "GET",
            url,
            self._secret,
            options.connect_timeout_s,
            answer_s,
            unproved=options.unproved,
        )
        if status != 200:
            # A rendezvous answers 404 only to the question for one rank.
            raise RendezvousError(url, _NOT_YET if status == 404 and tp_rank >= 0 else status, _meaning(status))
        with _refusing(bootstrap):
            return parse_json(text.encode("utf-8"), "answer", MAX_ANSWER)


@contextlib.contextmanager
def _refusing(bootstrap: Endpoint) -> Iterator[None]:
    """Turn what is wrong with an answer's JSON into a RendezvousError."""
    try:
        yield
    except WireError as error:
        raise RendezvousError(bootstrap.url("http"), 200, error.reason) from error


def _read_rank(rank: Rank, answer: JsonValue) -> RankAddress:
    host, port = answer.member("rank_ip").text(), answer.member("rank_port").whole(1, 65535)
    if answer.optional(MARKER) is None:
        return RankAddress(rank, host, port)
    answer.member(MARKER).whole(VERSION, VERSION)
    router_port, life = answer.member("router_port").whole(1, 65535), Life(answer.member("prefill_life").text())
    return RankAddress(rank, host, port, router_port, life)


def _meaning(status: int) -> str:
    """Return what a status of /route means. The text comes from whatever listens there: no client must read it."""
    return {401: "it asks for a secret", 404: "it has no such rank", 503: "not every prefill rank has registered"}.get(
        status, "that is no answer of a rendezvous"
    )


def _is_worth_asking_again(status: int) -> bool:
    return status in (0, 408, 425, 429) or status >= 500


@attrs.frozen
class Announcement:
    """What a prefill rank publishes of itself; `world_rank` counts over all groups."""

    world_rank: int
    world_size: int
    dp_size: int
    host: str
    port: int
    router_port: int
    life: Life
    layout: bytes
    token: str = attrs.field(factory=lambda: secrets.token_hex(16), repr=False)
    """What shows the rendezvous that a later PUT is ours too."""

    def body(self) -> str:
        """Return the PUT's JSON, legacy fields first."""
        return json.dumps(
            {
                "role": "Prefill",
                "world_size": self.world_size,
                "dp_size": self.dp_size,
                "rank_ip": self.host,
                "rank_port": self.port,
                "engine_rank": self.world_rank,
                "cache_layout": self.layout.decode("ascii"),
                MARKER: VERSION,
                "router_port": self.router_port,
                "prefill_life": self.life,
                "token": self.token,
            }
        )


@attrs.frozen
class AnnouncerOptions:
    """`repeat_s` must stay well under the rendezvous' lease of 15 s."""

    repeat_s: float = 5.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0
    connect_timeout_s: float = 2.0
    request_timeout_s: float = 5.0
    lease_s: float = LEASE_S


class Announcer:
    """Keeps one rank registered. `ready` is set by the first accepted PUT and stays set.

    `trouble` is the reason of the last refused or failed PUT, None while all is well. `on_ready` is called once, on
    the HTTP thread.
    """

    def __init__(
        self,
        http: HttpThread,
        rendezvous: Endpoint,
        announcement: Announcement,
        *,
        secret: Secret | None = None,
        on_ready: Callable[[], None] | None = None,
        options: AnnouncerOptions | None = None,
    ) -> None:
        self.ready = threading.Event()
        self.trouble: str | None = None
        self._http = http
        self._url = f"{rendezvous.url('http')}/route"
        self._announcement = announcement
        self._secret = secret
        self._on_ready = on_ready
        self._options = options or AnnouncerOptions()
        self._running: Future[None] | None = None
        self._accepted_at = -math.inf

    @property
    def is_registered(self) -> bool:
        """Whether the last accepted PUT still counts at the rendezvous."""
        return time.monotonic() - self._accepted_at < self._options.lease_s

    @property
    def has_ended(self) -> bool:
        """Whether it announces no more although nobody stopped it."""
        return self._running is not None and self._running.done() and not self._running.cancelled()

    def start(self) -> None:
        """Begin to announce; return at once."""
        if self._running is None:
            self._running = self._http.run(self._announce())

    def stop(self) -> None:
        """Announce no more; idempotent, return at once."""
        if self._running is not None:
            self._running.cancel()

    async def _announce(self) -> None:
        options = self._options
        pause = options.first_pause_s
        while True:
            try:
                await self._put()
            except RendezvousError as error:
                self._note(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, options.longest_pause_s)
            else:
                self._accepted()
                pause = options.first_pause_s
                await asyncio.sleep(options.repeat_s)

    async def _put(self) -> None:
        options = self._options
        status, text = await exchange(
            self._http,
            "PUT",
            self._url,
            self._secret,
            options.connect_timeout_s,
            options.request_timeout_s,
            body=self._announcement.body(),
        )
        if status != 200:
            raise RendezvousError(self._url, status, reason_in(text))

    def _note(self, error: RendezvousError) -> None:
        if self.trouble is None:  # an edge; the state stays readable in `trouble`
            logger.warning("prefill rank %d is not registered: %s", self._announcement.world_rank, error)
        self.trouble = str(error)

    def _accepted(self) -> None:
        if self.trouble is not None or not self.ready.is_set():
            logger.info("prefill rank %d is registered at %s", self._announcement.world_rank, self._url)
        self.trouble, self._accepted_at = None, time.monotonic()
        if not self.ready.is_set():
            self.ready.set()
            if self._on_ready is not None:
                self._on_ready()
