"""Sockets, wake-ups and JSON as every layer above uses them: one way each.

`listen` and `Acceptor` accept connections, `Wakeup` ends another thread's poll, `JsonLines` speaks JSON over a pipe or
a socket, and `JsonValue` reads the fields of JSON that somebody else wrote.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import resource
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import attrs

from pdplane.errors import ConfigError, WireError
from pdplane.ids import Endpoint

HELD_UP_S = 0.25  # who wakes so much later than asked was stopped, or kept from the interpreter: no peer's fault
_BACKLOG = 512
_LOOK_UP_STEP_S = 0.05
_EXHAUSTED_PAUSE_MS = 200  # out of descriptors: the connection stays in the backlog, and `poll` would spin


# ---- Addresses and listening


def as_endpoint(value: Endpoint | str, name: str) -> Endpoint:
    """Return an Endpoint, or one written as "host:port"; raise ConfigError that says which setting is neither."""
    if isinstance(value, Endpoint):
        return value
    try:
        return Endpoint.parse(value)
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"{name} is {value!r}: give an Endpoint or 'host:port'") from None


def reached(bound: Endpoint, advertised: str | None = None) -> Endpoint:
    """Return where a listening socket is reached: one on every interface as advertised, else on this host."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound.host)
    return bound if local is None else Endpoint(advertised or local, bound.port)


