"""`pdplane cache-worker`: the daemon that hands out and takes in the caches of prefixes (WP30)."""

from __future__ import annotations

import argparse
import logging

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.flags import add_insecure_flag, add_number_flags, check_public
from pdplane.cli.worker_life import add_worker_flags, run_worker
from pdplane.engine.options import EngineOptions
from pdplane.ids import Endpoint
from pdplane.options import count, duration, port, size
from pdplane.plane.config import is_loopback

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--model", required=True, help="the model: a directory, hub id, .gguf file, smollm2 or tiny:FAMILY"
    )
    parser.add_argument("--port", type=port, required=True, help="port on which the worker listens; 0 takes a free one")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address on which the worker listens; the protocol has no secret (default: %(default)s)",
    )
    add_insecure_flag(parser, "any secret")
    parser.add_argument(
        "--prefill-step-size",
        type=count,
        default=2048,
        metavar="N",
        help="tokens of one chunk of the prompt (default: %(default)s)",
    )
    add_number_flags(parser)
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-payload",
        type=size,
        default="1GiB",
        metavar="SIZE",
        help="largest frame that is taken (default: %(default)s)",
    )
    limits.add_argument(
        "--max-expanded",
        type=size,
        default="2GiB",
        metavar="SIZE",
        help="largest cache once it is unpacked (default: %(default)s)",
    )
    limits.add_argument(
        "--max-connections",
        type=count,
        default=64,
        metavar="N",
        help="connections that are served at once (default: %(default)s)",
    )
    limits.add_argument(
        "--stall-timeout",
        type=duration,
        default="30s",
        metavar="TIME",
        help="longest silence inside a frame (default: %(default)s)",
    )
    limits.add_argument(
        "--remote-shutdown", action="store_true", help="let clients on other machines end the worker too"
    )
    add_worker_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Run the worker; return the exit code. Raises ConfigError."""
    check_public(args.host, "a loopback --host, since WP30 knows no secret", has_secret=False, insecure=args.insecure)
    with mlx_needed(args.blas):
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
