"""The connection between rank 0 and another rank of one split model: JSON lines over TCP.

Rank 0 listens, on a port and with a word that it tells the others through the ring. A line is `[kind, number, text]`.
Its order is the order of sending, which the ranks' common steps rely on. Both ends beat; an end, an error or a long
silence of the other side is told once, and nothing is repaired: ranks live and die together.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from pdplane.errors import ConfigError, WireError
from pdplane.ids import Endpoint

logger = logging.getLogger(__name__)

Message: TypeAlias = tuple[str, int, str]

_BEAT_S = 2.0
_SILENCE_S = 30.0  # a loaded machine may be slow; a death shows at once, as the end of the stream
_MEETING_S = 60.0
_MAX_LINE = 64 << 20  # a prompt of some million tokens


class RankLink:
    """One end. `on_message` and `on_lost` are called on the link's own thread, the latter once at most."""

    def __init__(self, connected: socket.socket, name: str) -> None:
        self._socket, self.name = connected, name
        self._socket.settimeout(_SILENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """Begin to listen and to beat."""
        for work in (lambda: self._read(on_message, on_lost), self._beat):
            thread = threading.Thread(target=work, name="pdplane-rank-link", daemon=True)
            self._threads.append(thread)
            thread.start()

    def send(self, kind: str, number: int = 0, text: str = "") -> None:
        """Send a line, in order with all others; a dead peer is `on_lost`'s business, not the sender's."""
        line = json.dumps([kind, number, text]).encode() + b"\n"
        with self._lock:
            try:
                self._socket.sendall(line)
            except OSError:  # half a line may have gone: the reader finds the end
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def part(self, word: str) -> None:
        """Say a last word; the end of the other side is no loss from now on."""
        self._closing.set()
        self.send(word)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def wait_end(self, timeout_s: float) -> None:
        """Wait until the other side has ended too; what it says until then is heard."""
        if self._threads:
            self._threads[0].join(timeout_s)

    def close(self) -> None:
        """Cut the connection and join the threads; idempotent, any thread."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._socket.close()

    def _read(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        reason = "a thread of this rank has died"
        try:
            with self._socket.makefile("rb") as lines:
                while line := lines.readline(_MAX_LINE):
                    message = _parse(line)
                    if message[0] != "beat":
                        on_message(message)
            reason = f"{self.name} is gone"
        except TimeoutError:
            reason = f"{self.name} is gone: silent for {_SILENCE_S:g} s"
        except OSError as error:
            reason = f"{self.name} is gone: {error.strerror or error}"
        except WireError as error:
            reason = f"{self.name} speaks in another way: {error}"
        finally:  # also after a bug of ours, whose traceback follows
            if not self._closing.is_set():
                on_lost(reason)

    def _beat(self) -> None:
        while not self._closing.wait(_BEAT_S):
            self.send("beat")


def _parse(line: bytes) -> Message:
    try:
        kind, number, text = json.loads(line)
        return str(kind), int(number), str(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError("rank link", f"no line of ours: {line[:40]!r}") from error


class RankListener:
    """Rank 0's door; `close` it when all are in."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.bind((host, 0))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {host} for the other ranks: {error.strerror or error}") from error
        self.port = int(self._socket.getsockname()[1])
        self.word = secrets.token_hex(16)

    def accept(self, size: int) -> list[RankLink]:
        """The links to ranks 1 to `size` - 1, in order. Raises ConfigError when not all come in time."""
        found: dict[int, RankLink] = {}
        deadline = time.monotonic() + _MEETING_S
        try:
            while len(found) < size - 1:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                connected, _ = self._socket.accept()
                rank = self._greeted(connected)
                if rank is None or not 0 < rank < size or rank in found:
                    logger.warning("somebody who is no rank of ours knocked at port %s", self.port)
                    connected.close()
                else:
                    found[rank] = RankLink(connected, f"rank {rank}")
        except OSError as error:
            for link in found.values():
                link.close()
            raise ConfigError(f"only {len(found) + 1} of {size} ranks came in {_MEETING_S:g} s") from error
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        self._socket.close()

    def _greeted(self, connected: socket.socket) -> int | None:
        """Byte by byte, so that nothing of what follows the greeting is lost."""
        connected.settimeout(5)
        line = b""
        try:
            while len(line) < 64 and not line.endswith(b"\n"):
                if not (more := connected.recv(1)):
                    return None
                line += more
            word, _, rank = line.decode("ascii").strip().partition(" ")
            return int(rank) if hmac.compare_digest(word, self.word) else None
        except (OSError, ValueError):
            return None


def connect_rank(address: Endpoint, word: str, rank: int) -> RankLink:
    """The link to rank 0. Raises ConfigError."""
    try:
        connected = socket.create_connection((address.host, address.port), _MEETING_S)
        connected.sendall(f"{word} {rank}\n".encode())
    except OSError as error:
        raise ConfigError(f"rank 0 cannot be reached at {address}: {error.strerror or error}") from error
    return RankLink(connected, "rank 0")