def listen(at: Endpoint) -> socket.socket:
    """Listen for TCP connections at an address or name; the socket does not block. Raises ConfigError naming `at`."""
    if not at.host:
        raise ConfigError("an empty host would listen on every interface; name one")
    try:
        family, _, _, _, address = socket.getaddrinfo(
            at.host, at.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return listen_on(family, address)
    except (OSError, ValueError) as error:  # ValueError: a text that no name can be
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {at.port} on {at.host} is taken by another process") from error
        reason = error.strerror if isinstance(error, OSError) else None
        raise ConfigError(f"cannot listen on {at}: {reason or error}") from error


def listen_on(family: int, address: tuple[object, ...] | str) -> socket.socket:
    """Listen at one address of a family; the socket does not block. Raises OSError."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.settimeout(0)
    except OSError:
        listener.close()
        raise
    return listener


class Acceptor:
    """One thread that accepts the connections of some listening sockets, which it owns.

    `admit(connected, address)` runs on that thread and owns the new socket; it must not wait. `exhausted` is called
    each time that the process has no free file descriptor or thread for one.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        admit: Callable[[socket.socket, object], None],
        *,
        name: str,
        exhausted: Callable[[], None] = lambda: None,
    ) -> None:
        self._listeners, self._admit, self._exhausted = list(listeners), admit, exhausted
        self._name, self._closing, self._pulse = name, False, Pulse(name)
        self._wakeup: Wakeup | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to accept."""
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, args=(self._wakeup,), name=self._name, daemon=True)
        self._thread.start()

    def trouble(self) -> str | None:
        """Return why no connection is accepted, None when there is no reason or it was closed."""
        if self._thread is None or self._closing:
            return None
        return self._pulse.trouble(runs=self._thread.is_alive())

    def stop(self) -> None:
        """Accept no more, from any thread; return at once."""
        self._closing = True
        if self._wakeup is not None:
            self._wakeup.wake()

    def close(self) -> None:
        """Accept no more, join the thread and close the listening sockets; idempotent."""
        self.stop()
        if self._thread is not None and self._wakeup is not None:
            self._thread.join()
            self._wakeup.close()
        for listener in self._listeners:
            listener.close()

    def _run(self, wakeup: Wakeup) -> None:
        poll, pause = select.poll(), select.poll()
        for listener in self._listeners:
            poll.register(listener.fileno(), select.POLLIN)
        poll.register(wakeup.descriptor, select.POLLIN)
        pause.register(wakeup.descriptor, select.POLLIN)
        while not self._closing:
            self._pulse.beat()
            ready = dict(poll.poll(IDLE_TURN_S * 1000))
            for listener in self._listeners:
                if listener.fileno() in ready and not self._closing and not self._accept(listener):
                    self._exhausted()
                    pause.poll(_EXHAUSTED_PAUSE_MS)

    def _accept(self, listener: socket.socket) -> bool:
        """Accept one connection; False when the process is out of descriptors or threads."""
        try:
            connected, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return True
        except OSError:
            return False
        try:
            self._admit(connected, address)
        except RuntimeError:  # no new thread can be started
            connected.close()
            return False
        return True


# ---- Whether a thread goes on


IDLE_TURN_S = 1.0
"""The longest that a thread which beats waits in one turn."""
STALLED_S = 10.0
"""A thread that has not begun a turn for so long hangs: a busy one takes its turns later, but takes them."""


class Pulse:
    """Shows whether a thread goes on: it beats at each of its turns, of which an idle one has one in `IDLE_TURN_S`."""

    def __init__(self, name: str, allowed_s: float = STALLED_S) -> None:
        self._name, self._allowed_s = name, allowed_s
        self._at = time.monotonic()

    def beat(self) -> None:
        """Say that a turn begins; the thread alone calls it."""
        self._at = time.monotonic()

    def trouble(self, *, runs: bool) -> str | None:
        """Return why the thread does not go on, which names it; None while it does. `runs`: it has not ended."""
        if not runs:
            return f"the thread {self._name} has ended"
        late_s = time.monotonic() - self._at
        return f"the thread {self._name} hangs: no turn for {late_s:.0f} s" if late_s > self._allowed_s else None


# ---- Names to addresses


AddressInfo: TypeAlias = tuple[int, int, int, str, tuple[Any, ...]]
"""An entry of `socket.getaddrinfo`: family, kind, protocol, canonical name, address."""


class Names:
    """Looks host names up on threads of their own, so many at one time; no wait is longer than it may be, and no exit.

    Everything that connects does so by this: libzmq and asyncio would look a name up where they serve everybody, and a
    name server that is silent would stop them.
    """

    def __init__(self, limit: int = 16) -> None:
        self._free = threading.BoundedSemaphore(limit)

    def begin(self, host: str, port: int) -> Future[Sequence[AddressInfo]]:
        """Begin to look up; an address has its answer at once. The future may raise OSError."""
        answer: Future[Sequence[AddressInfo]] = Future()
        try:
            answer.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
        except (OSError, ValueError):
            self._begin(host, port, answer)
        return answer

    def find(
        self, host: str, port: int, timeout_s: float, *, is_over: Callable[[], bool] = lambda: False
    ) -> Sequence[AddressInfo]:
        """Return the addresses, some of which may not answer. Raises OSError, at the latest after `timeout_s`."""
        answer, deadline_s = self.begin(host, port), time.monotonic() + timeout_s
        while True:
            try:
                return answer.result(min(_LOOK_UP_STEP_S, max(0.0, deadline_s - time.monotonic())))
            except TimeoutError:
                if is_over():
                    raise ConnectionAbortedError(f"the look-up of {host} was given up") from None
                if time.monotonic() >= deadline_s:
                    raise OSError(f"no name server answered for {host} in {timeout_s:g} s") from None

    def connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """Return a connection to the first address that answers. Raises OSError, at the latest after `timeout_s`."""
        deadline_s, failure = time.monotonic() + timeout_s, OSError(f"{host} has no address")
        for family, kind, protocol, _, address in self.find(host, port, timeout_s):
            connecting = socket.socket(family, kind, protocol)
            try:
                connecting.settimeout(max(0.001, deadline_s - time.monotonic()))
                connecting.connect(address)
            except OSError as error:
                connecting.close()
                failure = error
            else:
                return connecting
        raise failure

    def _begin(self, host: str, port: int, answer: Future[Sequence[AddressInfo]]) -> None:
        if not self._free.acquire(blocking=False):
            answer.set_exception(OSError(f"too many host names are being looked up to look up {host}"))
            return
        looking = threading.Thread(target=self._look, args=(host, port, answer), name="look-up", daemon=True)
        try:
            looking.start()
        except RuntimeError as error:
            self._free.release()
            answer.set_exception(OSError(f"cannot look up {host}: {error}"))

    def _look(self, host: str, port: int, answer: Future[Sequence[AddressInfo]]) -> None:
        found: Sequence[AddressInfo] = ()
        failure: OSError | None = None
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:  # ValueError: a text that is no name, such as an empty label
            failure = OSError(f"{host!r} is no known host name: {error}")
        finally:
            self._free.release()
        with contextlib.suppress(InvalidStateError):  # who asked has left
            answer.set_result(found) if failure is None else answer.set_exception(failure)


NAMES = Names()
"""For names that an operator or a client chose. Those of registrations have limits of their own."""


# ---- How many may connect, and what is written of peers that are wrong


def share_of_descriptors(part: float, most: int) -> int:
    """Return how many connections one listener may have: a part of the process's file descriptors, at most `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(16, min(most, int(soft * part)))


_T = TypeVar("_T")


def first_to_go(
    candidates: Collection[_T], address: Callable[[_T], str], worth: Callable[[_T], tuple[float, ...]]
) -> _T:
    """Return the connection that makes place for another one: of the address with the most, that of the least worth."""
    crowd, _ = Counter(map(address, candidates)).most_common(1)[0]
    return min((each for each in candidates if address(each) == crowd), key=worth)


def plain(address: str) -> str:
    """Return an address as one of IPv4, if it is one written as IPv6."""
    return address.removeprefix("::ffff:")


