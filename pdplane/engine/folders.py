"""The folder for what is downloaded, converted or copied once."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from pdplane.errors import ConfigError


def cache_folder() -> Path:
    """Return `$PDPLANE_CACHE`, or `~/.cache/pdplane`."""
    chosen = os.environ.get("PDPLANE_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "pdplane"


def build_once(
    name: str, build: Callable[[Path], None], is_whole: Callable[[Path], bool] = lambda _folder: True
) -> Path:
    """Return the folder `name` inside the cache, made by `build(folder)` when it is missing or `is_whole` fails.

    The folder appears whole or not at all (it is renamed into place), and a second process that wants it waits for
    the first; a lock of a killed process goes with it, and its half-made folder is thrown away by the next. Raises
    ConfigError when the cache cannot be written.
    """
    folder = cache_folder() / name
    if folder.is_dir() and is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder.is_dir() and is_whole(folder)):
                _build(folder, build)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error} (set PDPLANE_CACHE)") from error
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        build(partial)
        shutil.rmtree(folder, ignore_errors=True)  # there is one only if it was not whole
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
