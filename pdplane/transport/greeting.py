"""The greeting of a data connection, without any input or output.

    sender                                          receiver
    HELLO session, decode life, rank, life, nonce,
          "1" with a secret, bundle, stream       -->
                                                  <-- WELCOME decode life, nonce, proof   (or REFUSED reason)
    PROOF proof                                   -->
                                                  <-- ACCEPTED session number, boot id, uid, Unix path

Each message is `"PDPG" | u8 version 1 | u8 kind | u16 length` and texts, each `u16 length | UTF-8`, all
little-endian and at most 2 KiB long. With a secret on both sides each proves to the other that it knows
it, over both nonces and every earlier message; without one the proofs are empty; a secret on one side only is
refused. An empty decode life in HELLO means: whoever answers there. Connections of one writer and one bundle
(any text) exist beside each other, one for each stream number; another bundle ends them all. The last three
fields of ACCEPTED say which shorter ways exist on one host; ATTACH and ATTACHED, below, choose one.
"""

from __future__ import annotations

import enum
import os
import re
import secrets
import struct
from pathlib import Path

import attrs

from pdplane.errors import WireError
from pdplane.ids import Life, Rank, SessionId
from pdplane.security import Secret
from pdplane.transport.fence import Writer

PREFIX_BYTES = 8
MAX_BODY_BYTES = 2048
MAX_TEXT_BYTES = 512
_MAGIC = b"PDPG"
_VERSION = 1
_PREFIX = struct.Struct("<4sBBH")
_LENGTH = struct.Struct("<H")
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,19})\Z")
_NONCE = re.compile(r"[0-9a-f]{64}\Z")
_PROOF = re.compile(r"(?:[0-9a-f]{64})?\Z")
_MAX_RANK = 2**31 - 1
MAX_STREAMS = 64


class GreetingKind(enum.IntEnum):
    """What a greeting message is."""

    HELLO = 1
    WELCOME = 2
    PROOF = 3
    ACCEPTED = 4
    REFUSED = 5
    ATTACH = 6
    ATTACHED = 7


_FIELDS = {
    GreetingKind.HELLO: 8,
    GreetingKind.WELCOME: 3,
    GreetingKind.PROOF: 1,
    GreetingKind.ACCEPTED: 4,
    GreetingKind.REFUSED: 1,
    GreetingKind.ATTACH: 6,
    GreetingKind.ATTACHED: 1,
}


@attrs.frozen
class Accepted:
    """A receiver's last message: the number that segments carry, and what it offers on the same host.

    `way` names what carries the bytes in the end: `pull`, `unix`, or the scheme itself.
    """

    session_number: int
    decode_life: Life
    boot_id: str
    uid: str
    unix_path: str
    way: str = "tcp"


@attrs.frozen
class Bundle:
    """Which of a sender's connections this is: those of one `id` belong together, one for each `stream`."""

    id: str = attrs.field(factory=lambda: secrets.token_hex(8))
    stream: int = 0


def encode(kind: GreetingKind, *texts: str) -> bytes:
    """Return one greeting message; texts beyond 512 bytes are cut."""
    body = b""
    for text in texts:
        data = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
        body += _LENGTH.pack(len(data)) + data
    return _PREFIX.pack(_MAGIC, _VERSION, kind, len(body)) + body


def decode_prefix(data: bytes | bytearray) -> tuple[GreetingKind, int]:
    """Return kind and body length from the first 8 bytes. Raises WireError."""
    magic, version, kind, length = _PREFIX.unpack(data)
    if magic != _MAGIC:
        raise WireError("magic", "not a pdplane data connection")
    if version != _VERSION:
        raise WireError("version", f"data greeting version {version} is not spoken here")
    if kind not in _FIELDS or length > MAX_BODY_BYTES:
        raise WireError("greeting", f"no greeting has kind {kind} and {length} bytes")
    return GreetingKind(kind), length