class Complaints:
    """Lines of a log about peers that are wrong: one an interval for each key, and few for all keys together.

    What is not written is counted, and told in the next line. Any thread.
    """

    _LINES = 20

    def __init__(self, logger: logging.Logger, interval_s: float = 60.0) -> None:
        self._logger, self._interval_s = logger, interval_s
        self._lock = threading.Lock()
        self._written: dict[Hashable, float] = {}  # the oldest first
        self._kept: Counter[Hashable] = Counter()  # of each such key, and under None those of all others

    def tell(self, key: Hashable, text: str, *values: object, level: int = logging.WARNING) -> None:
        """Write a line, unless one with this key was written a moment ago."""
        if (more := self._admit(key, time.monotonic())) is None:
            return
        if more:
            text, values = f"{text} (and %d more such lines that were not written)", (*values, more)
        self._logger.log(level, text, *values)

    def _admit(self, key: Hashable, now: float) -> int | None:
        """Return how many lines were kept back before this one; None when it is kept back too."""
        with self._lock:
            for old in [old for old, at in self._written.items() if now - at >= self._interval_s]:
                del self._written[old]
                if old != key:
                    self._kept[None] += self._kept.pop(old, 0)
            if key in self._written or len(self._written) >= self._LINES:
                self._kept[key if key in self._written else None] += 1
                return None
            self._written[key] = now
            return self._kept.pop(key, 0) + self._kept.pop(None, 0)


_THIN_LINEAR_TIMEOUTS, _RTO_MAX_MS = 16, 44  # of TCP on Linux; the second one since 6.15


def recover_soon(connection: socket.socket) -> None:
    """Let a connection send again soon after the network was cut, where the system can.

    Else TCP doubles its pause with each try: after a cut of 3 s the next one may be 3 s away, and both ends have taken
    each other for dead.
    """
    if sys.platform == "linux":
        for option, value in ((_THIN_LINEAR_TIMEOUTS, 1), (_RTO_MAX_MS, 1000)):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


# ---- Waking a thread


class Wakeup:
    """Ends another thread's `poll`: a pair of sockets, of which the poller registers `descriptor`.

    Wakes between two calls of `clear` cost one system call together. So the polling thread calls `clear` first and
    looks for its work afterwards.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        self._woken = False
        self._closed = False
        self._lock = threading.Lock()
        self.descriptor = self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; any thread, at any time."""
        if self._woken:
            return
        self._woken = True
        with self._lock:
            if not self._closed:
                with contextlib.suppress(OSError):  # full: the other thread is awake already
                    self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget the wakes until now."""
        with contextlib.suppress(OSError):
            while len(self._reader.recv(4096)) == 4096:
                pass
        self._woken = False  # behind the `recv`, so that a wake in between is sent again rather than lost

    def close(self) -> None:
        """Close both ends; idempotent. The polling thread must have ended."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()


# ---- JSON lines


Json: TypeAlias = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

_MAX_LINE = 64 << 20


class Stream(Protocol):
    """A pipe, a socket or a file with a descriptor."""

    def fileno(self) -> int: ...


def json_line(value: object) -> bytes:
    """Return one value as a line."""
    return json.dumps(value).encode() + b"\n"


