"""`pdplane decode`: the daemon that takes a prompt's KV cache from a prefill daemon and generates the tokens."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
from aiohttp import web

from pdplane.api import DecodeEngine, DecodeRequest, DecodeService
from pdplane.cli.daemon import mlx_needed, run_daemon
from pdplane.cli.experts import add_expert_flags, attaching_experts
from pdplane.cli.flags import TOY, DaemonOptions, add_daemon_flags, daemon_options, plane_fields
from pdplane.cli.ranks import RankProcess, Seat, follow, lead, seat_here, seated
from pdplane.control.http_thread import HttpThread
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint
from pdplane.node.decode import DecodeLeg, DecodeNode
from pdplane.node.ranks import BeginLeg, Follower, LeadDecode, Meet, Ranks, Request
from pdplane.options import AddressPattern, address_pattern, count, duration, port, size
from pdplane.plane.config import DecodeConfig
from pdplane.serving.routes import decode_app

if TYPE_CHECKING:
    from pdplane.engine.model import Prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the shared flags and decode's own."""
    add_daemon_flags(parser, http_port=8200)
    add_expert_flags(parser)
    own = parser.add_argument_group("decode")
    own.add_argument(
        "--data-port", type=port, default=0, help="port to which prefill daemons push the cache (default: a free one)"
    )
    own.add_argument(
        "--status-port", type=port, default=0, help="port to which legacy prefill ranks report (default: a free one)"
    )
    own.add_argument(
        "--allow-prefill",
        type=address_pattern,
        nargs="+",
        action="extend",
        metavar="HOST:PORT",
        help="rendezvous that a request may name, like 10.0.0.0/24:8998 or *.prefill.svc:* (default: any)",
    )
    own.add_argument(
        "--quarantine-timeout",
        type=duration,
        default="300s",
        metavar="TIME",
        help="time for which a failed room's blocks stay unused while a legacy rank may still write there "
        "(default: %(default)s)",
    )
    own.add_argument(
        "--exact",
        action="store_true",
        help="run each sequence alone, in turns, with the bits of one mlx-lm process (default: batches, where bits may "
        "differ); prefill's flag decides which pairs are refused",
    )
    own.add_argument(
        "--decode-concurrency",
        type=count,
        default=32,
        metavar="N",
        help="how many sequences run at once; the others wait, with their blocks of the arena (default: %(default)s)",
    )
    own.add_argument(
        "--decode-cache-bytes",
        type=size,
        metavar="SIZE",
        help="bytes that the caches of running sequences may grow to (default: a quarter of the memory)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the daemon; return the exit code. Raises ConfigError."""
    options = daemon_options(args)
    engine = attrs.evolve(options.engine, exact=args.exact, decode_concurrency=args.decode_concurrency)
    options = attrs.evolve(options, engine=engine)
    config = DecodeConfig(
        **plane_fields(args),
        data_port=args.data_port,
        status_port=args.status_port,
        quarantine_timeout_s=args.quarantine_timeout,
    )
    if (seat := seat_here()) is not None:
        return _run_rank(seat, args, options, config)
    with attaching_experts(args) as prepare:
        decoder = _engine(options, prepare)

        def make_node(http: HttpThread, facts: Mapping[str, Any]) -> DecodeNode:
            return DecodeNode(
                decoder,
                config,
                http=http,
                max_waiting=options.max_waiting,
                facts=facts,
                cache_bytes=args.decode_cache_bytes,
            )

        return run_daemon("decode", options, config, make_node, _app(args))


def _app(args: argparse.Namespace) -> Callable[[DecodeService], web.Application]:
    patterns: list[AddressPattern] | None = args.allow_prefill

    def allows(prefill: Endpoint) -> bool:
        return patterns is None or any(pattern.allows(prefill) for pattern in patterns)

    return partial(decode_app, bootstrap_port=args.bootstrap_port or 8998, allows=allows)


def _run_rank(seat: Seat, args: argparse.Namespace, options: DaemonOptions, config: DecodeConfig) -> int:
    if args.experts:
        raise ConfigError("--experts does not work with a model that is split over ranks")
    config, rank = seated(config, seat), RankProcess(seat, options, config)
    with mlx_needed(options.blas):
        from pdplane.engine.decode import MlxDecodeEngine
    engine = MlxDecodeEngine(options.engine, group=rank.group)

    def make_lead(
        http: HttpThread, facts: Mapping[str, Any], ranks: Ranks, meet: Meet, on_lost: Callable[[str], None]
    ) -> LeadDecode:
        node = DecodeNode(
            engine,
            config,
            http=http,
            max_waiting=options.max_waiting,
            facts=facts,
            cache_bytes=args.decode_cache_bytes,
        )
        return LeadDecode(node, ranks, meet, on_lost)

    def make_node(http: HttpThread, _follower: Follower) -> tuple[DecodeNode, BeginLeg]:
        node = DecodeNode(engine, config, http=http, max_waiting=options.max_waiting, decides=False)

        def begin(request: Request) -> DecodeLeg:
            if not isinstance(request, DecodeRequest):
                raise ConfigError("this is a decode rank")
            return node.decode(request, lambda _token: None)  # rank 0 has the same ones, and passes them on

        return node, begin

    if seat.rank == 0:
        return lead("decode", rank, options, config, make_lead, _app(args))
    return follow("decode", rank, options, make_node)


def _engine(options: DaemonOptions, prepare: Prepare | None) -> DecodeEngine:
    if options.engine.model == TOY:
        if prepare is not None:
            raise ConfigError("the toy has no experts")
        from pdplane.toy.engine import ToyDecodeEngine
        from pdplane.toy.model import TOY_CONTEXT, ToyOptions

        return ToyDecodeEngine(
            ToyOptions(seed=options.engine.seed, context_length=options.engine.context_length or TOY_CONTEXT)
        )
    with mlx_needed(options.blas):
        from pdplane.engine.decode import MlxDecodeEngine

        return MlxDecodeEngine(options.engine, prepare)
