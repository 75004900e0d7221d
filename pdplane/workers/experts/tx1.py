"""TX1: authenticated frames over a byte stream; bytes and keys only, no socket.

    frame  = prefix(20) | kind | header | payload | tag(32)
    prefix = "TX1F" | u8 version 1 | u8 kind length 1..32 | u16 flags 0 | u32 header length | u64 payload length
    tag    = HMAC-SHA256(key of the direction, u64 number of the frame from 0 | prefix | kind | header | payload)

Numbers are in network order, the kind is [a-z_]+, the header a JSON object in UTF-8, which is parsed only after the tag
was found right. Before the first frame both sides prove that they know the token, which is never sent:

    server: "TX1C" | lowest version | highest version | u16 0 | nonce(32)
    client: "TX1A" | version | u8 0 | u16 0 | nonce(32) | proof(32)
    server: "TX1B" | version | u8 status 0 | u16 0 | proof(32)

    K = HMAC(token, "TX1F key v1"), T = the first message and the first 40 bytes of the second
    client's proof = HMAC(K, "client" | T), server's = HMAC(K, "server" | T | client's proof)
    keys: HMAC(K, "c2s" | T | client's proof) and HMAC(K, "s2c" | T | client's proof)

This authenticates; it hides nothing. Run it inside TLS or WireGuard where others can listen.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import attrs

from pdplane.errors import ConfigError, LocalProtocolError, WireError
from pdplane.net import JsonValue, parse_json
from pdplane.security import read_private
from pdplane.workers.listener import BoundedSocket, bytes_of

VERSION = 1
NONCE_BYTES = 32
CHALLENGE_BYTES = 40
ANSWER_BYTES = 72
ACCEPTANCE_BYTES = 40
PREFIX_BYTES = 20
TAG_BYTES = 32
MIN_TOKEN_BYTES = 16
MAX_TOKEN_BYTES = 4096
MAX_KIND_BYTES = 32

Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct("!4sBBHIQ")
_KIND = re.compile(r"[a-z_]{1,32}\Z")


class Tx1Token:
    """The bytes that a worker and its coordinators share."""

    __slots__ = ("_key",)

    def __init__(self, token: bytes) -> None:
        if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
            raise ConfigError(f"a token has {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES} bytes, this one has {len(token)}")
        self._key = hmac.digest(token, b"TX1F key v1", "sha256")

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Return the token of a file that only its owner can read; white space at both ends does not count.

        Raises ConfigError.
        """
        content = read_private(path, "token", MAX_TOKEN_BYTES)
        try:
            return cls(content.strip())
        except ConfigError as error:
            raise ConfigError(f"token file {path}: {error.reason}") from None

    def __repr__(self) -> str:
        return "Tx1Token(...)"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a token is not pickled")

    def prove(self, label: bytes, *parts: Buffer) -> bytes:
        """Return HMAC over a label and the conversation so far."""
        mac = hmac.new(self._key, label, hashlib.sha256)
        for part in parts:
            mac.update(part)
        return mac.digest()


@attrs.frozen(repr=False)
class Keys:
    """The keys of the two directions."""

    client_to_server: bytes
    server_to_client: bytes


@attrs.frozen
class Tx1Limits:
    """The largest header and payload; checked before any memory is taken."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 256 << 20


@attrs.frozen(eq=False)
class Message:
    """A frame whose tag was right."""

    kind: str
    header: JsonValue
    payload: memoryview


def challenge(nonce: bytes) -> bytes:
    """Return the server's first message."""
    return b"TX1C" + bytes([VERSION, VERSION, 0, 0]) + nonce


def answer(token: Tx1Token, challenged: Buffer, nonce: bytes) -> tuple[bytes, bytes]:
    """Return the client's message and the transcript so far. Raises WireError for no challenge that we can answer."""
    found = bytes(challenged)
    if len(found) != CHALLENGE_BYTES or found[:4] != b"TX1C":
        raise WireError("challenge", "the peer does not speak TX1")
    if not found[4] <= VERSION <= found[5]:
        raise WireError("version", f"the peer speaks versions {found[4]}..{found[5]}, not {VERSION}")
    transcript = found + b"TX1A" + bytes([VERSION, 0, 0, 0]) + nonce
    return transcript[CHALLENGE_BYTES:] + token.prove(b"client", transcript), transcript


