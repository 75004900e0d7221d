"""`pdplane bench transport`: pushes of scattered blocks between two processes, on every way.

Everything is measured round by round in one run, so that the ratios mean something on a busy machine: each
round moves the same bytes once by each contender. A push is timed from its submission to its acknowledgement.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from pdplane.bench.measure import Measurement, Plan
from pdplane.bench.tables import print_tables
from pdplane.errors import ConfigError
from pdplane.options import count, size
from pdplane.transport.framing import XXH3

WAYS = ("tcp", "unix", "pull")
TLS = "tls"
PEERS = ("mooncake", "zmq", "raw", "tuned", "memcpy")
ARRANGEMENTS = ("permuted", "sparse", "adjacent")
BLOCKS = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: what to measure and how to show it."""
    what = parser.add_argument_group("what")
    what.add_argument(
        "--transport",
        nargs="+",
        choices=(*WAYS, TLS),
        default=list(WAYS),
        metavar="NAME",
        help=f"ways to measure, {TLS} with the files of --tls (default: {' '.join(WAYS)})",
    )
    what.add_argument(
        "--peer",
        nargs="*",
        choices=PEERS,
        default=["raw", "memcpy"],
        metavar="NAME",
        help=f"others to compare with, of {', '.join(PEERS)} (default: raw memcpy)",
    )
    what.add_argument(
        "--block",
        nargs="+",
        type=size,
        default=list(BLOCKS),
        metavar="SIZE",
        help="block sizes (default: 4KiB 16KiB 64KiB 256KiB 1MiB)",
    )
    what.add_argument(
        "--arrangement",
        nargs="+",
        choices=ARRANGEMENTS,
        default=["permuted", "adjacent"],
        metavar="NAME",
        help="order of the blocks: permuted, at random; sparse, every second one; adjacent, in order "
        "(default: permuted adjacent)",
    )
    what.add_argument(
        "--bytes", type=size, default="64MiB", metavar="SIZE", help="bytes of one push (default: %(default)s)"
    )
    what.add_argument(
        "--rounds",
        type=count,
        default=7,
        metavar="N",
        help="rounds, of which the median is taken (default: %(default)s)",
    )
    what.add_argument(
        "--latency-pushes",
        type=count,
        default=200,
        metavar="N",
        help="pushes of 64KiB whose latency is taken (default: %(default)s)",
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--arena",
        choices=("numpy", "mlx"),
        default="numpy",
        help="library in whose memory the bytes land (default: %(default)s)",
    )
    where.add_argument(
        "--decode", action="store_true", help="measure again while the receiver decodes with a tiny MLX model"
    )
    where.add_argument("--spin", action="store_true", help="measure again while a Python thread spins in the receiver")
    how = parser.add_argument_group("how")
    how.add_argument(
        "--streams",
        type=count,
        default=1,
        metavar="N",
        help="connections over which large pushes are striped (default: %(default)s)",
    )
    how.add_argument(
        "--socket-buffer", type=size, metavar="SIZE", help="buffer of each data socket (default: the daemons')"
    )
    how.add_argument("--segment-bytes", type=size, metavar="SIZE", help="largest segment (default: the daemons')")
    how.add_argument("--checksum", choices=[XXH3], help="checksum of each segment (default: none)")
    how.add_argument("--tls", nargs=3, metavar=("CERT", "KEY", "CA"), help=f"files for the way {TLS} (default: none)")
    show = parser.add_argument_group("show")
    show.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    show.add_argument("--plot", metavar="FILE.png", help="file for a drawing; needs the extra plot (default: none)")


def run(args: argparse.Namespace) -> int:
    """Measure and print; return the exit code. Raises ConfigError."""
    draw = _plotter() if args.plot else None
    plan = _plan(args)
    conditions = ["quiet", *(["decode"] if args.decode else []), *(["spin"] if args.spin else [])]
    before = os.getloadavg()[0]
    results: dict[str, Any] = {
        "nbytes": plan.nbytes,
        "rounds": plan.rounds,
        "cpus": os.cpu_count(),
        "arena": args.arena,
        "options": plan.transport,
        "conditions": {},
    }
    for condition in conditions:
        if not args.json:
            print(f"measuring: {condition}", file=sys.stderr)
        with Measurement(plan, condition) as measurement:
            results["conditions"][condition] = measurement.run()
    results["load_average"] = {"before": before, "after": os.getloadavg()[0]}
    if args.json:
        print(json.dumps(results))
    else:
        print_tables(results)
    if draw is not None:
        draw(results, Path(args.plot))
    return 0


def _plan(args: argparse.Namespace) -> Plan:
    for block in args.block:
        if args.bytes % block:
            raise ConfigError(f"--bytes {args.bytes} is no multiple of the block of {block}")
    transport: dict[str, Any] = {"streams": args.streams, "socket_buffer_bytes": args.socket_buffer}
    transport |= {"segment_bytes": args.segment_bytes} if args.segment_bytes else {}
    transport |= {"checksum": args.checksum} if args.checksum else {}
    if (TLS in args.transport) != (args.tls is not None):
        raise ConfigError(f"--transport {TLS} and --tls CERT KEY CA belong together")
    return Plan(
        names=(*args.transport, *args.peer),
        blocks=tuple(args.block),
        arrangements=tuple(args.arrangement),
        nbytes=args.bytes,
        rounds=args.rounds,
        latency_pushes=args.latency_pushes,
        mlx_arena=args.arena == "mlx",
        transport=transport,
        tls=None if args.tls is None else tuple(args.tls),
    )


def _plotter() -> Any:  # noqa: ANN401 - a function of a module that may be missing
    try:
        from pdplane.bench.plots import draw_transport as draw
    except ImportError:
        raise ConfigError("--plot needs `pip install 'pdplane[plot]'`") from None
    return draw