def decode_body(kind: GreetingKind, body: bytes | bytearray) -> tuple[str, ...]:
    """Return the texts of a greeting message. Raises WireError."""
    texts, at = [], 0
    while at < len(body):
        if at + _LENGTH.size > len(body):
            raise WireError("greeting", "a text of the greeting is cut short")
        (length,) = _LENGTH.unpack_from(body, at)
        at += _LENGTH.size
        data = bytes(body[at : at + length])
        at += length
        if length > MAX_TEXT_BYTES or at > len(body):
            raise WireError("greeting", "a text of the greeting is cut short or too long")
        texts.append(_text(data))
    if len(texts) != _FIELDS[kind]:
        raise WireError("greeting", f"{kind.name} has {_FIELDS[kind]} texts, not {len(texts)}")
    return tuple(texts)


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise WireError("greeting", "a text of the greeting is no UTF-8") from None


class SenderGreeting:
    """The sender's half: each method takes the peer's message and returns the next of ours."""

    def __init__(
        self,
        session: SessionId,
        writer: Writer,
        secret: Secret | None,
        decode_life: Life | None = None,
        bundle: Bundle | None = None,
    ) -> None:
        """Take what HELLO says; a `decode_life` of None accepts any life at the session's address."""
        bundle = bundle or Bundle()
        self._secret = secret
        self._expected = decode_life
        self._hello = encode(
            GreetingKind.HELLO,
            session,
            decode_life or "",
            str(writer.prefill_rank),
            writer.life,
            secrets.token_hex(32),
            "1" if secret else "0",
            bundle.id,
            str(bundle.stream),
        )
        self._decode_life = Life("")

    def hello(self) -> bytes:
        return self._hello

    def welcome(self, kind: GreetingKind, texts: tuple[str, ...]) -> bytes:
        """Check the receiver's proof and return ours. Raises WireError when it refuses or its proof is wrong."""
        life, nonce, proof = expected(kind, GreetingKind.WELCOME, texts)
        _match(_NONCE, nonce, "nonce")
        _match(_PROOF, proof, "proof")
        if self._expected is not None and life != self._expected:
            raise WireError("decode life", f"another decode answers there: life {life!r}")
        self._decode_life = Life(life)
        if self._secret is None:
            return encode(GreetingKind.PROOF, "")
        said = (self._hello, life.encode(), nonce.encode())
        if not self._secret.check_answer(bytes.fromhex(proof), "receiver", *said):
            raise WireError("proof", "the receiver does not know our secret")
        return encode(GreetingKind.PROOF, self._secret.answer("sender", *said).hex())

    def accepted(self, kind: GreetingKind, texts: tuple[str, ...]) -> Accepted:
        """Return the end of the greeting. Raises WireError when the receiver refuses."""
        number, boot_id, uid, unix_path = expected(kind, GreetingKind.ACCEPTED, texts)
        value = number_of(number, "session number", 2**64 - 1)
        return Accepted(value, self._decode_life, boot_id, uid, unix_path)


class ReceiverGreeting:
    """The receiver's half; the reason in a WireError may be sent to the peer."""

    def __init__(self, session: SessionId, decode_life: Life, secret: Secret | None) -> None:
        self._session, self._decode_life, self._secret = session, decode_life, secret
        self._said: tuple[bytes, ...] = ()
        self.writer = Writer(Rank(0), Life(""))
        self.bundle = Bundle("")

    def hello(self, kind: GreetingKind, texts: tuple[str, ...]) -> bytes:
        """Check the sender's names and return our proof. Raises WireError."""
        session, decode_life, rank, life, nonce, knows, bundle, stream = expected(kind, GreetingKind.HELLO, texts)
        if session != self._session:
            raise WireError("session", f"session {session!r} is not served here")
        if decode_life not in ("", self._decode_life):
            raise WireError("decode life", f"decode life {decode_life!r} is over")
        if not life:
            raise WireError("life", "a prefill life is not empty")
        if (knows == "1") != (self._secret is not None):
            raise WireError("secret", "one side has a secret and the other has none")
        _match(_NONCE, nonce, "nonce")
        self.writer = Writer(Rank(number_of(rank, "rank", _MAX_RANK)), Life(life))
        self.bundle = Bundle(bundle, number_of(stream, "stream", MAX_STREAMS - 1))
        own_nonce = secrets.token_hex(32)
        self._said = (encode(kind, *texts), self._decode_life.encode(), own_nonce.encode())
        proof = self._secret.answer("receiver", *self._said).hex() if self._secret else ""
        return encode(GreetingKind.WELCOME, self._decode_life, own_nonce, proof)

    def proof(self, kind: GreetingKind, texts: tuple[str, ...]) -> None:
        """Check the sender's proof. Raises WireError."""
        (proof,) = expected(kind, GreetingKind.PROOF, texts)
        _match(_PROOF, proof, "proof")
        if self._secret and not self._secret.check_answer(bytes.fromhex(proof), "sender", *self._said):
            raise WireError("proof", "the sender does not know our secret")

    def accepted(self, session_number: int, unix_path: str = "") -> bytes:
        """Return our last message."""
        return encode(GreetingKind.ACCEPTED, str(session_number), boot_id(), str(os.getuid()), unix_path)