def accept(token: Tx1Token, challenged: bytes, answered: Buffer) -> tuple[bytes, Keys]:
    """Return the server's second message and the keys. Raises WireError when the client does not know the token."""
    found = bytes(answered)
    if len(found) != ANSWER_BYTES or found[:8] != b"TX1A" + bytes([VERSION, 0, 0, 0]):
        raise WireError("answer", "the peer does not speak TX1")
    transcript, proof = challenged + found[:40], found[40:]
    if not hmac.compare_digest(proof, token.prove(b"client", transcript)):
        raise WireError("proof", "the peer has another token")
    reply = b"TX1B" + bytes([VERSION, 0, 0, 0]) + token.prove(b"server", transcript, proof)
    return reply, _keys(token, transcript, proof)


def confirm(token: Tx1Token, transcript: bytes, answered: bytes, accepted: Buffer) -> Keys:
    """Return the keys, once the server has proved itself. Raises WireError when it does not know the token."""
    found, proof = bytes(accepted), answered[40:]
    if len(found) != ACCEPTANCE_BYTES or found[:8] != b"TX1B" + bytes([VERSION, 0, 0, 0]):
        raise WireError("acceptance", "the peer does not speak TX1")
    if not hmac.compare_digest(found[8:], token.prove(b"server", transcript, proof)):
        raise WireError("proof", "the peer has another token")
    return _keys(token, transcript, proof)


class Sealer:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes, limits: Tx1Limits) -> None:
        self._key, self._limits = key, limits
        self._number = 0

    def seal(self, kind: str, header: Mapping[str, object], payload: Buffer = b"") -> list[Buffer]:
        """Return a frame as parts that are sent one after the other. Raises LocalProtocolError when it is too large."""
        name, body = kind.encode("ascii"), bytes_of(payload)
        text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode("ascii")
        if not _KIND.match(kind) or len(text) > self._limits.header_bytes or len(body) > self._limits.payload_bytes:
            raise LocalProtocolError(f"a {kind!r} frame of {len(text)} and {len(body)} bytes is over the limits")
        head = _PREFIX.pack(b"TX1F", VERSION, len(name), 0, len(text), len(body)) + name + text
        tag = _tag(self._key, self._number, head, body)
        self._number += 1
        return [head, body, tag]


@attrs.frozen
class Lengths:
    """What a prefix declares."""

    kind: int
    header: int
    payload: int


class Opener:
    """Checks the frames of one direction."""

    def __init__(self, key: bytes, limits: Tx1Limits) -> None:
        self._key, self._limits = key, limits
        self._number = 0

    def lengths(self, prefix: Buffer) -> Lengths:
        """Return what the prefix declares. Raises WireError, for lengths over the limits too."""
        lengths = self.declared(prefix)
        if lengths.payload > self._limits.payload_bytes:
            limit = self._limits.payload_bytes
            raise WireError("payload", f"a payload of {lengths.payload} bytes, allowed are {limit}")
        return lengths

    def declared(self, prefix: Buffer) -> Lengths:
        """Return what the prefix declares, however long the payload. Raises WireError."""
        magic, version, kind, flags, header, payload = _PREFIX.unpack(prefix)
        if magic != b"TX1F" or version != VERSION or flags:
            raise WireError("prefix", "a frame with another magic, version or flags")
        if not 1 <= kind <= MAX_KIND_BYTES:
            raise WireError("kind", f"a kind of {kind} bytes")
        if not 2 <= header <= self._limits.header_bytes:
            raise WireError("header", f"a header of {header} bytes, allowed are 2..{self._limits.header_bytes}")
        return Lengths(kind, header, payload)

    def open(self, prefix: Buffer, lengths: Lengths, named: Buffer, payload: memoryview, tag: Buffer) -> Message:
        """Return the message from `named`, kind and header. Raises WireError.

        Nothing is parsed before the tag is checked.
        """
        if not hmac.compare_digest(bytes(tag), _tag(self._key, self._number, bytes(prefix) + bytes(named), payload)):
            raise WireError("tag", "a frame with a wrong tag")
        self._number += 1
        text = bytes(named)
        kind = text[: lengths.kind].decode("ascii", "replace")
        if not _KIND.match(kind):
            raise WireError("kind", f"the kind {kind[:MAX_KIND_BYTES]!a}")
        return Message(kind, parse_json(text[lengths.kind :], "header", self._limits.header_bytes), payload)


