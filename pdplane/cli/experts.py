"""The flags that put a model's experts on remote workers, and the object made of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pdplane.cli.daemon import mlx_needed
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.options import count, duration, endpoint

if TYPE_CHECKING:
    from pdplane.engine.model import Prepare
    from pdplane.workers.experts.remote import RemoteExperts


def endpoints(text: str) -> list[Endpoint]:
    """Return addresses separated by commas."""
    return [endpoint(part.strip()) for part in text.split(",") if part.strip()]


def add_expert_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--experts` and what belongs to it."""
    experts = parser.add_argument_group("remote experts of a MoE model")
    experts.add_argument(
        "--experts",
        type=endpoints,
        metavar="HOST:PORT,...",
        help="expert workers that run the model's experts (default: run them here)",
    )
    experts.add_argument(
        "--expert-token-file",
        metavar="FILE",
        help="file with the workers' token, mode 600 (default: none; --experts needs one)",
    )
    experts.add_argument(
        "--expert-timeout",
        type=duration,
        default="30s",
        metavar="TIME",
        help="longest wait for a worker's answer (default: %(default)s)",
    )
    experts.add_argument(
        "--experts-local", action="store_true", help="read and run experts here when no worker is left"
    )
    experts.add_argument(
        "--experts-local-capacity",
        type=count,
        metavar="N",
        help="experts a layer that are then kept in memory here (default: all)",
    )


@contextmanager
def attaching_experts(args: argparse.Namespace) -> Iterator[Prepare | None]:
    """Yield what attaches the requested remote experts to a model, None without any; close them at the end."""
    experts = remote_experts(args)
    if experts is None:
        yield None
        return
    try:
        yield experts.attach
    finally:
        experts.close()


def remote_experts(args: argparse.Namespace) -> RemoteExperts | None:
    """Return the remote experts that were asked for, not yet attached to a model. Raises ConfigError."""
    if not args.experts:
        return None
    if not args.expert_token_file:
        raise ConfigError("--experts needs --expert-token-file")
    from pdplane.workers.experts.tx1 import Tx1Token

    token = Tx1Token.from_file(args.expert_token_file)
    with mlx_needed(args.blas):
        from pdplane.workers.experts.remote import LinkOptions, RemoteExperts, RemoteOptions
    link = LinkOptions(reply_s=args.expert_timeout)
    options = RemoteOptions(link, local=args.experts_local, local_capacity=args.experts_local_capacity)
    return RemoteExperts(args.experts, token, options)
