"""What the documents promise exists: links, files, flags."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

from pdplane.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "protocol.md", ROOT / "docs" / "operations.md"]
NAMED = re.compile(r"`((?:pdplane|examples|docs|tests)/[\w./]+\.\w+)`|\]\(([\w./-]+)(#[\w-]+)?\)")
OF_EVERY_COMMAND = {"--help", "--version"}


def flags() -> set[str]:
    """Every flag of every command."""
    found = set(OF_EVERY_COMMAND)
    for module, _text in COMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        found |= {flag for action in _every(parser) for flag in action.option_strings}
    return found


def _every(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    actions = list(parser._actions)
    for action in list(actions):
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                actions += _every(inner)
    return actions


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_links_exist(page: Path) -> None:
    named = [file or link for file, link, _anchor in NAMED.findall(page.read_text())]
    assert named
    missing = [name for name in named if not ((ROOT if "/" in name else page.parent) / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_exist(page: Path) -> None:
    assert set(re.findall(r"--[a-z][a-z-]+", page.read_text())) - flags() == set()
