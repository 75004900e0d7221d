"""`pdplane bench overlap`: what of the transfer is left when prefill is done, with and without layerwise streaming.

Both kinds of prefill compute the same prompt in turns and send its cache over one simulated link of a known rate. The
rate is such that the whole transfer takes as long as prefill itself, unless `--rate` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rich import box
from rich.console import Console
from rich.table import Table

from pdplane.engine.options import KV_BITS, EngineOptions
from pdplane.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to compute, and how fast the link is."""
    parser.add_argument(
        "--model", default="tiny:llama@24", help="model, named as for the daemons (default: %(default)s)"
    )
    numbers = {
        "--prompt-tokens": (512, "length of the prompt"),
        "--rounds": (5, "prompts of each kind, in turns"),
        "--prefill-step-size": (2048, "tokens of one prompt chunk"),
        "--block-tokens": (16, "tokens of one cache block"),
        "--arena-mib": (256, "size of each cache in MiB"),
        "--layerwise-interval": (1, "layers that are sent together"),
    }
    for flag, (default, text) in numbers.items():
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--kv-bits", type=int, choices=KV_BITS, help="bits to which the KV cache is quantised (default: not quantised)"
    )
    parser.add_argument("--rate", type=float, metavar="MB/S", help="rate of the link (default: as slow as prefill)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises ConfigError."""
    if min(args.prompt_tokens, args.rounds, args.layerwise_interval) < 1 or (args.rate is not None and args.rate <= 0):
        raise ConfigError("the prompt, the rounds, the interval and the rate must be above zero")
    options = EngineOptions(
        args.model,
        prefill_step_size=args.prefill_step_size,
        block_tokens=args.block_tokens,
        arena_bytes=args.arena_mib << 20,
        kv_bits=args.kv_bits,
        layerwise_interval=args.layerwise_interval,
    )
    report = measure(options, args.prompt_tokens, args.rounds, None if args.rate is None else args.rate * 1e6)
    if args.json:
        print(json.dumps({"model": args.model, "prompt_tokens": args.prompt_tokens, **report}))
    else:
        _print(report)
    return 0


def measure(options: EngineOptions, prompt_tokens: int, rounds: int, rate: float | None) -> dict[str, Any]:
    """Return `summarise` of so many rounds; `rate` is the link's in bytes a second. Raises ConfigError."""
    try:
        from pdplane.bench.overlap_pair import Once, open_daemons, random_prompt
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("mlx", "mlx_lm"):
            raise
        raise ConfigError("this measures a real engine, which needs MLX: pip install 'pdplane[mlx]'") from error
    found: dict[bool, list[Once]] = {False: [], True: []}
    with open_daemons(options) as daemons:
        vocab_size = int(daemons.decode.info()["vocab_size"])
        prompts = [random_prompt(prompt_tokens, vocab_size, seed) for seed in range(rounds + 1)]
        # To touch memory and load code, with no limit yet.
        _, first = [daemons.run(prompts[-1], layerwise=layerwise) for layerwise in (True, False)]
        rate = daemons.bucket.bytes_per_s = rate or first.nbytes / (first.prefill_ms / 1e3)
        for number, prompt in enumerate(prompts[:-1]):
            for layerwise in (False, True) if number % 2 else (True, False):
                found[layerwise].append(daemons.run(prompt, layerwise=layerwise))
    return summarise(found, rate)


def summarise(found: Mapping[bool, Sequence[Any]], rate: float) -> dict[str, Any]:
    """Return the medians of both kinds, and what follows from them.

    `hidden` is the part of the link's time that prefill covered, of what it could cover: the shorter of the link's time
    and prefill's own. `tap_cost` is the time that layerwise adds to prefill, in the same round.
    """
    nbytes = found[True][0].nbytes
    transfer_ms = nbytes / rate * 1e3
    medians = {
        name: {
            key: statistics.median(attrs.asdict(once)[key] for once in found[layerwise])
            for key in ("prefill_ms", "exposed_ms", "assembly_ms")
        }
        for layerwise, name in ((False, "whole"), (True, "layerwise"))
    }
    hidden = [(transfer_ms - ours.exposed_ms) / min(transfer_ms, ours.prefill_ms) for ours in found[True]]
    ratios = [ours.prefill_ms / plain.prefill_ms for ours, plain in zip(found[True], found[False], strict=True)]
    return {
        "rounds": len(ratios),
        "nbytes": nbytes,
        "rate_bytes_per_s": rate,
        "transfer_ms": transfer_ms,
        **medians,
        "hidden": statistics.median(hidden),
        "tap_cost": statistics.median(ratios) - 1,
    }


def _print(report: Mapping[str, Any]) -> None:
    table = Table(
        title=f"{report['nbytes'] / 1e6:.1f} MB over a link of {report['rate_bytes_per_s'] / 1e6:.1f} MB/s: "
        f"{report['transfer_ms']:.0f} ms; medians of {report['rounds']} rounds",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("ms", "prefill", "left to transfer", "left to assemble"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, words in (("whole", "all layers at the end"), ("layerwise", "layer by layer")):
        line = report[name]
        table.add_row(words, *(f"{line[key]:.1f}" for key in ("prefill_ms", "exposed_ms", "assembly_ms")))
    console = Console()
    console.print(table)
    console.print(f"hidden behind prefill: {report['hidden']:.1%}   added to prefill: {report['tap_cost']:+.1%}")
