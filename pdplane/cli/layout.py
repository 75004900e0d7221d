"""`pdplane layout`: the cache contract of a model, as its daemons publish it."""

from __future__ import annotations

import argparse
import json

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.flags import TOY, add_model_flags, engine_options
from pdplane.errors import ConfigError
from pdplane.options import count
from pdplane.wire import encode_layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the daemons' model flags, and what to print."""
    add_model_flags(parser)
    wanted = parser.add_argument_group("layout")
    wanted.add_argument(
        "--tp-size",
        type=count,
        default=1,
        metavar="N",
        help="ranks over which the model is split; prints one of them (default: %(default)s)",
    )
    wanted.add_argument(
        "--arena-blocks", type=count, metavar="N", help="parents of the arena (default: as many as --arena-bytes hold)"
    )
    wanted.add_argument(
        "--pretty", action="store_true", help="indent the JSON; without this it has the wire's very bytes"
    )


def run(args: argparse.Namespace) -> int:
    """Print the JSON; return the exit code. Raises ConfigError."""
    options = engine_options(args)
    if options.model == TOY:
        raise ConfigError("the toy has no model whose layout could be printed")
    with mlx_needed(args.blas):
        from pdplane.engine.engine import model_layout
    text = encode_layout(model_layout(options, args.tp_size, args.arena_blocks)).decode()
    print(json.dumps(json.loads(text), indent=2) if args.pretty else text)
    return 0
