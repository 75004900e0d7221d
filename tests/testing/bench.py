"""Interop peers as processes, or quicker as threads, and what they said."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Any, Self

import attrs
import pytest

from pdplane.testing.interop_peer import ROLES
from pdplane.testing.interop_run import EventLog, parse

PATIENCE_S = 60.0
NATIVE = ("--channel", "native", "--transport", "auto")


def _missing() -> str:
    """Asked in a process of its own: the import starts threads, which open sockets some time later."""
    check = "from pdplane.transport.registry import require_transport; require_transport('mooncake')"
    asked = subprocess.run([sys.executable, "-c", check], stderr=subprocess.PIPE, text=True, check=False)
    return asked.stderr.strip().rpartition("\n")[2] if asked.returncode else ""


needs_mooncake = pytest.mark.skipif(bool(reason := _missing()), reason=reason)


@attrs.frozen
class Said:
    """One ended peer."""

    exit_code: int
    events: tuple[dict[str, Any], ...]
    errors: str

    def of(self, event: str) -> list[dict[str, Any]]:
        return [found for found in self.events if found["event"] == event]

    @property
    def names(self) -> list[str]:
        return [found["event"] for found in self.events]

    @property
    def done(self) -> dict[str, Any]:
        assert self.names[-1] == "done", self
        return self.events[-1]


class Peer:
    """One running peer; `end` waits for it, leaving the `with` kills it if it still runs."""

    def __init__(self, role: str, *words: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the peer)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pdplane.testing.interop_peer", role, *words],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()

    def hear(self, event: str) -> dict[str, Any]:
        """Read on until this event; an error when the peer ends first."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            self._lines.append(line)
            found: dict[str, Any] = json.loads(line)
            if found["event"] == event:
                return found
        raise AssertionError(f"no {event}: {self._lines} {self._said_wrong()}")

    def terminate(self) -> None:
        self._process.terminate()

    def end(self) -> Said:
        assert self._process.stdout is not None
        self._lines += self._process.stdout.readlines()
        return Said(self._process.wait(PATIENCE_S), tuple(map(json.loads, self._lines)), self._said_wrong())

    def _said_wrong(self) -> str:
        self._errors.seek(0)
        return self._errors.read()


class ThreadedPeer:
    """The same inside this process: quicker to start, and without an exit code of its own."""

    def __init__(self, role: str, *words: str) -> None:
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lines: list[dict[str, Any]] = []
        self._good: list[bool] = []
        options = parse([role, *words])
        self._thread = threading.Thread(target=lambda: self._good.append(ROLES[role](options, EventLog(self._take))))
        self._thread.start()

    def _take(self, value: object) -> None:
        self._said.put(json.loads(json.dumps(value)))

    def hear(self, event: str) -> dict[str, Any]:
        while True:
            self._lines.append(self._said.get(timeout=PATIENCE_S))
            if self._lines[-1]["event"] == event:
                return self._lines[-1]

    def end(self) -> Said:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        while not self._said.empty():
            self._lines.append(self._said.get())
        return Said(0 if self._good == [True] else 1, tuple(self._lines), "")

    def __exit__(self, *_: object) -> None:
        self._thread.join(PATIENCE_S)


def pair(
    prefill_tp: int = 1,
    decode_tp: int = 1,
    *both: str,
    prefill: Sequence[str] = (),
    decode: Sequence[str] = (),
    reduce_ports: tuple[int, int] = (0, 0),
    link: Sequence[str] = NATIVE,
    kind: type[Peer] | type[ThreadedPeer] = ThreadedPeer,
) -> tuple[list[Said], list[Said]]:
    """Run every rank of both sides on a free port and give what each said, in the order of the ranks."""
    common = [*link, "--linger", "0.1", *both]
    started: list[Peer | ThreadedPeer] = []

    def start(role: str, tp: int, rank: int, *words: str) -> Peer | ThreadedPeer:
        started.append(kind(role, *common, "--tp-size", str(tp), "--tp-rank", str(rank), *words))
        return started[-1]

    try:
        ours = [*prefill, "--reduce-port", str(reduce_ports[0])]
        theirs = [*decode, "--reduce-port", str(reduce_ports[1])]
        first = start("prefill", prefill_tp, 0, "--serve-bootstrap", "--bootstrap-port", "0", *ours)
        port = first.hear("bootstrap")["url"].rpartition(":")[2]
        others = [start("prefill", prefill_tp, rank, "--bootstrap-port", port, *ours) for rank in range(1, prefill_tp)]
        decodes = [
            start("decode", decode_tp, rank, "--bootstrap", f"127.0.0.1:{port}", *theirs) for rank in range(decode_tp)
        ]
        return [peer.end() for peer in [first, *others]], [peer.end() for peer in decodes]
    finally:
        for peer in started:
            peer.__exit__()