def boot_id() -> str:
    """Return the name of this boot of this kernel on Linux, an empty text elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def expected(kind: GreetingKind, wanted: GreetingKind, texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the texts of the message that is due. Raises WireError for another one, with REFUSED's reason."""
    if kind is GreetingKind.REFUSED:
        raise WireError("refused", f"the receiver refused: {texts[0]}")
    if kind is not wanted:
        raise WireError("greeting", f"{wanted.name} was expected, not {kind.name}")
    return texts


def _match(pattern: re.Pattern[str], text: str, field: str) -> None:
    if not pattern.match(text):
        raise WireError(field, f"the greeting's {field} is not well formed")


def number_of(text: str, field: str, maximum: int) -> int:
    """Return a greeting's decimal number. Raises WireError."""
    _match(_NUMBER, text, field)
    if int(text) > maximum:
        raise WireError(field, f"the greeting's {field} is above {maximum}")
    return int(text)


# ---- The shorter ways between two processes of one host, and the messages that change to them
#
#     sender                                                      receiver
#     (over TCP, after ACCEPTED: both share a kernel and a user, and the receiver offered a Unix path)
#     connects to the path
#     ATTACH session number, way, nonce address, nonce, arena base, arena bytes -->
#                                                             <-- ATTACHED way   (or REFUSED reason)
#
# The session number is 64 random bits that only the two ends of the TCP connection know. A path that begins
# with "@" is an abstract name, where each side asks the kernel for the other's user; any other lies in a folder
# that only its user can enter. ATTACHED ends the TCP connection: from then on the Unix socket carries
# the frames. The way is `unix` (bytes over the socket) or `pull` (the receiver reads the sender's memory); a
# receiver that is asked for `pull` and cannot do it answers `unix`. If anything goes wrong before ATTACHED, the sender
# goes on with the TCP connection.


PULL = "pull"
UNIX = "unix"
_U64 = 2**64 - 1


@attrs.frozen
class Attach:
    """A sender's request to go on over a Unix socket; the addresses are of its own memory."""

    session_number: int
    way: str
    nonce_address: int = 0
    nonce: str = "0" * 64
    arena_base: int = 0
    arena_nbytes: int = 0

    def encode(self) -> bytes:
        return encode(GreetingKind.ATTACH, *(str(value) for value in attrs.astuple(self)))


def decode_attach(kind: GreetingKind, texts: tuple[str, ...]) -> Attach:
    """Read an ATTACH. Raises WireError."""
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
    """Return the receiver's consent."""
    return encode(GreetingKind.ATTACHED, way)


def decode_attached(kind: GreetingKind, texts: tuple[str, ...], asked: str) -> str:
    """Return the way that was agreed on. Raises WireError for one that was not asked for."""
    (way,) = expected(kind, GreetingKind.ATTACHED, texts)
    if way not in (asked, UNIX):
        raise WireError("way", f"{asked!r} was asked for, not {way!r}")
    return way


def is_reachable(accepted: Accepted) -> bool:
    """Return whether the receiver runs under our own kernel and user."""
    return bool(accepted.unix_path) and (accepted.boot_id, accepted.uid) == (boot_id(), str(os.getuid()))
