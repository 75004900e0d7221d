"""The daemons that `pdplane serve` sends requests to: which of them answer, how busy they are, which is next.

Everything here runs on the HTTP thread. A member leaves selection when it cannot be reached, says that it takes no
requests, or is silent for `SILENCE_CHECKS` checks; requests that it still has end then. It comes back by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias

import aiohttp
import attrs
from yarl import URL

from pdplane.ids import Endpoint
from pdplane.serving.reading import DEFAULT_BODY

logger = logging.getLogger(__name__)

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")

CHECK_S = 1.0
SILENCE_CHECKS = 3
_CHECK = aiohttp.ClientTimeout(total=2.0)
_BOOTSTRAP_PORT = 8998
_NOT_ASKED = "it was not asked yet"


@attrs.define(eq=False)
class Member:
    """One daemon. `reason` is why it takes no requests now, None when it does."""

    role: Role
    url: str
    reason: str | None = _NOT_ASKED
    in_flight: int = 0
    served: int = 0
    info: dict[str, Any] = attrs.field(factory=dict)
    missed: int = 0
    lost: asyncio.Event = attrs.field(factory=asyncio.Event)
    """Set while the daemon is silent, so that answers from it are not awaited."""

    @property
    def bootstrap(self) -> Endpoint:
        """Where a prefill daemon's rendezvous listens, as its info has it."""
        host, port = self.info.get("bootstrap_host"), self.info.get("bootstrap_port")
        return Endpoint(str(host or URL(self.url).host), int(port or _BOOTSTRAP_PORT))

    @property
    def longest_body(self) -> int:
        """Bytes of the longest request that the daemon reads, as its info has it."""
        told = self.info.get("max_body_bytes")
        return told if isinstance(told, int) else DEFAULT_BODY

    def leave(self, reason: str, *, silent: bool = False) -> None:
        """Take the member out of selection."""
        if self.reason is None:
            logger.warning("%s at %s takes no requests: %s", self.role, self.url, reason)
        self.reason = reason
        if silent:
            self.lost.set()

    def join(self, info: dict[str, Any]) -> None:
        """Take the member into selection."""
        self.info, self.missed = info, 0
        self.lost.clear()
        if self.reason is not None:
            logger.info("%s at %s takes requests", self.role, self.url)
        self.reason = None


class Members:
    """All daemons of both roles."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = list(members)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)

    def moved(self, member: Member, url: str) -> None:
        """Take a restarted daemon's new address; it is out of selection until it was checked."""
        member.url, member.missed = url, 0
        member.leave(_NOT_ASKED)

    def choose(self, role: Role, but: frozenset[str] = frozenset()) -> Member | None:
        """Return the member of a role with the fewest requests, the least used of equals; None when none takes any."""
        found = [one for one in self._members if one.role == role and one.reason is None and one.url not in but]
        return min(found, key=lambda member: (member.in_flight, member.served), default=None)

    def complaint(self) -> str | None:
        """Return why no request can be served, naming every daemon of the role that is missing; None when one can."""
        for role in ROLES:
            if self.choose(role) is None:
                reasons = [f"{one.url}: {one.reason}" for one in self._members if one.role == role]
                return f"no {role} daemon takes requests ({'; '.join(reasons)})"
        return None

    async def keep_checking(self, session: aiohttp.ClientSession) -> None:
        """Ask every member for its health once a second, for as long as the task runs."""
        while True:
            await asyncio.gather(*(self.check(member, session) for member in self._members))
            await asyncio.sleep(CHECK_S)

    async def check(self, member: Member, session: aiohttp.ClientSession) -> None:
        """Ask one member for its health, and for its addresses when it joins."""
        url = member.url
        if not url:
            return  # a child that says where it listens when it is ready
        try:
            async with session.get(f"{url}/health", timeout=_CHECK) as answer:
                ready, reason = answer.status == 200, f"its /health answers {answer.status}"
            info = member.info
            if ready and member.reason is not None:
                async with session.get(f"{url}/server_info", timeout=_CHECK) as answer:
                    info = dict(await answer.json())
        except (aiohttp.ClientError, OSError, ValueError, TypeError) as error:  # TimeoutError is an OSError
            self._missed(member, url, f"{error}" or type(error).__name__)
            return
        if url != member.url:
            return  # it has moved meanwhile
        if (said := info.get("disaggregation_mode")) and said != member.role:
            ready, reason = False, f"it is a {said} daemon"
        if ready:
            member.join(info)
        else:
            member.missed = 0
            member.leave(reason)

    def _missed(self, member: Member, url: str, reason: str) -> None:
        if url != member.url:
            return
        member.missed += 1
        if member.missed >= SILENCE_CHECKS or member.reason is not None:
            member.leave(reason, silent=member.missed >= SILENCE_CHECKS)
