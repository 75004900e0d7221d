"""TX1 over a line: the handshake of either side, then messages both ways."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Self

from pdplane.workers.line import Line
from pdplane.workers.tx1 import (
    ACCEPTANCE_BYTES,
    ANSWER_BYTES,
    CHALLENGE_BYTES,
    NONCE_BYTES,
    PREFIX_BYTES,
    TAG_BYTES,
    Buffer,
    FrameLimits,
    Keys,
    Message,
    Opener,
    Sealer,
    Token,
    accept,
    answer,
    challenge,
    confirm,
)


class Framer:
    """One proved connection. Errors are WireError for what the peer sent and OSError for the line."""

    def __init__(self, line: Line, sealer: Sealer, opener: Opener) -> None:
        self._line, self._sealer, self._opener = line, sealer, opener

    @classmethod
    def serve(
        cls, line: Line, token: Token, limits: FrameLimits, deadline_s: float, nonce: bytes | None = None
    ) -> Self:
        """The server's handshake, all of it before `deadline_s`; reads exactly 72 bytes."""
        with line.deadline(deadline_s):
            challenged = challenge(nonce or secrets.token_bytes(NONCE_BYTES))
            line.write(challenged)
            reply, keys = accept(token, challenged, line.read(ANSWER_BYTES))
            line.write(reply)
        return cls(line, Sealer(keys.server_to_client, limits), Opener(keys.client_to_server, limits))

    @classmethod
    def connect(
        cls, line: Line, token: Token, limits: FrameLimits, deadline_s: float, nonce: bytes | None = None
    ) -> Self:
        """The client's handshake, all of it before `deadline_s`."""
        with line.deadline(deadline_s):
            sent, transcript = answer(token, line.read(CHALLENGE_BYTES), nonce or secrets.token_bytes(NONCE_BYTES))
            line.write(sent)
            keys: Keys = confirm(token, transcript, sent, line.read(ACCEPTANCE_BYTES))
        return cls(line, Sealer(keys.client_to_server, limits), Opener(keys.server_to_client, limits))

    def send(self, kind: str, header: Mapping[str, object], payload: Buffer = b"") -> int:
        """Send a message; gives the bytes of its frame."""
        parts = self._sealer.seal(kind, header, payload)
        self._line.write(*parts)
        return sum(len(part) for part in parts)

    def receive(self, within_s: float | None) -> Message:
        """The next message, whose first byte may take `within_s` (None: for ever)."""
        prefix = self._line.await_first(PREFIX_BYTES, within_s)
        lengths = self._opener.lengths(prefix)
        named = self._line.read(lengths.kind + lengths.header)
        payload = self._line.read(lengths.payload)
        return self._opener.open(prefix, lengths, named, payload, self._line.read(TAG_BYTES))
