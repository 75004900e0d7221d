"""The shorter ways between two processes of one host: what is said to get from TCP to them.

    sender                                                      receiver
    (over TCP, after ACCEPTED: both share a kernel and a user, and the receiver offered a Unix path)
    connects to the path
    ATTACH session number, way, nonce address, nonce, arena base, arena bytes -->
                                                            <-- ATTACHED way   (or REFUSED reason)

The session number is 64 random bits that only the two ends of the TCP connection know. A path that begins
with "@" is an abstract name, where each side asks the kernel for the other's user; any other lies in a folder
that only its user can enter. ATTACHED ends the TCP connection: from then on the Unix socket carries
the frames. The way is `unix` (bytes over the socket) or `pull` (the receiver reads the sender's memory); a
receiver that was asked for `pull` and cannot answers `unix`. Whatever goes wrong before ATTACHED leaves the
TCP connection as it was, and the sender goes on with that.
"""

from __future__ import annotations

import os
import re

import attrs

from pdplane.errors import WireError
from pdplane.transport.greeting import Accepted, GreetingKind, boot_id, encode, expected, number_of

PULL = "pull"
UNIX = "unix"
_U64 = 2**64 - 1
_NONCE = re.compile(r"[0-9a-f]{64}\Z")


@attrs.frozen
class Attach:
    """A sender's wish to go on over a Unix socket; the addresses are of its own memory."""

    session_number: int
    way: str
    nonce_address: int = 0
    nonce: str = "0" * 64
    arena_base: int = 0
    arena_nbytes: int = 0

    def encode(self) -> bytes:
        return encode(GreetingKind.ATTACH, *(str(value) for value in attrs.astuple(self)))


def decode_attach(kind: GreetingKind, texts: tuple[str, ...]) -> Attach:
    """Read an ATTACH; raises WireError."""
    number, way, address, nonce, base, nbytes = expected(kind, GreetingKind.ATTACH, texts)
    if way not in (PULL, UNIX):
        raise WireError("way", f"there is no way {way!r}")
    if not _NONCE.match(nonce):
        raise WireError("nonce", "the nonce is not well formed")
    values = [number_of(text, "attach", _U64) for text in (number, address, base, nbytes)]
    if values[2] + values[3] > _U64:
        raise WireError("arena", "the sender's arena leaves its address space")
    return Attach(values[0], way, values[1], nonce, values[2], values[3])


def encode_attached(way: str) -> bytes:
    """The receiver's consent."""
    return encode(GreetingKind.ATTACHED, way)


def decode_attached(kind: GreetingKind, texts: tuple[str, ...], asked: str) -> str:
    """The way that was agreed on; raises WireError for one that was not asked for."""
    (way,) = expected(kind, GreetingKind.ATTACHED, texts)
    if way not in (asked, UNIX):
        raise WireError("way", f"{asked!r} was asked for, not {way!r}")
    return way


def is_reachable(accepted: Accepted) -> bool:
    """Whether the receiver's offer is of our own kernel and user."""
    return bool(accepted.unix_path) and (accepted.boot_id, accepted.uid) == (boot_id(), str(os.getuid()))
