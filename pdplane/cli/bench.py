"""`pdplane bench SUBJECT`: measurements, one module a subject.

A subject's module has `add_arguments(parser)` and `run(args) -> exit code`, as a command's has.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

from pdplane.cli.flags import add_blas_flag
from pdplane.engine.blas import use_blas

SUBJECTS: Mapping[str, tuple[str, str]] = {
    "transport": ("pdplane.bench.transport", "how fast blocks move between two processes, on every way"),
    "control": ("pdplane.bench.control", "what a small room costs: latency, rooms a second, processor time"),
    "soak": ("pdplane.bench.soak", "random load, cancels, stops and kills between four processes: bytes, leaks, waits"),
    "serve": (
        "pdplane.bench.serve",
        "mlx_lm.server beside pdplane, asked alike: waits, rates, first tokens",
    ),
    "overlap": ("pdplane.bench.overlap", "what of the transfer is left when prefill is done, layer by layer or not"),
    "cache": ("pdplane.bench.cache", "hand a prefix's cache to a worker, or its tokens: bytes, stages, codecs"),
    "experts": ("pdplane.bench.experts", "a MoE model with its experts here, on one worker and on two"),
}
_COMPUTING = ("overlap", "cache", "experts")
"""Subjects whose model runs in this process, and in workers that are given the same `--blas`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand a subject, each with its own flags."""
    subjects = parser.add_subparsers(metavar="SUBJECT", required=True)
    for name, (module, text) in SUBJECTS.items():
        subject = subjects.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        importlib.import_module(module).add_arguments(subject)
        if name in _COMPUTING:
            add_blas_flag(subject)
        subject.set_defaults(subject=module)


def run(args: argparse.Namespace) -> int:
    """Run the subject's measurement; return the exit code. Raises ConfigError."""
    if "blas" in args:
        use_blas(args.blas)
    return int(importlib.import_module(args.subject).run(args))
