"""One shared secret, and everything that is derived from it.

A secret turns on CURVE for the native control sockets and mutual challenges in the data greeting and at the
rendezvous. Each use has its own key, HMAC-SHA256(secret, label), so that none of them gives away another; nothing that
is sent can be used again for anything else. Nothing here logs, prints or pickles the secret, and every comparison takes
the same time whatever the bytes are.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import ssl
from pathlib import Path
from typing import Self

import attrs

from pdplane.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

NONCE_LIFE_S = 60.0


def read_private(path: str | Path, what: str, most: int) -> bytes:
    """Return what a file holds, a little more than `most` bytes at most, if only its owner can read it.

    The group may read one that belongs to root and not to us, as orchestrators mount them. Raises ConfigError.
    """
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(most + 256)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {path}: {error.strerror}") from error
    mounted = status.st_uid == 0 != os.geteuid()
    if status.st_mode & (0o027 if mounted else 0o077):
        raise ConfigError(f"{what} file {path} can be read by others; chmod 600 {path}")
    return content


class Secret:
    """The bytes that both roles share; at least 16 of them, since a listener can try guesses offline."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
            raise ConfigError(
                f"a secret has {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, this one has {len(secret)}"
            )
        self._secret = bytes(secret)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a secret from a file that nobody else can read; white space at both ends does not count.

        Raises ConfigError.
        """
        content = read_private(path, "secret", MAX_SECRET_BYTES)
        try:
            return cls(content.strip())
        except ConfigError as error:
            raise ConfigError(f"secret file {path}: {error.reason}") from None

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a secret is not pickled")

    def answer(self, role: str, *parts: bytes) -> bytes:
        """Return the proof (32 bytes) that `role` knows the secret, over the parts of a conversation.

        Lengths are part of what is hashed, so that no other cut of the same bytes has the same proof.
        """
        mac = hmac.new(self._derive(f"data greeting {role}"), digestmod=hashlib.sha256)
        for part in parts:
            mac.update(len(part).to_bytes(8, "little"))
            mac.update(part)
        return mac.digest()

    def check_answer(self, proof: bytes, role: str, *parts: bytes) -> bool:
        """Return whether `proof` is the answer of `role` over these parts."""
        return hmac.compare_digest(proof, self.answer(role, *parts))

    def curve_key(self) -> bytes:
        """Return the 32 bytes of the CURVE secret key that every native socket uses (`control/channels.py`).

        Both roles have the same pair: who knows the secret may connect and may listen.
        """
        return self._derive("curve")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, f"pdplane/1 {purpose}".encode(), hashlib.sha256)


class Nonces:
    """Challenges that one listener makes and knows again without keeping them, each good for `NONCE_LIFE_S`."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def issue(self, now: float) -> str:
        """Return a fresh nonce, 48 hex digits."""
        when = int(now * 1000).to_bytes(8, "big")
        return (when + self._mark(when)).hex()

    def knows(self, nonce: str, now: float) -> bool:
        """Return whether the nonce was issued here and is not too old."""
        try:
            raw = bytes.fromhex(nonce)
        except ValueError:
            return False
        age = now - int.from_bytes(raw[:8], "big") / 1000
        return hmac.compare_digest(raw[8:], self._mark(raw[:8])) and -1.0 <= age <= NONCE_LIFE_S

    def _mark(self, when: bytes) -> bytes:
        return hmac.digest(self._key, when, hashlib.sha256)[:16]


# ---- Certificates


@attrs.frozen
class Tls:
    """PEM files: our certificate with its chain, its key, and the CA by which members know each other.

    Every certificate of the CA counts as a member, whatever names stand in it: give the daemons a CA of their own.
    """

    cert: Path = attrs.field(converter=Path)
    key: Path = attrs.field(converter=Path)
    ca: Path | None = attrs.field(default=None, converter=attrs.converters.optional(Path))

    def member(self, *, server_side: bool) -> ssl.SSLContext:
        """Return a context of either end of a data connection: both show a certificate. Raises ConfigError."""
        if self.ca is None:
            raise ConfigError("TLS between daemons needs the CA by which they know each other (--tls-ca)")
        context = self._own(server_side=server_side)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        trust(context, self.ca)
        return context

    def api(self) -> ssl.SSLContext:
        """Return the context of an HTTPS server, whose clients need no certificate. Raises ConfigError."""
        return self._own(server_side=True)

    def _own(self, *, server_side: bool) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.cert, self.key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot use {self.cert} with the key {self.key}: {_why(error)}") from error
        return context


def trust(context: ssl.SSLContext, ca: Path) -> None:
    """Let the context believe certificates of this CA. Raises ConfigError."""
    try:
        context.load_verify_locations(ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the CA {ca}: {_why(error)}") from error


def _why(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
