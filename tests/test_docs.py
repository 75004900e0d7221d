"""What the pages promise exists: links and their anchors, files, flags; so does what the source cites."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path

import pytest

import pdplane
from pdplane.cli.main import COMMANDS
from tests.test_layers import ALLOWED

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/vllm_connector/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(((?!https://)[^)#\s]*)(?:#([^)\s]+))?\)")
FILE = re.compile(r"`((?:[\w.]+/)+[\w.]+\.\w+)`")
CITED = re.compile(r"([\w./-]+\.md)\b(?:[\s#]+sections?((?:[\s#]+(?:and\s+)?\d[\d.]*,?)+))?")
SECTION = re.compile(r"^#+ ([\d.]*\d) ?", re.MULTILINE)
OF_EVERY_COMMAND = {"--help", "--version"}
OF_OTHER_PROGRAMS = {"--from-literal", "--now", "--strict", "--pd-disaggregation", "--policy", "--kv-transfer-config"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page: Path) -> None:
    for name, anchor in LINK.findall(page.read_text()):
        target = page.parent / name if name else page
        assert target.is_file(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


@pages
def test_files_exist(page: Path) -> None:
    """A file is named from the repository's top or, one of the product, from its package's."""
    named = FILE.findall(page.read_text())
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "pdplane" / name).exists())] == []


def flags() -> set[str]:
    """Every flag of every command."""
    found = OF_EVERY_COMMAND | OF_OTHER_PROGRAMS
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


@pages
def test_flags_exist(page: Path) -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page.read_text())) - flags() == set()


def test_the_changelog_keeps_its_form() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    releases = [line for line in lines if line.startswith("## ")]
    assert all(re.fullmatch(r"## \[\d+\.\d+\.\d+\] - (Unreleased|\d{4}-\d\d-\d\d)", line) for line in releases)
    assert releases[0].startswith(f"## [{pdplane.__version__}]")
    kinds = {line[4:] for line in lines if line.startswith("### ")}
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("folder", ["pdplane", "tests", "examples"])
def test_the_source_cites_what_the_repository_has(folder: str) -> None:
    """Pages by their path, their sections by number; numbered scenarios stand nowhere."""
    wrong = []
    for path in (ROOT / folder).rglob("*.py"):
        source = path.read_text()
        wrong += [f"{path.relative_to(ROOT)}: {name}" for name in re.findall(r"\bS\d\d\b", source)]
        for name, sections in CITED.findall(source):
            page = ROOT / name
            known = set(SECTION.findall(page.read_text())) if page.is_file() else set()
            if not page.is_file() or set(re.findall(r"[\d.]*\d", sections)) - known:
                wrong.append(f"{path.relative_to(ROOT)}: {name} {sections}")
    assert wrong == []


def test_the_map_has_the_packages_and_their_imports() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    base = {"ids", "errors", "security", "net", "kv", "messages"}
    core = base | {"api", "wire", "machine", "control", "transport", "plane", "engine", "node"}
    drawn = {
        name: {word for entry in row.split() for word in {"base": base, "core": core}.get(entry, {entry})}
        for name, row in re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", text, re.MULTILINE)
    }
    assert drawn == {name: allowed for name, allowed in ALLOWED.items() if not name.startswith("__")}


def test_the_scenarios_name_tests_that_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / "docs/reliability.md").read_text())
    assert len(named) > 100
    known = {
        (str(path.relative_to(ROOT / "tests")), name)
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert sorted(set(named) - known) == []
