"""The BLAS library that MLX computes with on Linux: OpenBLAS from PyPI, many times as fast as the one in mlx's wheel.

The linker looks for a symbol among what is loaded globally before it looks into the wheel's own libraries. So what is
loaded with RTLD_GLOBAL before mlx is first imported takes the place of the wheel's BLAS, in this process alone. The
package `scipy-openblas32` has OpenBLAS with the prefix `scipy_` on all names: a copy with the plain names is made once,
by `patchelf`, in the cache folder.

On macOS MLX uses Accelerate, and nothing here changes it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import attrs

from pdplane.engine.folders import build_once
from pdplane.errors import ConfigError

logger = logging.getLogger(__name__)

AUTO, WHEEL = "auto", "wheel"

_PACKAGE, _TOOL = "scipy-openblas32", "patchelf"
_PREFIXED = re.compile(rb"scipy_(\w+)(?=\0)")  # in the table of names; what is no symbol there is renamed nowhere
_ROUTINE = "cblas_sgemm"  # MLX's matrix product in f32
_LIBRARY, _DIGEST = "libopenblas.so", "sha256"
_PATCH_S = 120.0
_THREADS_CHOSEN = ("OPENBLAS_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS")


@attrs.frozen
class Blas:
    """A library: its name (of OpenBLAS the version and the kernels too), its file, and its threads if it has said."""

    name: str
    file: str = ""
    threads: int | None = None

    @property
    def is_reference(self) -> bool:
        """Whether it is the plain one in mlx's wheel, which computes a row in the same way whatever stands beside it.

        OpenBLAS does not: its kernels depend on the number of rows, and on some processors on a row's place.
        """
        return self.name.startswith("libblas")

    def __str__(self) -> str:
        """Return the name with the threads, which share a product out and so decide about the last bits too."""
        if self.threads is None:
            return self.name
        return f"{self.name}, {self.threads} thread{'s' * (self.threads != 1)}"


@functools.cache  # a process has one answer, and one line in the log
def use_blas(choice: str = AUTO) -> None:
    """Load what was chosen: `auto`, `wheel`, or a library by its path or name; call this before mlx is imported.

    `auto` takes what is preloaded, else OpenBLAS from PyPI, else the wheel's, and logs why. Raises ConfigError when
    another choice is not available.
    """
    if sys.platform == "darwin":
        if choice not in (AUTO, WHEEL):
            raise ConfigError(f"--blas {choice}: on macOS MLX computes with Accelerate")
        return
    before = _loaded_globally()
    if before is not None and choice != AUTO:
        raise ConfigError(f"--blas {choice}: {before.file} is in the process already, by LD_PRELOAD for example")
    if before is not None:
        _bound_threads(ctypes.CDLL(None))
        logger.info("BLAS: %s, preloaded from %s", _loaded_globally(), before.file)
    elif choice == WHEEL:
        logger.info("BLAS: the one that mlx comes with")
    elif choice == AUTO:
        _use_openblas()
    else:
        logger.info("BLAS: %s, from %s", _load(choice), choice)


def share_cores(processes: int) -> None:
    """Leave the other ranks of a split model on this machine, `processes` in all, their part of the threads.

    Call it before `use_blas`. The environment's own number of threads comes first.
    """
    if sys.platform != "darwin" and not _threads_are_chosen():
        os.environ[_THREADS_CHOSEN[0]] = str(_share_of_threads(processes))


def blas_in_use() -> Blas:
    """Return the BLAS that MLX computes with, wherever it came from; called after mlx is imported."""
    if sys.platform == "darwin":
        return Blas("accelerate")
    return _loaded_globally() or _described(ctypes.CDLL(sys.modules["mlx.core"].__file__)) or Blas("none")


def _use_openblas() -> None:
    try:
        logger.info("BLAS: %s", _load(str(_plain_openblas() / _LIBRARY)))
    except ConfigError as error:
        logger.warning("BLAS: the one that mlx comes with, which is slow: %s", error)


def _load(library: str) -> Blas | None:
    """Load it for everybody in the process. Raises ConfigError."""
    if sys.modules.get("mlx.core") is not None:
        raise ConfigError(f"{library!r} comes too late: mlx is imported already")
    try:
        loaded = ctypes.CDLL(library)  # not yet for everybody: it may be none
        _refuse_other_libraries(library, loaded)
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise ConfigError(f"cannot load {library!r}: {error}") from error
    _bound_threads(loaded)
    return _loaded_globally()


def _refuse_other_libraries(name: str, library: ctypes.CDLL) -> None:
    if _described(library) is None:
        raise ConfigError(f"{name!r} has no {_ROUTINE}: it is no BLAS with C names")
    if "USE64BITINT" in _config(library):
        raise ConfigError(f"{name!r} counts in 64 bits, MLX in 32")


def _bound_threads(library: ctypes.CDLL) -> None:
    """Set half as many threads as the process may use cores, unless the environment says how many.

    Threads of OpenBLAS wait for one another in a loop. Where two of them share a core, with each other or with those
    of another daemon, a product takes ten to a hundred times as long; half leaves room for that daemon, and on most
    machines two of the cores that the system counts are one.
    """
    if hasattr(library, "openblas_set_num_threads") and not _threads_are_chosen():
        library.openblas_set_num_threads(_share_of_threads(1))


def _threads_are_chosen() -> bool:
    return any(os.environ.get(name) for name in _THREADS_CHOSEN)


def _share_of_threads(processes: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // 2 // processes)


# ---- a library that is loaded


class _Place(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _loaded_globally() -> Blas | None:
    return _described(ctypes.CDLL(None))


def _described(library: ctypes.CDLL) -> Blas | None:
    """Return the BLAS that this library, or what it was linked with, would call; None for none."""
    routine = getattr(library, _ROUTINE, None)
    if routine is None:
        return None
    place = _Place()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    dladdr(ctypes.cast(routine, ctypes.c_void_p), ctypes.byref(place))
    file = os.fsdecode(place.file or b"")
    config = _config(library)
    if not config:
        return Blas(Path(file).name, file)
    # "OpenBLAS 0.3.30 DYNAMIC_ARCH NO_AFFINITY Haswell MAX_THREADS=64": the version and the kernels make the bits.
    return Blas(f"{' '.join(config.split()[:2])} {_text(library, 'openblas_get_corename')}", file, _threads(library))


def _config(library: ctypes.CDLL) -> str:
    return _text(library, "openblas_get_config")


def _threads(library: ctypes.CDLL) -> int | None:
    ask = getattr(library, "openblas_get_num_threads", None)
    return None if ask is None else int(ask())


def _text(library: ctypes.CDLL, function: str) -> str:
    """Return the text of a function without arguments; an empty one when the library has no such function."""
    ask = getattr(library, function, None)
    if ask is None:
        return ""
    ask.restype = ctypes.c_char_p
    return (ask() or b"").decode("utf-8", "replace")


# ---- OpenBLAS with plain names


def _plain_openblas() -> Path:
    """Return the folder of the copy, made on the first call and again when it is damaged. Raises ConfigError."""
    version, library = _installed(_PACKAGE, lambda file: file.name.startswith("libscipy_openblas"))
    _, tool = _installed(_TOOL, lambda file: file.name == _TOOL)

    def build(folder: Path) -> None:
        names = folder / "names"
        names.write_bytes(b"".join(b"scipy_%s %s\n" % (name, name) for name in _prefixed_names(library)))
        copy = folder / _LIBRARY
        _run([str(tool), "--rename-dynamic-symbols", str(names), "--output", str(copy), str(library)])
        names.unlink()
        (folder / _DIGEST).write_text(_sha256(copy))

    # A home folder may be shared by machines of several kinds.
    return build_once(f"openblas-{version}-{platform.machine()}", build, _is_whole)


def _is_whole(folder: Path) -> bool:
    """Return whether the file is whole: one that was cut short would end the process while it is loaded."""
    try:
        return (folder / _DIGEST).read_text() == _sha256(folder / _LIBRARY)
    except (OSError, ValueError):
        return False


def _prefixed_names(library: Path) -> list[bytes]:
    return sorted(set(_PREFIXED.findall(library.read_bytes())))


def _installed(package: str, is_it: Callable[[Path], bool]) -> tuple[str, Path]:
    """Return an installed package's version and one of its files. Raises ConfigError."""
    try:
        found = distribution(package)
    except PackageNotFoundError as error:
        raise ConfigError(f"the package {package} is not installed") from error
    for file in found.files or ():
        path = Path(str(found.locate_file(file)))
        if is_it(path) and path.is_file():
            return found.version, path
    raise ConfigError(f"the package {package} lacks its file")


def _run(command: list[str]) -> None:
    name = Path(command[0]).name
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{name} cannot be run: {error}") from error
    if ended.returncode != 0:
        words = ended.stderr.strip().splitlines() or ["no word"]
        raise ConfigError(f"{name} ended with exit code {ended.returncode}: {words[-1]}")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
