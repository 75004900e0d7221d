"""`pdplane expert-worker`: the daemon that holds experts of a MoE model and runs them for coordinators (TX1)."""

from __future__ import annotations

import argparse

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.worker_life import add_worker_flags, run_worker
from pdplane.options import count, duration, endpoint, size
from pdplane.workers.experts.tx1 import Tx1Limits, Tx1Token


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--model", required=True, help="a MoE model directory, hub id or tiny:FAMILY")
    parser.add_argument("--listen", type=endpoint, required=True, metavar="HOST:PORT", help="port 0: a free one")
    parser.add_argument(
        "--token-file", required=True, metavar="FILE", help="what coordinators must know; mode 600, 16 bytes or more"
    )
    parser.add_argument("--allow", metavar="CIDR,...", default="", help="only these addresses or ranges")
    parser.add_argument("--capacity", type=count, metavar="N", help="experts a layer in memory (all)")
    parser.add_argument("--seed", type=int, default=0, help="of the tiny random models")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-payload", type=size, default=256 << 20, metavar="SIZE", help="of one frame (256MiB)")
    limits.add_argument("--max-connections", type=count, default=32, metavar="N", help="at once (32)")
    limits.add_argument("--handshake-timeout", type=duration, default=5.0, metavar="TIME", help="in all (5s)")
    limits.add_argument("--stall-timeout", type=duration, default=30.0, metavar="TIME", help="inside a frame (30s)")
    limits.add_argument("--idle-timeout", type=duration, default=600.0, metavar="TIME", help="between requests (600s)")
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the worker; gives the exit code. Raises ConfigError."""
    token = Tx1Token.from_file(args.token_file)
    with mlx_needed():
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
