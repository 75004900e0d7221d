"""What `--help` says of each flag: a phrase of its own, and the default."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import pytest

from pdplane.cli.main import COMMANDS
from pdplane.testing import interop_run

FRAGMENTS = {"again", "also", "as", "at", "between", "for", "from", "in", "inside", "its", "of", "so", "to"}
"""Words that begin a text which cannot be read without the flag's name before it."""


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for name, (module, _text) in COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        yield from _with_inner(name, parser)
    yield "interop_peer", interop_run._parser()


def _with_inner(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, found in action.choices.items():
                yield from _with_inner(f"{name} {inner}", found)


def shown(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """The help text as it is printed, before it is cut into lines."""
    return parser._get_formatter()._expand_help(action) if action.help else ""


def flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return [action for action in shown if action.option_strings and action.dest != "help"]


def may_be_left_out(parser: argparse.ArgumentParser, action: argparse.Action) -> bool:
    """Whether something holds when the flag is not given; without a value that is only ever "no"."""
    one_of = [group for group in parser._mutually_exclusive_groups if group.required]
    needed = action.required or any(action in group._group_actions for group in one_of)
    return not needed and not isinstance(action, argparse._StoreTrueAction)


PARSERS = dict(parsers())
every = pytest.mark.parametrize("name", PARSERS)


@every
def test_each_flag_has_a_phrase_of_its_own(name: str) -> None:
    parser = PARSERS[name]
    texts = {action.option_strings[0]: shown(parser, action) for action in flags(parser)}
    first = {flag: text.partition(" ")[0] for flag, text in texts.items()}
    assert [flag for flag, text in texts.items() if len(text.split()) < 2] == []
    assert [flag for flag, word in first.items() if word in FRAGMENTS] == []


@every
def test_each_flag_shows_its_default(name: str) -> None:
    parser, silent = PARSERS[name], []
    for action in flags(parser):
        plain = isinstance(action.default, (str, int, float)) and action.default not in ("", 0, -1)
        default = f"(default: {action.default}" if plain else "(default: "
        if may_be_left_out(parser, action) and default not in shown(parser, action):
            silent.append(action.option_strings[0])
    assert silent == []
