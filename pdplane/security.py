"""One shared secret, and everything that is derived from it.

A secret turns on CURVE for the native control sockets, the mutual challenge of the data greeting
and the bearer token of the rendezvous. Each use has its own key, HMAC-SHA256(secret, label), so
that none of them gives away another. Nothing here logs, prints or pickles the secret, and every
comparison takes the same time whatever the bytes are.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Self

from pdplane.errors import ConfigError

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

_BEARER = "Bearer "


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
        """Read a secret from a file; white space at both ends does not count. Raises ConfigError."""
        try:
            with Path(path).open("rb") as file:
                content = file.read(MAX_SECRET_BYTES + 256)
        except OSError as error:
            raise ConfigError(f"cannot read the secret file {path}: {error.strerror}") from error
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

    def bearer(self) -> str:
        """Return the token that the rendezvous asks for, 64 hex digits."""
        return self._derive("rendezvous bearer").hex()

    def check_bearer(self, text: str | None) -> bool:
        """Return whether `text`, a token or a whole `Authorization` header, carries our token."""
        if text is None:
            return False
        token = text[len(_BEARER) :].strip() if text[: len(_BEARER)].lower() == _BEARER.lower() else text
        return hmac.compare_digest(token.encode("utf-8", "surrogateescape"), self.bearer().encode())

    def curve_key(self) -> bytes:
        """Return the 32 bytes of the CURVE secret key that every native socket uses (`control/channels.py`).

        Both roles have the same pair: who knows the secret may connect and may listen.
        """
        return self._derive("curve")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self._secret, f"pdplane/1 {purpose}".encode(), hashlib.sha256)
