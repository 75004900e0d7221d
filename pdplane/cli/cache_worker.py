"""`pdplane cache-worker`: the daemon that hands out and takes in the caches of prefixes (WP30)."""

from __future__ import annotations

import argparse
import logging

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.worker_life import add_worker_flags, run_worker
from pdplane.engine.options import KV_BITS, KV_GROUP_SIZES, EngineOptions
from pdplane.ids import Endpoint
from pdplane.options import count, duration, port, size
from pdplane.plane.config import is_loopback

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    parser.add_argument("--model", required=True, help="a model directory, hub id, .gguf file, smollm2 or tiny:FAMILY")
    parser.add_argument("--port", type=port, required=True, help="where it listens; 0: a free one")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens (127.0.0.1); the protocol has no secret")
    parser.add_argument("--prefill-step-size", type=count, default=2048, metavar="N", help="tokens of one prompt chunk")
    parser.add_argument("--kv-bits", type=int, choices=KV_BITS, help="quantise the KV cache")
    parser.add_argument("--kv-group-size", type=int, choices=KV_GROUP_SIZES, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the tiny random models")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-payload", type=size, default=1 << 30, metavar="SIZE", help="of one frame (1GiB)")
    limits.add_argument("--max-expanded", type=size, default=2 << 30, metavar="SIZE", help="of a cache unpacked (2GiB)")
    limits.add_argument("--max-connections", type=count, default=64, metavar="N", help="at once (64)")
    limits.add_argument("--stall-timeout", type=duration, default=30.0, metavar="TIME", help="inside a frame (30s)")
    limits.add_argument("--remote-shutdown", action="store_true", help="clients of other machines may end it too")
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the worker; gives the exit code. Raises ConfigError."""
    with mlx_needed():
        from pdplane.workers.cache.model import MlxCacheModel
        from pdplane.workers.cache.prefix import PrefixEngine
        from pdplane.workers.cache.worker import CacheWorker, CacheWorkerOptions, ModelWorker
        from pdplane.workers.cache.wp30 import Wp30Limits
    engine = PrefixEngine(
        EngineOptions(
            args.model, prefill_step_size=args.prefill_step_size, kv_bits=args.kv_bits,
            kv_group_size=args.kv_group_size, seed=args.seed,
        )
    )  # fmt: skip
    options = CacheWorkerOptions(
        Wp30Limits(payload_bytes=args.max_payload), expanded_bytes=args.max_expanded,
        max_connections=args.max_connections, stall_s=args.stall_timeout, remote_shutdown=args.remote_shutdown,
    )  # fmt: skip
    worker = CacheWorker(Endpoint(args.host, args.port), MlxCacheModel(engine), options)
    if not is_loopback(args.host):
        logger.warning("listening on %s, which other machines can reach; WP30 knows no secret", args.host)
    return run_worker("cache-worker", ModelWorker(engine, worker), args, lambda: args.model)
