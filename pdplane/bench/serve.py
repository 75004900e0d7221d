"""`pdplane bench serve`: mlx_lm.server beside pdplane, asked by the same clients in turns.

Both have the same cores: mlx_lm.server all of them, prefill and decode half of them each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pdplane.bench.serve_client import (
    Load,
    Measure,
    Numbers,
    Speaker,
    disturbed,
    goodput,
    idle,
    queued,
    second_turn,
    streams,
)
from pdplane.bench.serve_processes import running_mlx_lm, running_pdplane
from pdplane.bench.tables import print_table
from pdplane.engine.blas import AUTO, WHEEL
from pdplane.errors import ConfigError
from pdplane.options import count, duration, url

_PERCENTILES = (50, 90, 99)
_SEEDS_A_MEASUREMENT = 1000
_SUBJECTS = ("idle", "queued", "second-turn", "streams", "loud", "goodput")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what is asked of whom, and how to show it."""
    parser.add_argument("--model", default="smollm2-f32", help="model, named as for the daemons (default: %(default)s)")
    parser.add_argument(
        "--url", type=url, nargs="+", default=[], metavar="URL", help="other OpenAI servers to ask too (default: none)"
    )
    parser.add_argument(
        "--yardstick-blas", choices=(AUTO, WHEEL), default=AUTO,
        help="BLAS of mlx_lm.server: the one that pdplane uses, or the one in mlx's wheel (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--measure", nargs="+", choices=_SUBJECTS, default=_SUBJECTS, help="what to measure (default: everything)"
    )
    numbers = {
        "--prompt-tokens": (450, "about how long a long prompt is"),
        "--short-tokens": (20, "about how long a short prompt is"),
        "--tokens": (32, "length of an answer"),
        "--requests": (12, "requests of the goodput, a quarter of them long"),
        "--rounds": (3, "rounds"),
    }
    for flag, (default, text) in numbers.items():
        parser.add_argument(flag, type=count, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument(
        "--streams", nargs="+", type=count, default=[1, 4, 8], metavar="N", help="streams at once (default: 1 4 8)"
    )
    parser.add_argument(
        "--loud-streams", nargs="+", type=count, default=[1, 8], metavar="N",
        help="streams that run while three long prompts arrive (default: 1 8)",
    )  # fmt: skip
    times = {
        "--apart": ("2s", "time between two long prompts"),
        "--bound-first": ("2s", "longest time to the first token that counts as good"),
        "--bound-gap": ("500ms", "longest wait between two tokens that counts as good"),
    }
    for flag, (limit, text) in times.items():
        parser.add_argument(flag, type=duration, default=limit, metavar="TIME", help=f"{text} (default: {limit})")
    parser.add_argument("--rate", type=float, default=0.5, metavar="N", help="requests a second (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--plot", metavar="FILE.png", help="file for a drawing; needs the extra plot (default: none)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises ConfigError."""
    if args.rate <= 0:
        raise ConfigError("--rate must be above zero")
    draw = _plotter() if args.plot else None
    before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(running_pdplane(args.model, AUTO))
        theirs, blas = stack.enter_context(running_mlx_lm(args.model, args.yardstick_blas))
        found = asyncio.run(
            _measure(args, [("mlx_lm.server", theirs), ("pdplane", ours), *((each, each) for each in args.url)])
        )
    results = {
        "model": args.model, "rounds": args.rounds, "prompt_tokens": args.prompt_tokens, "yardstick_blas": blas,
        "cpus": os.cpu_count(), "load_average": {"before": before, "after": os.getloadavg()[0]},
        "measurements": {name: {who: _numbers(one) for who, one in each.items()} for name, each in found.items()},
    }  # fmt: skip
    if args.json:
        print(json.dumps(results))
    else:
        _print(results)
    if draw is not None:
        draw(results, Path(args.plot))
    return 0


def _measurements(args: argparse.Namespace) -> dict[str, Measure]:
    every: dict[str, list[tuple[str, Measure]]] = {
        "idle": [("idle", idle)],
        "queued": [("queued", queued)],
        "second-turn": [("second turn", second_turn)],
        "streams": [(f"{number} quiet", streams(number)) for number in args.streams],
        "loud": [(f"{number} loud", disturbed(number)) for number in args.loud_streams],
        "goodput": [("goodput", goodput)],
    }
    return dict(one for subject in _SUBJECTS if subject in args.measure for one in every[subject])


async def _measure(args: argparse.Namespace, servers: Sequence[tuple[str, str]]) -> dict[str, dict[str, list[Numbers]]]:
    """Return what each round found, by measurement and server."""
    load = Load(
        args.prompt_tokens, args.short_tokens, args.tokens, args.apart, args.requests, args.rate,
        args.bound_first, args.bound_gap,
    )  # fmt: skip
    measurements = _measurements(args)
    speakers = [Speaker(name, where) for name, where in servers]
    found: dict[str, dict[str, list[Numbers]]] = {name: {each.name: [] for each in speakers} for name in measurements}
    try:
        for speaker in speakers:
            await speaker.open(named=speaker.name != "mlx_lm.server")
        for number in range(args.rounds):
            for place, (name, measure) in enumerate(measurements.items()):
                if not args.json:
                    print(f"measuring: round {number + 1} of {args.rounds}, {name}", file=sys.stderr)
                seed = (number * len(measurements) + place) * _SEEDS_A_MEASUREMENT
                for speaker in speakers if number % 2 == 0 else reversed(speakers):
                    found[name][speaker.name].append(await measure(speaker, load, seed))
    finally:
        for speaker in speakers:
            await speaker.close()
    return found


def _numbers(rounds: Sequence[Numbers]) -> dict[str, float]:
    """Return the medians of the rounds; of the gaps percentiles over all rounds, in milliseconds."""
    numbers = {}
    for name in rounds[0]:
        if name == "gap_s":
            gaps = [gap for one in rounds for gap in one[name]]
            for share in _PERCENTILES if gaps else ():
                numbers[f"gap_p{share}_ms"] = float(np.percentile(gaps, share)) * 1e3
        else:
            numbers[name] = float(median(value for one in rounds for value in one[name]))
    return numbers


def _print(results: Mapping[str, Any]) -> None:
    load = results["load_average"]
    print(
        f"{results['model']}; medians of {results['rounds']} rounds; {results['cpus']} processors; "
        f"BLAS of mlx_lm.server: {results['yardstick_blas']}; "
        f"load average {load['before']:.1f} before and {load['after']:.1f} after"
    )
    for name, found in results["measurements"].items():
        names = list(dict.fromkeys(key for numbers in found.values() for key in numbers))
        rows = [[who, *(numbers.get(key) for key in names)] for who, numbers in found.items()]
        print_table(name, ["", *names], rows)


def _plotter() -> Any:  # noqa: ANN401 - a function of a module that may be missing
    try:
        from pdplane.bench.serve_plot import draw
    except ImportError:
        raise ConfigError("--plot needs `pip install 'pdplane[plot]'`") from None
    return draw
