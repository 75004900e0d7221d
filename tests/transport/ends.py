"""The two ends of a connection with their reports, for the transport tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import numpy as np

from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64, Copies
from pdplane.messages import Push
from pdplane.security import Secret
from pdplane.transport.fence import Fence, Grant, Write, Writer
from pdplane.transport.registry import Sender, open_receiver, open_sender
from pdplane.transport.reports import Pushed, PushFailed, Report, TransportOptions
from tests.certificates import member

T = TypeVar("T")
PATIENCE_S = 30.0
PREFILL_LIFE = Life("a" * 32)
DECODE_LIFE = Life("d" * 32)


def u64(*values: int) -> U64:
    return np.array(values, np.uint64)


def counted(fence: Fence, room: int = 7, generation: int = 1, rank: int = 0) -> int:
    """The bytes that a rank has landed in whole segments, as an empty segment of its own is told."""
    write = Write(Writer(Rank(rank), PREFILL_LIFE), Room(room), Generation(generation), 2**64 - 1, u64(), u64(), 0)
    grant = fence.admit(write)
    assert isinstance(grant, Grant), grant
    return grant.finish() or 0


class Reports:
    """Collects reports of transport threads and waits for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seen: list[Report] = []

    def __call__(self, report: Report) -> None:
        with self._changed:
            self._seen.append(report)
            self._changed.notify_all()

    def of(self, kind: type[T]) -> list[T]:
        with self._changed:
            return [report for report in self._seen if isinstance(report, kind)]

    @property
    def all(self) -> list[Report]:
        with self._changed:
            return list(self._seen)

    def wait(self, kind: type[T], count: int = 1) -> list[T]:
        self.until(lambda: len(self.of(kind)) >= count, f"{count} {kind.__name__}")
        return self.of(kind)

    def ends(self, count: int) -> list[Pushed | PushFailed]:
        """Wait until `count` pushes have ended, in whatever way."""
        self.until(lambda: len(self.of(Pushed)) + len(self.of(PushFailed)) >= count, f"{count} ended pushes")
        return [report for report in self.all if isinstance(report, Pushed | PushFailed)]

    def until(self, holds: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_S), f"waited for {what}, saw {self._seen[-5:]}"


class Decode:
    """An arena behind a fence and a started receiver."""

    def __init__(
        self,
        scheme: str,
        nbytes: int,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        secret: Secret | None = None,
        options: TransportOptions | None = None,
    ) -> None:
        self.arena = Arena.zeros(nbytes)
        self.fence = Fence(self.arena)
        self.reports = Reports()
        self.receiver = open_receiver(
            scheme,
            listen=Endpoint(host, port),
            decode_life=DECODE_LIFE,
            fence=self.fence,
            report=self.reports,
            secret=secret,
            options=options,
        )
        self.session = self.receiver.start()

    def open_all(self, room: int, generation: int = 1) -> None:
        self.fence.open(Room(room), Generation(generation), u64(0), u64(self.arena.nbytes), None)


class Ends:
    """Makes both ends of one scheme and closes them all."""

    def __init__(self, scheme: str) -> None:
        self.scheme, self.transport = scheme, "tcp" if scheme == "tls" else scheme
        self._senders: list[Sender] = []
        self._decodes: list[Decode] = []

    def options(self, options: TransportOptions | None = None) -> TransportOptions | None:
        """The options of either end, with certificates where the scheme encrypts."""
        if self.scheme != "tls":
            return options
        return attrs.evolve(options or TransportOptions(), tls=member())

    def decode(
        self,
        nbytes: int = 1 << 16,
        *,
        host: str = "127.0.0.1",
        secret: Secret | None = None,
        options: TransportOptions | None = None,
    ) -> Decode:
        decode = Decode(self.transport, nbytes, host=host, secret=secret, options=self.options(options))
        self._decodes.append(decode)
        return self._decodes[-1]

    def sender(
        self,
        decode: Decode,
        arena: Arena,
        *,
        rank: int = 0,
        life: Life = PREFILL_LIFE,
        session: str | None = None,
        peer: Endpoint | None = None,
        decode_life: Life | None = None,
        secret: Secret | None = None,
        options: TransportOptions | None = None,
        report: Callable[[Report], None] | None = None,
        pushes: Sequence[Push] = (),
    ) -> tuple[Sender, Reports]:
        """A started sender; `pushes` are submitted before it starts."""
        reports = Reports()
        sender = open_sender(
            self.transport,
            peer=peer or decode.receiver.endpoint,
            session=SessionId(session) if session else decode.session,
            prefill_rank=Rank(rank),
            prefill_life=life,
            arena=arena,
            report=report or reports,
            secret=secret,
            decode_life=decode_life,
            options=self.options(options),
        )
        self._senders.append(sender)
        for each in pushes:
            sender.submit(each)
        sender.start()
        return sender, reports

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        for decode in self._decodes:
            decode.receiver.close()


def random_arena(nbytes: int, seed: int = 0) -> Arena:
    return Arena(np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8))


def permuted(nbytes: int, block: int, seed: int = 0) -> Copies:
    """Every block of the source to another place of a destination of the same size."""
    count = nbytes // block
    random = np.random.default_rng(seed)
    source = random.permutation(count).astype(np.uint64) * np.uint64(block)
    destination = random.permutation(count).astype(np.uint64) * np.uint64(block)
    return Copies(source, destination, np.full(count, block, np.uint64))


def whole(nbytes: int, source: int = 0, destination: int = 0) -> Copies:
    return Copies(u64(source), u64(destination), u64(nbytes))


def push(room: int, copies: Copies, number: int = 0, generation: int = 1) -> Push:
    return Push(Room(room), Generation(generation), number, copies)


def expected(source: Arena, target_nbytes: int, copies: Copies) -> np.ndarray:
    """The destination after the copies, by plain slices."""
    target = np.zeros(target_nbytes, np.uint8)
    rows = zip(copies.source.tolist(), copies.destination.tolist(), copies.length.tolist(), strict=True)
    for start, to, length in rows:
        target[to : to + length] = source.bytes[start : start + length]
    return target
