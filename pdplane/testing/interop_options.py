"""The interop peer's command line, as a value."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import attrs

from pdplane.errors import ConfigError
from pdplane.ids import MAX_ROOM, Endpoint, Room
from pdplane.kv.layout import Layout
from pdplane.testing.bench_layouts import LAYOUTS, bench_layout
from pdplane.wire import decode_layout

ROLES = ("prefill", "decode", "bootstrap")
CHANNELS = ("legacy", "native")
OUTCOMES = ("success", "failed", "timeout")


@attrs.frozen(kw_only=True)
class InteropOptions:
    """One rank of one side."""

    role: str
    host: str
    protocol: str
    transport: str
    channel: str
    bootstrap_port: int
    serve_bootstrap: bool
    bootstrap: Endpoint | None
    wait_bootstrap: float
    layout: str
    layout_file: str | None
    arena_blocks: int
    tp_size: int
    tp_rank: int
    dp_size: int
    dp_rank: int
    reduce_port: int
    rooms: tuple[Room, ...]
    prompt_len: int
    prefix_len: int
    token: int
    spec: tuple[int, ...]
    layerwise_interval: int
    target_layers: int
    chunk: int
    chunk_start: int
    abort: int
    expect: str
    timeout: float
    linger: float
    log_level: str

    @property
    def rendezvous(self) -> Endpoint:
        """Where a decode looks for prefill, and where a prefill registers."""
        return self.bootstrap or Endpoint(self.host, self.bootstrap_port)

    @property
    def reduce_at(self) -> Endpoint:
        """Where the ranks of one side meet; port 0 means that they do not."""
        return Endpoint(self.host, self.reduce_port)

    def make_layout(self) -> Layout:
        """This rank's layout; raises ConfigError or WireError."""
        if self.layout_file is None:
            return bench_layout(self.layout, self.tp_size, self.arena_blocks)
        try:
            return decode_layout(json.dumps(json.loads(Path(self.layout_file).read_text())).encode())
        except (OSError, ValueError) as wrong:
            raise ConfigError(f"--layout-file {self.layout_file}: {wrong}") from wrong


def parse(words: Sequence[str]) -> InteropOptions:
    """The options; a wrong one ends in SystemExit 2. Raises ConfigError for options that do not fit together."""
    values = vars(_parser().parse_args(words))
    options = InteropOptions(**values)
    if not 0 <= options.tp_rank < options.tp_size:
        raise ConfigError(f"--tp-rank {options.tp_rank} is outside 0..{options.tp_size - 1}")
    if not 0 <= options.dp_rank < options.dp_size:
        raise ConfigError(f"--dp-rank {options.dp_rank} is outside 0..{options.dp_size - 1}")
    if options.channel == "legacy" and options.transport != "mooncake":
        # Our own transports let a writer in by the life and the use of the room that native notices name.
        raise ConfigError(f"--transport {options.transport} needs --channel native; legacy peers write with mooncake")
    if options.log_level.upper() not in logging.getLevelNamesMapping():
        raise ConfigError(f"--log-level {options.log_level} is none of {', '.join(logging.getLevelNamesMapping())}")
    if not 0 <= options.prefix_len < options.prompt_len:
        raise ConfigError(f"--prefix-len {options.prefix_len} is outside 0..{options.prompt_len - 1}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdplane.testing.interop_peer",
        description="One rank of one side, with synthetic pages and no model; events as JSON lines on stdout.",
    )
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--protocol", default="tcp", help="Mooncake's: tcp or rdma")
    parser.add_argument("--transport", default="mooncake", help="mooncake, or one of our own: auto, tcp, unix, pull")
    parser.add_argument("--channel", choices=CHANNELS, default="legacy")
    parser.add_argument("--bootstrap-port", type=int, default=18998)
    parser.add_argument("--serve-bootstrap", action="store_true", help="prefill: run the rendezvous too")
    parser.add_argument("--bootstrap", type=Endpoint.parse, metavar="HOST:PORT")
    parser.add_argument("--wait-bootstrap", type=float, default=20.0, metavar="S")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="full_attention")
    parser.add_argument("--layout-file", metavar="JSON")
    parser.add_argument("--arena-blocks", type=int, default=63, metavar="N")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--dp-size", type=int, default=1)
    parser.add_argument("--dp-rank", type=int, default=0)
    parser.add_argument("--reduce-port", type=int, default=0, help="the ranks of one side agree on each poll here")
    parser.add_argument("--rooms", type=_rooms, default=(Room(1),), metavar="N,N")
    parser.add_argument("--prompt-len", type=int, default=22)
    parser.add_argument("--prefix-len", type=int, default=0, help="decode: tokens that it holds already")
    parser.add_argument("--token", type=int, default=1234, help="prefill: the first token")
    parser.add_argument("--spec", type=_integers, default=(), metavar="N,N", help="prefill: speculative candidates")
    parser.add_argument("--layerwise-interval", type=int, default=0, metavar="N", help="0: everything at once")
    parser.add_argument("--target-layers", type=int, default=0, metavar="N", help="0: all")
    parser.add_argument("--chunk", type=int, default=0, metavar="N", help="0: the whole prompt")
    parser.add_argument("--chunk-start", type=int, default=0, metavar="N")
    parser.add_argument("--abort", type=int, default=-1, metavar="ROOM", help="prefill: give this room up")
    parser.add_argument("--expect", choices=OUTCOMES, default="success")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S")
    parser.add_argument("--linger", type=float, default=0.3, metavar="S")
    parser.add_argument("--log-level", default="ERROR")
    return parser


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word.strip())


def _rooms(text: str) -> tuple[Room, ...]:
    rooms = _integers(text)
    if not rooms or not all(0 <= room <= MAX_ROOM for room in rooms) or len(set(rooms)) < len(rooms):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different rooms")
    return tuple(Room(room) for room in rooms)
