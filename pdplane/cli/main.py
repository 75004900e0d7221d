"""`pdplane COMMAND ...`: one module a command, loaded only when it is asked for.

A command's module has `add_arguments(parser)` and `run(args) -> exit code`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType

from pdplane.cli.log import set_up_logging
from pdplane.errors import PdplaneError

COMMANDS: Mapping[str, tuple[str, str]] = {
    "demo": ("pdplane.cli.demo", "show it: a prefill daemon, a decode daemon, one prompt, a table"),
    "serve": ("pdplane.cli.serve", "serve OpenAI's API on one port, with a pair of daemons behind it"),
    "prefill": ("pdplane.cli.prefill", "run a daemon that computes the KV cache of prompts"),
    "decode": ("pdplane.cli.decode", "run a daemon that generates the tokens"),
    "generate": ("pdplane.cli.generate", "send a prompt to a pair of daemons and stream the text"),
    "cache-worker": ("pdplane.cli.cache_worker", "run a worker that hands out and takes in the caches of prefixes"),
    "cache": ("pdplane.cli.cache", "hand a prefix's cache, or its tokens, to a cache worker"),
    "expert-worker": ("pdplane.cli.expert_worker", "run a worker that holds experts of a MoE model"),
    "top": ("pdplane.cli.top", "show what daemons are doing"),
    "layout": ("pdplane.cli.layout", "print the cache layout that a model's daemons publish"),
    "inspect": ("pdplane.cli.inspect", "print control messages as a person reads them"),
    "bench": ("pdplane.cli.bench", "measure: how fast blocks move between two processes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code. Usage errors end in SystemExit 2, as argparse does it."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in words if not word.startswith("-")), None)
    module = _load(chosen)
    parser = _parser(chosen, module)
    args = parser.parse_args(words)
    if module is None:
        parser.print_help()
        return 0
    if "log_level" in args:
        set_up_logging(args.log_level, as_json=args.log_json)
    try:
        return int(module.run(args))
    except PdplaneError as error:
        print(f"pdplane {chosen}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _load(chosen: str | None) -> ModuleType | None:
    found = COMMANDS.get(chosen or "")
    return importlib.import_module(found[0]) if found else None


def _parser(chosen: str | None, module: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pdplane", description="One process computes the prompt's KV cache, another makes the tokens."
    )
    _add_version(parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (_module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        _add_version(command)
        if module is not None and name == chosen:
            module.add_arguments(command)
    return parser


class _ShowVersion(argparse.Action):
    """As argparse's own version action, but it looks the version up only when asked."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from importlib.metadata import version

        print(f"pdplane {version('pdplane')}")
        parser.exit()


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")


if __name__ == "__main__":
    sys.exit(main())