class JsonLines:
    """JSON values, one a line, over descriptors that somebody else owns and closes."""

    def __init__(
        self, reader: Stream | None = None, writer: Stream | None = None, *, max_line: int = _MAX_LINE
    ) -> None:
        """Leave out the half that is not used."""
        self._reader, self._writer, self.max_line = reader, writer, max_line
        self._lock = threading.Lock()
        self._received = bytearray()

    def send(self, value: object) -> None:
        """Send one value whole; any thread. Raises OSError when nobody reads any more."""
        assert self._writer is not None, "made without a writer"
        left = memoryview(json_line(value))
        with self._lock:
            while left:
                left = left[os.write(self._writer.fileno(), left) :]

    def receive(self, timeout_s: float | None = None) -> Json:
        """Return the next value; one thread.

        Raises EOFError at the stream's end, TimeoutError, OSError, and WireError for a line that is no JSON.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > self.max_line:
                raise WireError("line", f"a line is longer than {self.max_line} bytes")
            self._received += self._more(deadline_s)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            value: Json = json.loads(line)
        except (ValueError, RecursionError):
            raise WireError("line", f"no JSON: {line[:40]!r}") from None
        return value

    def _more(self, deadline_s: float | None) -> bytes:
        assert self._reader is not None, "made without a reader"
        poll = select.poll()
        poll.register(self._reader.fileno(), select.POLLIN)
        left_ms = None if deadline_s is None else max(0.0, deadline_s - time.monotonic()) * 1e3
        if not poll.poll(left_ms):
            raise TimeoutError("no line came in time")
        try:
            more = os.read(self._reader.fileno(), 1 << 16)
        except BlockingIOError:
            return b""
        if not more:
            raise EOFError("the stream has ended")
        return more


# ---- Strict reading of JSON from a peer: every refusal names the path of the value at fault
#
# Any UTF-8, -16 or -32 encoding, key order and whitespace is read, as Python's own loader does. Refused: duplicate
# keys, NaN and Infinity, numbers of more digits than Python converts (4,300), and nesting deeper than its stack.


MAX_WHOLE = 2**63 - 1
MAX_TEXT = 256


@attrs.frozen
class JsonValue:
    """A JSON value and its path; the readers below raise WireError(path, ...) when the value is something else."""

    json: Json
    path: str

    def refuse(self, reason: str) -> NoReturn:
        """Raise WireError for this value."""
        raise WireError(self.path, f"{self.path} {reason}")

    def member(self, key: str) -> JsonValue:
        """Return a required member of an object."""
        found = self._object()
        if key not in found:
            raise WireError(f"{self.path}.{key}", f"{self.path}.{key} is missing")
        return JsonValue(found[key], f"{self.path}.{key}")

    def optional(self, key: str) -> JsonValue | None:
        """Return a member of an object, None when it is absent or null."""
        found = self._object().get(key)
        return None if found is None else JsonValue(found, f"{self.path}.{key}")

    def only(self, keys: Collection[str]) -> JsonValue:
        """Return this object, refused if it has other keys."""
        for key in self._object():
            if key not in keys:
                self.refuse(f"has the unknown key {key[:MAX_TEXT]!a}")
        return self

    def items(self) -> list[JsonValue]:
        """Return the items of an array."""
        return [JsonValue(item, f"{self.path}[{index}]") for index, item in enumerate(self.array())]

    def array(self) -> list[Json]:
        """Return an array as it is."""
        if not isinstance(self.json, list):
            self.refuse("must be an array")
        return self.json

    def whole(self, low: int = 0, high: int = MAX_WHOLE) -> int:
        """Return an integer of low..high; a bool or a float is none."""
        if type(self.json) is not int or not low <= self.json <= high:
            self.refuse(f"must be a whole number of {low}..{high}")
        return self.json

    def number(self) -> float:
        """Return a finite number; a bool is none."""
        if isinstance(self.json, bool) or not isinstance(self.json, int | float) or not _is_finite(self.json):
            self.refuse("must be a finite number")
        return float(self.json)

    def wholes(self, low: int = 0) -> tuple[int, ...]:
        """Return an array of integers of low..2**63-1, checked without a Python loop."""
        array = self.array()
        numbers = tuple(number for number in array if type(number) is int)
        if len(numbers) != len(array) or (numbers and not (low <= min(numbers) and max(numbers) <= MAX_WHOLE)):
            self.refuse(f"must hold whole numbers of {low}..{MAX_WHOLE} only")
        return numbers

    def text(self, limit: int = MAX_TEXT, *, low: int = 1) -> str:
        """Return a string of low..limit characters without lone surrogates, which no log could print."""
        if not isinstance(self.json, str) or not low <= len(self.json) <= limit:
            self.refuse(f"must be a text of {low}..{limit} characters")
        if not self.json.isascii() and any("\ud800" <= character <= "\udfff" for character in self.json):
            self.refuse("must be valid Unicode")
        return self.json

    def _object(self) -> dict[str, Json]:
        if not isinstance(self.json, dict):
            self.refuse("must be an object")
        return self.json


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond every float
        return False


class _Refused(Exception):
    """What JSON allows and we do not."""


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Refused("has an object with a key twice")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise _Refused(f"has the number {word}")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def parse_json(data: bytes, name: str, limit: int) -> JsonValue:
    """Return the JSON object in `data`, which may have 1..limit bytes. Raises WireError(name, ...)."""
    if not 1 <= len(data) <= limit:
        raise WireError(name, f"{name} must be 1..{limit} bytes")
    try:
        found = _STRICT.decode(data.decode(json.detect_encoding(data), "surrogatepass"))
    except _Refused as refused:
        raise WireError(name, f"{name} {refused}") from None
    except (ValueError, RecursionError) as error:  # bad Unicode, bad JSON and endless digits are ValueErrors
        reason = "is nested too deeply" if isinstance(error, RecursionError) else "is not valid JSON"
        raise WireError(name, f"{name} {reason}") from None
    if not isinstance(found, dict):
        raise WireError(name, f"{name} must be a JSON object")
    return JsonValue(found, name)


_CANONICAL = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def write_json(value: object) -> bytes:
    """Return canonical bytes: ASCII, no blanks, keys in the order given."""
    return _CANONICAL.encode(value).encode("ascii")