def _keys(token: Tx1Token, transcript: bytes, proof: bytes) -> Keys:
    return Keys(token.prove(b"c2s", transcript, proof), token.prove(b"s2c", transcript, proof))


def _tag(key: bytes, number: int, head: bytes, payload: Buffer) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "big"), hashlib.sha256)
    mac.update(head)
    mac.update(payload)
    return mac.digest()


# ---- TX1 over a line: the handshake of either side, then messages both ways


class Framer:
    """One proved connection. Errors are WireError for what the peer sent and OSError for the line."""

    def __init__(self, line: BoundedSocket, sealer: Sealer, opener: Opener) -> None:
        self._line, self._sealer, self._opener = line, sealer, opener
        self._overlong = b""

    @classmethod
    def serve(
        cls, line: BoundedSocket, token: Tx1Token, limits: Tx1Limits, deadline_s: float, nonce: bytes | None = None
    ) -> Self:
        """Shake hands as the server, all of it before `deadline_s`; read exactly 72 bytes."""
        with line.deadline(deadline_s):
            challenged = challenge(nonce or secrets.token_bytes(NONCE_BYTES))
            line.write(challenged)
            reply, keys = accept(token, challenged, line.read(ANSWER_BYTES))
            line.write(reply)
        return cls(line, Sealer(keys.server_to_client, limits), Opener(keys.client_to_server, limits))

    @classmethod
    def connect(
        cls, line: BoundedSocket, token: Tx1Token, limits: Tx1Limits, deadline_s: float, nonce: bytes | None = None
    ) -> Self:
        """Shake hands as the client, all of it before `deadline_s`."""
        with line.deadline(deadline_s):
            sent, transcript = answer(token, line.read(CHALLENGE_BYTES), nonce or secrets.token_bytes(NONCE_BYTES))
            line.write(sent)
            keys: Keys = confirm(token, transcript, sent, line.read(ACCEPTANCE_BYTES))
        return cls(line, Sealer(keys.client_to_server, limits), Opener(keys.server_to_client, limits))

    def send(self, kind: str, header: Mapping[str, object], payload: Buffer = b"") -> int:
        """Send a message; return its frame's size in bytes."""
        parts = self._sealer.seal(kind, header, payload)
        self._line.write(*parts)
        return sum(len(part) for part in parts)

    def receive(self, within_s: float | None) -> Message:
        """Return the next message; its first byte may take `within_s` (None: no limit)."""
        prefix = self._line.await_first(PREFIX_BYTES, within_s)
        self._overlong = bytes(prefix)
        lengths = self._opener.lengths(prefix)
        self._overlong = b""
        named = self._line.read(lengths.kind + lengths.header)
        payload = self._line.read(lengths.payload)
        return self._opener.open(prefix, lengths, named, payload, self._line.read(TAG_BYTES))

    def refuse(self, error: WireError, within_s: float) -> None:
        """Answer a frame whose payload is over the limit, and skip it, so that the peer, which still sends, reads that.

        The connection cannot go on: the frame's tag was not checked.
        """
        lengths = self._opener.declared(self._overlong)
        with self._line.deadline(time.monotonic() + within_s):
            self.send("error", {"msg": error.reason, "code": "bad_request", "field": error.field})
            self._line.skip(lengths.kind + lengths.header + lengths.payload + TAG_BYTES)
