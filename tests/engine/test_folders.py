"""What is downloaded or converted once: whole or not at all, by one process at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdplane.engine.folders import build_once, cache_folder
from pdplane.errors import ConfigError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "cache"))


def write(folder: Path) -> None:
    (folder / "file").write_text("whole")


def fail(folder: Path) -> None:
    (folder / "file").write_text("half")
    raise ConfigError("the network is gone")


def test_built_once() -> None:
    first = build_once("model", write)
    assert first == cache_folder() / "model"
    assert build_once("model", fail) == first
    assert (first / "file").read_text() == "whole"


def test_a_failure_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="the network is gone"):
        build_once("model", fail)
    assert [path.name for path in cache_folder().iterdir()] == [".model.lock"]
    assert (build_once("model", write) / "file").read_text() == "whole"


def test_the_rest_of_a_killed_process_is_thrown_away() -> None:
    partial = cache_folder() / ".model.partial"
    partial.mkdir(parents=True)
    (partial / "old").write_text("half")
    assert [path.name for path in build_once("model", write).iterdir()] == ["file"]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("a file")
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(ConfigError, match="set PDPLANE_CACHE"):
        build_once("model", write)


def test_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from pdplane.engine.folders import build_once\n"
        "def build(folder):\n"
        "    Path(sys.argv[1], str(os.getpid())).touch()\n"
        "    (folder / 'file').write_text('whole')\n"
        "print(build_once('model', build))"
    )
    builders = tmp_path / "builders"
    builders.mkdir()
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(builders)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    answers = {run.communicate(timeout=60)[0].strip() for run in runs}
    assert answers == {str(cache_folder() / "model")}
    assert len(list(builders.iterdir())) == 1
