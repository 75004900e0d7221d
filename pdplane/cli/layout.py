"""`pdplane layout`: the cache contract of a model, as its daemons publish it, and what a peer's has otherwise."""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request

from pdplane.cli.daemon import mlx_needed
from pdplane.cli.flags import TOY, add_model_flags, engine_options
from pdplane.control.lookup import reason_in
from pdplane.errors import ConfigError, WireError
from pdplane.kv.layout import Layout, differences
from pdplane.net import parse_json
from pdplane.options import count, duration, url
from pdplane.wire import decode_layout, encode_layout

_MAX_ANSWER = 1 << 20


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
    wanted.add_argument(
        "--compare",
        type=url,
        metavar="URL",
        help="rendezvous of a prefill, such as http://10.0.0.1:8998: print what must agree with it and does not, and "
        "what changes it (default: print the layout)",
    )
    wanted.add_argument(
        "--timeout",
        type=duration,
        default="5s",
        metavar="TIME",
        help="longest wait for the rendezvous (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the JSON, or the differences; return the exit code, 1 when there are some. Raises ConfigError."""
    options = engine_options(args)
    if options.model == TOY:
        raise ConfigError("the toy has no model whose layout could be printed")
    theirs = None if args.compare is None else _published_at(args.compare, args.timeout)
    with mlx_needed(args.blas):
        from pdplane.engine.engine import model_layout
    layout = model_layout(options, args.tp_size, args.arena_blocks)
    if theirs is not None:
        return _compare(layout, theirs)
    text = encode_layout(layout).decode()
    print(json.dumps(json.loads(text), indent=2) if args.pretty else text)
    return 0


def _published_at(rendezvous: str, timeout_s: float) -> Layout:
    asked = f"{rendezvous}/route?engine_rank=-1&target_dp_group=-1"
    try:
        with urllib.request.urlopen(asked, timeout=timeout_s) as response:
            text = response.read(_MAX_ANSWER)
    except urllib.error.HTTPError as error:
        with error:
            reason = reason_in(error.read(_MAX_ANSWER).decode("utf-8", "replace"))
        raise ConfigError(f"{asked} answered {error.code}: {reason}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"no rendezvous answers at {asked}: {error}") from error
    try:
        answer = parse_json(text, "answer", _MAX_ANSWER)
        if answer.optional("cache_layout") is None:
            raise ConfigError(f"no prefill rank has registered at {rendezvous} yet")
        return decode_layout(answer.member("cache_layout").text(_MAX_ANSWER).encode())
    except WireError as error:
        raise ConfigError(f"{rendezvous} publishes no layout that pdplane reads: {error.reason}") from error


def _compare(ours: Layout, theirs: Layout) -> int:
    alike: dict[tuple[str, ...], list[str]] = {}  # most of what differs does so in every layer
    for found in differences(ours, theirs):
        kind = found.field.partition("]")[2] if found.field.startswith("field[") else found.field
        alike.setdefault((kind, found.ours, found.theirs, found.advice), []).append(found.field)
    for (_, here, there, advice), fields in alike.items():
        more = f" and {len(fields) - 1} more fields" if len(fields) > 1 else ""
        print(f"{fields[0]}{more}\n    ours:   {here}\n    theirs: {there}\n    change: {advice}")
    if not alike:
        print("the layouts agree; capacity, packing and planes may differ")
    return 1 if alike else 0
