"""The connection between rank 0 and another rank of one split model: JSON lines over TCP.

Rank 0 listens; it sends its port and a password to the others through the ring. A line is `[kind, number, text]`. Lines
arrive in the order of sending, which the ranks' common steps rely on. Both sides send heartbeats; an end, an error or a
long silence of the other side is reported once, and nothing is repaired: ranks start and end together.

It does not ride on ZeroMQ as the control plane does, for two reasons. A line precedes each forward of the model, and
whoever sends holds the lock that decides: here it is sent at once, and a line and its answer take 19 us on one machine
(p99 0.1 ms). A ZeroMQ socket belongs to one thread, which has to be woken, and hands over to libzmq's own: 100 us (p99
1 to 3 ms) and twice the processor time. And the end of the stream is what tells of a rank's death, which libzmq hides
behind its reconnecting.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from pdplane.errors import ConfigError, WireError
from pdplane.ids import Endpoint
from pdplane.net import NAMES, Complaints, Json, JsonLines, json_line, listen

logger = logging.getLogger(__name__)

Message: TypeAlias = tuple[str, int, str]

_BEAT_S = 2.0
_SILENCE_S = 30.0  # a loaded machine may be slow; a death ends the stream at once
_MEETING_S = 60.0
_GREETING_S = 5.0
_MAX_LINE = 64 << 20  # a prompt of some million tokens
_MAX_GREETING = 64
_MAX_BACKLOG = 2 * _MAX_LINE  # a rank that lets more than that wait is stuck


class RankLink:
    """One side of the connection. `on_message` and `on_lost` are called on its own thread, the latter once at most.

    Sending never waits, not even for a rank that has stopped: senders hold locks that all requests need.
    """

    def __init__(self, connected: socket.socket, name: str, lines: JsonLines | None = None) -> None:
        """Take over `lines`, which has read the greeting and may hold what came right behind it."""
        self._socket, self.name = connected, name
        self._lines = lines or JsonLines(connected)
        self._lines.max_line = _MAX_LINE
        self._socket.settimeout(_SILENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._out = connected.dup()
        self._out.settimeout(0)
        self._changed = threading.Condition()
        self._backlog = bytearray()  # what the socket did not take at once
        self._over = self._parting = False  # nothing is sent any more; nothing once the backlog is empty
        self._threads: list[threading.Thread] = []

    def start(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        """Begin to receive and to send heartbeats."""
        for work in (lambda: self._read(on_message, on_lost), self._write):
            thread = threading.Thread(target=work, name="pdplane-rank-link", daemon=True)
            self._threads.append(thread)
            thread.start()

    def send(self, kind: str, number: int = 0, text: str = "") -> None:
        """Send a line, in order with all others; `on_lost` reports a dead or stuck peer, not this call."""
        line = json_line([kind, number, text])
        with self._changed:
            if self._over or self._parting:
                return
            self._backlog += line if self._backlog else line[self._push(line) :]
            if self._over or len(self._backlog) > _MAX_BACKLOG:
                self._cut()
            elif self._backlog:
                self._changed.notify_all()

    def part(self, word: str) -> None:
        """Send a last line; the end of the other side counts as no loss from now on."""
        with self._changed:  # once the line is sent, the other side may end before we note that we part
            self.send(word)
            self._parting = True
            self._changed.notify_all()
            if not self._backlog:
                self._end()

    def wait_end(self, timeout_s: float) -> None:
        """Wait until the other side has ended too, taking its lines until then."""
        if self._threads:
            self._threads[0].join(timeout_s)

    def close(self) -> None:
        """Cut the connection and join the threads; idempotent, any thread."""
        with self._changed:
            self._parting = True
            self._cut()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._out.close()
        self._socket.close()

    # ---- what is sent; all but `_write` under the lock

    def _push(self, data: bytes | bytearray) -> int:
        """Send what the socket takes now; return how many bytes that was."""
        try:
            return self._out.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader notices the end
            self._cut()
            return 0

    def _end(self) -> None:
        self._over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _cut(self) -> None:
        self._over = True
        self._backlog.clear()
        self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """Send heartbeats, and what the socket did not take at once."""
        poll = select.poll()
        poll.register(self._out, select.POLLOUT)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._over, _BEAT_S)
                if self._over:
                    return
                late = bool(self._backlog)
            if not late:
                self.send("beat")
                continue
            writable = poll.poll(_SILENCE_S * 1e3)
            with self._changed:
                if not writable:
                    self._cut()
                else:
                    del self._backlog[: self._push(self._backlog)]
                    if self._parting and not self._backlog and not self._over:
                        self._end()

    def _read(self, on_message: Callable[[Message], None], on_lost: Callable[[str], None]) -> None:
        reason = "a thread of this rank has died"
        try:
            while True:
                message = _message(self._lines.receive(_SILENCE_S))
                if message[0] != "beat":
                    on_message(message)
        except EOFError:
            reason = f"{self.name} is gone"
        except TimeoutError:
            reason = f"{self.name} is gone: silent for {_SILENCE_S:g} s"
        except OSError as error:
            reason = f"{self.name} is gone: {error.strerror or error}"
        except WireError as error:
            reason = f"{self.name} speaks in another way: {error}"
        finally:  # also after a bug of ours, whose traceback follows
            with self._changed:
                parting = self._parting
            if not parting:
                on_lost(reason)


def _message(line: Json) -> Message:
    match line:
        case [str(kind), int(number), str(text)]:
            return kind, number, text
        case _:
            raise WireError("rank link", f"no line of ours: {str(line)[:40]!r}")


class RankListener:
    """Rank 0's listener for the other ranks; `close` it when all are connected."""

    def __init__(self, host: str) -> None:
        """Listen on a free port. Raises ConfigError."""
        self._socket = listen(Endpoint(host, 0))
        self.port = int(self._socket.getsockname()[1])
        self.word = secrets.token_hex(16)
        self._complaints = Complaints(logger)

    def accept(self, size: int) -> list[RankLink]:
        """Return the links to ranks 1 to `size` - 1, in order. Raises ConfigError when not all come in time."""
        found: dict[int, RankLink] = {}
        deadline = time.monotonic() + _MEETING_S
        try:
            while len(found) < size - 1:
                self._socket.settimeout(max(0.01, deadline - time.monotonic()))
                connected, _ = self._socket.accept()
                lines = JsonLines(connected, max_line=_MAX_GREETING)
                rank = self._greeted(lines)
                if rank is None or not 0 < rank < size or rank in found:
                    self._complaints.tell(None, "a connection to port %s was not from one of our ranks", self.port)
                    connected.close()
                else:
                    found[rank] = RankLink(connected, f"rank {rank}", lines)
        except OSError as error:
            for link in found.values():
                link.close()
            raise ConfigError(f"only {len(found) + 1} of {size} ranks came in {_MEETING_S:g} s") from error
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        self._socket.close()

    def _greeted(self, lines: JsonLines) -> int | None:
        """Return the rank that a connection greets as; None without the word."""
        try:
            match lines.receive(_GREETING_S):
                case [str(word), int(rank)] if word.isascii() and hmac.compare_digest(word, self.word):
                    return rank
                case _:
                    return None
        except (OSError, EOFError, WireError):
            return None


def connect_rank(address: Endpoint, word: str, rank: int) -> RankLink:
    """Return the link to rank 0. Raises ConfigError."""
    try:
        connected = NAMES.connect(address.host, address.port, _MEETING_S)
        connected.sendall(json_line([word, rank]))
    except OSError as error:
        raise ConfigError(f"rank 0 cannot be reached at {address}: {error.strerror or error}") from error
    return RankLink(connected, "rank 0")
