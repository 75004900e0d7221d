"""`pdplane demo`: two daemons, one prompt, and the answer compared bit for bit with one mlx-lm process.

Everything runs in processes of its own on free loopback ports and ends with this one: the yardstick (which also gets
the model), the prefill daemon and the decode daemon. The answer is asked for as a gateway would ask.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import zip_longest
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from pdplane.cli.children import Child, ChildFailed, Children
from pdplane.cli.flags import TOY, add_blas_flag
from pdplane.cli.generate import Printer, Wanted, ask
from pdplane.cli.yardstick import Question
from pdplane.ids import Endpoint, new_room
from pdplane.kv.manifest import blocks_needed
from pdplane.options import count
from pdplane.wire import decode_layout

REAL, FALLBACK = "smollm2-f32", "tiny:llama"
PROMPT = "In two short sentences: what is the capital of France, and which river flows through it?"
_STEP_SIZE = 2048
_READY_S = 300.0  # a daemon that loads a large model from a slow disk
_ANSWER_S = 3600.0
_ROUTE = "/route?engine_rank=-1&target_dp_group=-1"
_TERMINATED = 128 + signal.SIGTERM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--model",
        default=REAL,
        help=f"model, named as for the daemons (default: %(default)s, or {FALLBACK} without it)",
    )
    parser.add_argument(
        "--prompt",
        default=PROMPT,
        help="question, put through the model's chat template if it has one (default: %(default)s)",
    )
    parser.add_argument(
        "--max-tokens", type=count, default=64, metavar="N", help="longest answer in tokens (default: %(default)s)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens, whatever the model says")
    add_blas_flag(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text and the table")


@attrs.frozen
class Demonstration:
    """The result. `identical` is whether ids and logprobs are those of one mlx-lm process, to the last bit.

    `bytes_pushed` were acknowledged by decode; `gib_per_s` is over the time in which some push was under way, from
    its submission to its acknowledgement.
    """

    model: str
    fallback: str | None
    blas: str
    prompt_tokens: int
    completion_tokens: int
    blocks: int
    bytes_pushed: int
    gib_per_s: float
    time_to_first_token_s: float
    decode_tokens_per_s: float | None
    identical: bool
    differs_at: int | None
    text: str


def run(args: argparse.Namespace) -> int:
    """Run the demo and print it; return 0 when the comparison holds. Raises ChildFailed and LegFailed."""
    with _sigterm_unwinds(), Children() as children:
        shown = _Demo(args, children).run()
    if args.json:
        print(json.dumps(attrs.asdict(shown)))
    else:
        Console(highlight=False).print(_table(shown))
    return 0 if shown.identical else 1


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Demo:
    """One run, from top to bottom."""

    def __init__(self, args: argparse.Namespace, children: Children) -> None:
        self._args, self._children = args, children
        self._notes = Console(stderr=True, highlight=False)
        self._model: str = args.model
        self._fallback: str | None = None

    def run(self) -> Demonstration:
        yardstick, tokens = self._get_model()
        self._notes.print(f"starting a prefill daemon and a decode daemon with {self._model}")
        daemons = {role: self._start_daemon(role) for role in ("prefill", "decode")}
        ready = {role: daemon.hear(_READY_S) for role, daemon in daemons.items()}
        self._notes.print(f"prompt of {len(tokens)} tokens: {self._args.prompt}\n")
        answer = self._ask(ready, tokens)
        self._notes.print(f"\ncomparing with one {_kind(self._model)} process")
        yardstick.nudge()
        expected = _heard(yardstick)
        layout = decode_layout(_get(ready["prefill"]["bootstrap"], _ROUTE)["cache_layout"].encode())
        blocks = sum(blocks_needed(layout, len(tokens)).values())
        traffic, info = (_get(ready["prefill"]["http"], path) for path in ("/statistics", "/server_info"))
        return self._sum_up(answer, expected, blocks, traffic["data"]["totals"], info.get("blas", "none"))

    def _get_model(self) -> tuple[Child, list[int]]:
        """Return the yardstick with its loaded model, the fallback if need be, and the prompt's tokens."""
        try:
            return self._load()
        except ChildFailed as failed:
            if self._model != REAL:
                raise
            self._fallback, self._model = failed.reason, FALLBACK
        self._notes.print(
            f"{REAL} is not available ({self._fallback}): running {FALLBACK}, a tiny random model, instead"
        )
        return self._load()

    def _load(self) -> tuple[Child, list[int]]:
        args = self._args
        question = Question(self._model, args.prompt, args.max_tokens, _STEP_SIZE, args.ignore_eos, args.blas)
        words = ["pdplane.cli.yardstick", json.dumps(attrs.asdict(question))]
        yardstick = self._children.start("yardstick", words)
        with Progress(console=self._notes, transient=True, disable=not self._notes.is_terminal) as progress:
            bars: dict[str, TaskID] = {}
            while "progress" in (said := _heard(yardstick)):
                what, done, total = said["progress"]
                if what not in bars:
                    bars[what] = progress.add_task(what, total=total or None)
                    if progress.disable:
                        self._notes.print(what)
                progress.update(bars[what], completed=done, total=total or None)
        return yardstick, said["tokens"]

    def _start_daemon(self, role: str) -> Child:
        words = ["pdplane.cli.main", role, "--model", self._model, "--exit-with-parent"]
        words += ["--blas", self._args.blas, "--prefill-step-size", str(_STEP_SIZE)]
        words += ["--port", "0", "--bootstrap-port", "0"]
        words += ["--arena-bytes", "128MiB", "--drain-timeout", "1s", "--log-level", "warning", "--exact"]
        return self._children.start(role, words)

    def _ask(self, ready: Mapping[str, Mapping[str, Any]], tokens: list[int]) -> dict[str, Any]:
        sampling = {"ignore_eos": self._args.ignore_eos}
        prompt = {"input_ids": tokens, "return_logprob": True, "sampling_params": sampling}
        prefill, decode = (f"http://{ready[role]['http']}" for role in ("prefill", "decode"))
        wanted = Wanted(prefill, decode, prompt, new_room(), self._args.max_tokens, _ANSWER_S)
        printer = Printer(silent=self._args.json)
        try:
            return asyncio.run(ask(wanted, printer))
        finally:
            printer.end()

    def _sum_up(
        self,
        answer: Mapping[str, Any],
        expected: Mapping[str, Any],
        blocks: int,
        traffic: Mapping[str, float],
        blas: str,
    ) -> Demonstration:
        ids, meta = answer["output_ids"], answer["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        ours = list(zip(ids, logprobs, strict=True))
        theirs = list(zip(expected["ids"], expected["logprobs"], strict=True))
        differs_at = next((at for at, (one, other) in enumerate(zip_longest(ours, theirs)) if one != other), None)
        timings = meta["pdplane"]
        return Demonstration(
            model=self._model,
            fallback=self._fallback,
            blas=blas,
            prompt_tokens=meta["prompt_tokens"],
            completion_tokens=len(ids),
            blocks=blocks,
            bytes_pushed=int(traffic["pushed_bytes"]),
            gib_per_s=traffic["pushed_bytes"] / 2**30 / max(traffic["push_seconds"], 1e-9),
            time_to_first_token_s=timings["first_token_ms"] / 1e3,
            decode_tokens_per_s=(len(ids) - 1) / (timings["decode_ms"] / 1e3) if len(ids) > 1 else None,
            identical=differs_at is None,
            differs_at=differs_at,
            text=answer["text"],
        )


def _kind(model: str) -> str:
    return model if model == TOY else "mlx-lm"


def _heard(yardstick: Child) -> dict[str, Any]:
    said = yardstick.hear()
    if "error" in said:
        raise ChildFailed(yardstick.name, said["error"])
    return said


def _get(address: str, path: str) -> dict[str, Any]:
    endpoint = Endpoint.parse(address)
    with closing(http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=10)) as connection:
        connection.request("GET", path)
        answer: dict[str, Any] = json.load(connection.getresponse())
        return answer


def _table(shown: Demonstration) -> Table:
    rate = "-" if shown.decode_tokens_per_s is None else f"{shown.decode_tokens_per_s:.1f}"
    verdict = "yes" if shown.identical else f"NO, from token {shown.differs_at} on"
    table = Table("", shown.model, box=box.SIMPLE)
    for name, value in (
        ("BLAS", shown.blas),
        ("prompt tokens", str(shown.prompt_tokens)),
        ("blocks", str(shown.blocks)),
        ("bytes pushed", f"{shown.bytes_pushed:,}"),
        ("GiB/s", f"{shown.gib_per_s:.2f}"),
        ("time to first token", f"{shown.time_to_first_token_s:.2f} s"),
        ("decode tok/s", rate),
        (f"identical to one {_kind(shown.model)} process", verdict),
    ):
        table.add_row(name, value)
    return table
