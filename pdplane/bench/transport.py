"""`pdplane bench transport`: pushes of scattered blocks between two processes, on every way."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to measure."""
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace) -> int:
    """Measure and print; gives the exit code."""
    print(args.rounds)
    return 0
