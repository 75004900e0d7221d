"""A daemon in a process of its own, to be killed: `python -m tests.node.victim ROLE '{"port": 0}'`.

It says `ready PORT` (prefill: of the rendezvous; decode: of the data plane), obeys one command a line, and reports each
step of its request on a line of its own:

    prefill ROOM SEED         hold / go               stop the engine, let it go on
    decode ROOM SEED PORT
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

from pdplane.api import DecodeRequest, PrefillRequest
from pdplane.ids import Endpoint, Room
from pdplane.node.decode import DecodeNode
from pdplane.node.prefill import PrefillNode
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.toy.engine import ToyDecodeEngine, ToyPrefillEngine
from tests.node.conftest import SHORT, prompt
from tests.waiting import ALERT, until

LENGTH = 30


def tell(*words: object) -> None:
    print(*words, flush=True)  # noqa: T201  (this is its output)


def run_prefill(hold: threading.Event, port: int) -> None:
    node = PrefillNode(ToyPrefillEngine(hold=hold), PrefillConfig(**SHORT | ALERT, bootstrap_port=port))
    node.start()
    until(lambda: node.ready)
    tell("ready", node.info()["bootstrap_port"])
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "prefill":
            room, seed = map(int, numbers)
            leg = node.prefill(PrefillRequest(Room(room), prompt(seed, LENGTH)))
            leg.room.window.add_done_callback(lambda _: tell("windowed"))
            leg.done.add_done_callback(lambda done: tell("ended", done.exception() or "well"))
        else:
            (hold.set if command == "go" else hold.clear)()


def run_decode(hold: threading.Event, port: int) -> None:
    node = DecodeNode(ToyDecodeEngine(hold=hold), DecodeConfig(**SHORT | ALERT, data_port=port))
    node.start()
    tell("ready", Endpoint.parse(node.info()["data"]).port)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "decode":
            room, seed, bootstrap = map(int, numbers)
            request = DecodeRequest(Room(room), prompt(seed, LENGTH), Endpoint("127.0.0.1", bootstrap), 5)
            leg = node.decode(request, lambda token: tell("token", token.id))
            leg.done.add_done_callback(lambda done: tell("ended", done.exception() or "well"))
        else:
            (hold.set if command == "go" else hold.clear)()


def main(role: str, settings: dict[str, Any]) -> None:
    hold = threading.Event()
    hold.set()
    (run_prefill if role == "prefill" else run_decode)(hold, int(settings.get("port", 0)))


class Victim:
    """The test's end of it; `with` kills it without a warning."""

    def __init__(self, role: str, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.node.victim", role, json.dumps({"port": port})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            text=True,
        )
        self.port = int(self.hear("ready")[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def rendezvous(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)

    def say(self, *words: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def hear(self, word: str) -> list[str]:
        """The rest of the next line that begins with the word."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            first, *rest = line.split()
            if first == word:
                return rest
        raise AssertionError(f"the victim ended before it said {word!r}")

    def stop(self) -> None:
        """SIGSTOP: nothing is closed, and nothing is said."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT, after which it does what it was doing."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no word to anybody, sockets closed by the kernel."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
