"""Names for the ids that pdplane passes around, and the one address type.

Ids are opaque: nothing splits an id at a colon. `Endpoint` is the only place where
a host and a port are taken apart or put together, so IPv6 is handled once.
"""

from __future__ import annotations

import re
import secrets
from typing import NewType, Self

import attrs

Room = NewType("Room", int)
"""One request's id on both roles, 0..2**63-1."""
SessionId = NewType("SessionId", str)
"""One decode rank's data address, as it stands in the registration."""
Rank = NewType("Rank", int)
"""A tensor-parallel rank inside one data-parallel group; always qualified by a role where it is used."""
Life = NewType("Life", str)
"""One process life of a rank: 32 hex digits; a restarted rank has another one."""
Generation = NewType("Generation", int)
"""Number of a room's life on one decode rank, u64; 0 for peers that do not send it."""
GroupId = NewType("GroupId", str)
FieldId = NewType("FieldId", str)

MAX_ROOM = 2**63 - 1

_PORT = re.compile(r"[0-9]{1,5}\Z")


def new_life() -> Life:
    """Return a fresh, unguessable life: 16 random bytes in hex."""
    return Life(secrets.token_hex(16))


def new_room() -> Room:
    """Return a fresh random 63-bit room."""
    return Room(secrets.randbits(63))


@attrs.frozen(cache_hash=True)
class Endpoint:
    """A host and a TCP port; `host` carries no brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, default_port: int | None = None) -> Self:
        """Read `host:port`, `[v6]:port`, or a bare host when a default port is given.

        Raises ValueError that names the text.
        """
        host, port = _split(text)
        if port is None:
            if default_port is None:
                raise ValueError(f"{text!r} has no port")
            return cls(host, default_port)
        if not _PORT.match(port) or not 0 <= int(port) <= 65535:
            raise ValueError(f"{text!r} has no valid port")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def url(self, scheme: str) -> str:
        return f"{scheme}://{self}"


def _split(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or not host or (rest and not rest.startswith(":")):
            raise ValueError(f"{text!r} is not a bracketed IPv6 address")
        return host, rest[1:] if rest else None
    if text.count(":") > 1:
        return text, None  # a bare IPv6 literal: every colon belongs to the host
    host, colon, port = text.partition(":")
    if not host:
        raise ValueError(f"{text!r} has no host")
    return host, port if colon else None
