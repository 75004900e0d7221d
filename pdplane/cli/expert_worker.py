"""`pdplane expert-worker`: the daemon that holds experts of a MoE model and runs them for coordinators (TX1)."""

from __future__ import annotations

import argparse

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.flags import add_blas_flag, add_seed_flag
from pdplane.cli.worker_life import add_worker_flags, run_worker
from pdplane.options import count, duration, endpoint, size
from pdplane.workers.experts.tx1 import Tx1Limits, Tx1Token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--model", required=True, help="the MoE model: a directory, hub id or tiny:FAMILY")
    parser.add_argument(
        "--listen",
        type=endpoint,
        required=True,
        metavar="HOST:PORT",
        help="address on which the worker listens; port 0 takes a free one",
    )
    parser.add_argument(
        "--token-file",
        required=True,
        metavar="FILE",
        help="file with the token that coordinators must know; mode 600, 16 bytes or more",
    )
    parser.add_argument(
        "--allow", metavar="CIDR,...", default="", help="addresses or ranges that may connect (default: all)"
    )
    parser.add_argument(
        "--capacity", type=count, metavar="N", help="experts a layer that are kept in memory (default: all)"
    )
    add_blas_flag(parser)
    add_seed_flag(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-payload",
        type=size,
        default="256MiB",
        metavar="SIZE",
        help="largest frame that is taken (default: %(default)s)",
    )
    limits.add_argument(
        "--max-connections",
        type=count,
        default=32,
        metavar="N",
        help="connections that are served at once (default: %(default)s)",
    )
    limits.add_argument(
        "--handshake-timeout",
        type=duration,
        default="5s",
        metavar="TIME",
        help="longest time for a handshake (default: %(default)s)",
    )
    limits.add_argument(
        "--stall-timeout",
        type=duration,
        default="30s",
        metavar="TIME",
        help="longest silence inside a frame (default: %(default)s)",
    )
    limits.add_argument(
        "--idle-timeout",
        type=duration,
        default="600s",
        metavar="TIME",
        help="longest rest between two requests (default: %(default)s)",
    )
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the worker; return the exit code. Raises ConfigError."""
    token = Tx1Token.from_file(args.token_file)
    with mlx_needed(args.blas):
        from pdplane.workers.experts.store import open_store
        from pdplane.workers.experts.worker import ExpertWorker, ExpertWorkerOptions
    from pdplane.workers.listener import parse_networks

    options = ExpertWorkerOptions(
        capacity=args.capacity,
        allow=parse_networks([text for text in args.allow.split(",") if text.strip()]),
        limits=Tx1Limits(payload_bytes=args.max_payload),
        max_connections=args.max_connections,
        handshake_s=args.handshake_timeout,
        stall_s=args.stall_timeout,
        idle_s=args.idle_timeout,
    )
    worker = ExpertWorker(args.listen, lambda: open_store(args.model, seed=args.seed), token, options)
    return run_worker("expert-worker", worker, args, lambda: args.model)
