"""`pdplane bench experts`: a MoE model with its experts here, on one worker and on two, on loopback.

The workers are processes of their own. Besides the token rate it shows the bytes and the time of a token: in the
worker's arithmetic, on the wire and in its framing, and in everything else, which is the local part of the model.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from pdplane.bench.tables import print_table
from pdplane.bench.worker_process import worker_processes
from pdplane.engine.options import EngineOptions
from pdplane.errors import InternalError
from pdplane.workers.experts.tx1 import Tx1Token

if TYPE_CHECKING:
    from pdplane.workers.cache.prefix import PrefixEngine
    from pdplane.workers.experts.remote import RemoteExperts


@attrs.frozen
class ExpertCase:
    """One way to run; rates in tokens a second, times in ms a token of the decoding."""

    name: str
    prefill_tokens_s: float
    decode_tokens_s: float
    bytes_out: float
    bytes_in: float
    send_ms: float
    worker_ms: float
    wire_ms: float
    rest_ms: float
    tokens: tuple[int, ...] = attrs.field(repr=False)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to measure."""
    parser.add_argument(
        "--model", default="tiny:qwen3_moe-q4", help="the MoE model: a directory or hub id (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=256, metavar="N", help="tokens of the prompt (default: %(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="tokens to generate (default: %(default)s)"
    )
    parser.add_argument("--capacity", type=int, metavar="N", help="experts a layer in a worker's memory (default: all)")
    parser.add_argument(
        "--rounds", type=int, default=2, metavar="N", help="rounds, of which the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the figures (default: none)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises ConfigError, SessionLost, and InternalError for other tokens."""
    found = [_measure(args, "local", None)]
    with _token_file() as file:
        command = ["expert-worker", "--model", args.model, "--listen", "127.0.0.1:0", "--token-file", str(file)]
        command += ["--blas", args.blas]
        if args.capacity:
            command += ["--capacity", str(args.capacity)]
        with worker_processes(command, command) as workers:
            for count in (1, 2):
                from pdplane.workers.experts.remote import RemoteExperts

                experts = RemoteExperts(workers[:count], Tx1Token.from_file(file))
                try:
                    found.append(_measure(args, f"{count} worker{'s' * (count > 1)}", experts))
                finally:
                    experts.close()
    for case in found[1:]:
        if case.tokens != found[0].tokens:
            raise InternalError(f"{case.name} gives other tokens than the local model")
    _print(args, found)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"model": args.model, "cases": list(map(attrs.asdict, found))}, indent=1) + "\n"
        )
    return 0


def _measure(args: argparse.Namespace, name: str, experts: RemoteExperts | None) -> ExpertCase:
    from pdplane.workers.cache.prefix import PrefixEngine

    prompt = [(7 * number) % 300 + 2 for number in range(args.prompt_tokens)]
    prepare = None if experts is None else experts.attach
    with PrefixEngine(EngineOptions(args.model), prepare) as engine:
        runs = [_round(engine, experts, prompt, args.max_tokens, name) for _ in range(args.rounds)]
    return max(runs, key=lambda case: case.decode_tokens_s)


def _round(
    engine: PrefixEngine, experts: RemoteExperts | None, prompt: list[int], max_tokens: int, name: str
) -> ExpertCase:
    marks: list[_Mark] = []

    def on_token(_token: int) -> None:
        if not marks:
            marks.append(_Mark.of(experts))

    done = engine.run(prompt, max_tokens, on_token).result()
    spent = _Mark.of(experts) - marks[0]
    # When the first token is reported, the step after it has run already, and none runs after the last one.
    count = max(len(done.tokens) - 2, 1)
    # Time that was waited and the worker did not compute went to the wire, the framing and the worker's queue.
    wire_ms = max(spent.wait_ms - spent.worker_ms, 0.0)
    send_ms, worker_ms, wire_ms = spent.send_ms / count, spent.worker_ms / count, wire_ms / count
    rest_ms = done.decode_ms / count - send_ms - worker_ms - wire_ms
    return ExpertCase(
        name, len(prompt) / done.ttft_ms * 1000, count / done.decode_ms * 1000, spent.sent / count,
        spent.received / count, send_ms, worker_ms, wire_ms, rest_ms, done.tokens,
    )  # fmt: skip


@attrs.frozen
class _Mark:
    """The traffic of all workers until a moment."""

    sent: int = 0
    received: int = 0
    send_ms: float = 0.0
    wait_ms: float = 0.0
    worker_ms: float = 0.0

    @classmethod
    def of(cls, experts: RemoteExperts | None) -> _Mark:
        found = [] if experts is None else list(experts.statistics().workers.values())
        return cls(
            sum(one.bytes_sent for one in found), sum(one.bytes_received for one in found),
            sum(one.send_ms for one in found), sum(one.wait_ms for one in found),
            max((one.worker_ms for one in found), default=0.0),
        )  # fmt: skip

    def __sub__(self, other: _Mark) -> _Mark:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return _Mark(*(mine - before for mine, before in pairs))


@contextmanager
def _token_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "token"
        file.touch(0o600)
        file.write_text(secrets.token_hex(32))
        yield file


def _print(args: argparse.Namespace, found: list[ExpertCase]) -> None:
    print(
        f"{args.model}: {args.prompt_tokens} prompt tokens, {len(found[0].tokens)} generated; the same tokens each way"
    )
    print_table(
        "tokens/s; bytes and ms a generated token (of two workers, the slower one's arithmetic)",
        ("experts", "prefill/s", "decode/s", "bytes out", "bytes in", "send", "worker", "wire", "rest"),
        [
            (c.name, c.prefill_tokens_s, c.decode_tokens_s, c.bytes_out, c.bytes_in, c.send_ms, c.worker_ms, c.wire_ms,
             c.rest_ms)
            for c in found
        ],
    )  # fmt: skip
