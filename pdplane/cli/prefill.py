"""`pdplane prefill`: the daemon that computes the KV cache of prompts and pushes it to a decode daemon."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from pdplane.api import PrefillEngine, PrefillRequest
from pdplane.cli.daemon import mlx_needed, run_daemon
from pdplane.cli.experts import add_expert_flags, attaching_experts
from pdplane.cli.flags import TOY, DaemonOptions, add_daemon_flags, daemon_options, plane_fields
from pdplane.cli.ranks import RankProcess, Seat, follow, lead, seat_here, seated
from pdplane.control.http_thread import HttpThread
from pdplane.errors import ConfigError
from pdplane.node.prefill import PrefillLeg, PrefillNode
from pdplane.node.ranks import BeginLeg, Follower, LeadPrefill, Meet, Ranks, Request
from pdplane.options import endpoint, port
from pdplane.plane.config import PrefillConfig
from pdplane.serving.routes import prefill_app

if TYPE_CHECKING:
    from pdplane.engine.model import Prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shared flags and prefill's own."""
    add_daemon_flags(parser, http_port=8100)
    add_expert_flags(parser)
    own = parser.add_argument_group("prefill")
    own.add_argument("--control-port", type=port, default=0, help="port of the ZeroMQ channel (default: a free one)")
    own.add_argument(
        "--legacy-port", type=port, default=0, help="port to which legacy decode ranks push (default: a free one)"
    )
    own.add_argument(
        "--rendezvous",
        type=endpoint,
        metavar="HOST:PORT",
        help="rendezvous at which to register (default: serve one here)",
    )
    own.add_argument(
        "--exact",
        action="store_true",
        help="refuse a decode whose last bits could differ, and reuse only such caches as keep them",
    )


def run(args: argparse.Namespace) -> int:
    """Run the daemon; return the exit code. Raises ConfigError."""
    options = daemon_options(args)
    options = attrs.evolve(options, engine=attrs.evolve(options.engine, exact=args.exact))
    config = PrefillConfig(
        **plane_fields(args),
        control_port=args.control_port,
        legacy_port=args.legacy_port,
        bootstrap_port=args.bootstrap_port,
        rendezvous=args.rendezvous,
        exact=args.exact,
    )
    if (seat := seat_here()) is not None:
        return _run_rank(seat, args, options, config)
    with attaching_experts(args) as prepare:
        engine = _engine(options, prepare)

        def make_node(http: HttpThread, facts: Mapping[str, Any]) -> PrefillNode:
            return PrefillNode(engine, config, http=http, max_waiting=options.max_waiting, facts=facts)

        return run_daemon("prefill", options, config, make_node, prefill_app)


def _run_rank(seat: Seat, args: argparse.Namespace, options: DaemonOptions, config: PrefillConfig) -> int:
    if args.experts:
        raise ConfigError("--experts does not work with a model that is split over ranks")
    config, rank = seated(config, seat), RankProcess(seat, options, config)
    with mlx_needed(options.blas):
        from pdplane.engine.prefill import MlxPrefillEngine
    engine = MlxPrefillEngine(options.engine, group=rank.group)

    def make_lead(
        http: HttpThread, facts: Mapping[str, Any], ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]
    ) -> LeadPrefill:
        node = PrefillNode(engine, config, http=http, max_waiting=options.max_waiting, facts=facts, gate=ranks.gate)
        return LeadPrefill(node, ranks, meet, on_lost)

    def make_node(http: HttpThread, follower: Follower) -> tuple[PrefillNode, BeginLeg]:
        engine.start()  # together with rank 0, whose rendezvous opens after that
        own = attrs.evolve(config, rendezvous=config.rendezvous or follower.rendezvous())
        node = PrefillNode(engine, own, http=http, max_waiting=options.max_waiting, gate=follower.gate)

        def begin(request: Request) -> PrefillLeg:
            if not isinstance(request, PrefillRequest):
                raise ConfigError("this is a prefill rank")
            return node.prefill(request)

        return node, begin

    if seat.rank == 0:
        return lead("prefill", rank, options, config, make_lead, prefill_app)
    return follow("prefill", rank, options, make_node)


def _engine(options: DaemonOptions, prepare: Prepare | None) -> PrefillEngine:
    if options.engine.model == TOY:
        if prepare is not None:
            raise ConfigError("the toy has no experts")
        from pdplane.toy.engine import ToyPrefillEngine
        from pdplane.toy.model import TOY_CONTEXT, ToyOptions

        return ToyPrefillEngine(
            ToyOptions(seed=options.engine.seed, context_length=options.engine.context_length or TOY_CONTEXT)
        )
    with mlx_needed(options.blas):
        from pdplane.engine.prefill import MlxPrefillEngine

        return MlxPrefillEngine(options.engine, prepare)
