"""What is published: an sdist that is the whole repository and passes its tests, a wheel with all of the product."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

import pdplane

ROOT = Path(__file__).parents[1]
LOCAL = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
)


def run(folder: Path, *command: str, path: Path | None = None) -> str:
    """Run Python in a folder, with `path` before everything that is installed; what it printed."""
    environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(source: Path, to: Path, *kinds: str) -> None:
    run(source, "-m", "build", "--no-isolation", "--outdir", str(to), *kinds)


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution of this tree."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "tree", ignore=LOCAL)
    build(folder / "tree", folder, "--sdist")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / f"pdplane-{pdplane.__version__}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel was unpacked; it was built from the sdist, as pip does where it has no wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build(sdist, folder, "--wheel")
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def installed(wheel: Path) -> Distribution:
    (found,) = distributions(path=[str(wheel)])
    return found


def files(folder: Path, pattern: str = "*") -> set[str]:
    found: Iterator[Path] = (
        path for path in folder.rglob(pattern) if path.is_file() and "__pycache__" not in path.parts
    )
    return {path.relative_to(folder).as_posix() for path in found}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone knows which files belong to the repository")
def test_the_sdist_has_every_file_of_the_repository(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(listed.stdout.splitlines()) - files(sdist) == set()


def test_the_sdist_runs_its_own_tests(sdist: Path) -> None:
    quick: Sequence[str] = ("tests/wire/test_golden_frames.py", "tests/test_layers.py", "tests/test_docs.py")
    collected = run(sdist, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", path=sdist)
    assert "tests/test_packaging.py" in collected
    assert " passed" in run(sdist, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *quick, path=sdist)


def test_the_wheel_has_the_product_and_nothing_else(wheel: Path, installed: Distribution) -> None:
    metadata = f"pdplane-{pdplane.__version__}.dist-info/"
    data = {"pdplane/py.typed", "pdplane/serving/page.html"}
    product = data | {f"pdplane/{name}" for name in files(ROOT / "pdplane", "*.py")}
    assert {name for name in files(wheel) if not name.startswith(metadata)} == product
    assert f"{metadata}licenses/LICENSE" in files(wheel)
    assert [entry.value for entry in installed.entry_points] == ["pdplane.cli.main:main"]


def test_the_wheel_runs(wheel: Path) -> None:
    where = run(wheel, "-c", "import pdplane; print(pdplane.__file__)", path=wheel)
    assert Path(where.strip()) == wheel / "pdplane" / "__init__.py"
    assert pdplane.__version__ in run(wheel, "-m", "pdplane.cli.main", "--version", path=wheel)


def test_what_pypi_shows(installed: Distribution) -> None:
    told = installed.metadata.json
    assert (told["name"], told["version"], told["license_expression"]) == ("pdplane", pdplane.__version__, "Apache-2.0")
    assert {"Typing :: Typed", f"Programming Language :: Python :: 3.{min(sys.version_info[1], 13)}"} <= set(
        told["classifier"]
    )
    assert told["description_content_type"] == "text/markdown"
    text = str(told["description"])
    assert "docs/operations.md" in text
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []
