"""The header of a GGUF file, walked before MLX reads the file, since MLX believes every length and crashes on a lie."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path

from pdplane.errors import ConfigError

MAX_AXES = 4
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 has shorter counts, and no writer of it is left
_MAX_SIDE = 2**31 - 1
_MAX_NAME = 1 << 16
_ALIGNMENT_KEY, _ALIGNMENT, _MAX_ALIGNMENT = b"general.alignment", 32, 1 << 16
_U32, _STRING, _ARRAY = 4, 8, 9
_SCALAR_NBYTES: Mapping[int, int] = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_LEAST_NBYTES = 9
"""Of one entry of either table: a length, and a byte."""
_BLOCKS: Mapping[int, tuple[int, int]] = {
    # Elements and bytes of a block. F32, F16, BF16:
    0: (1, 4), 1: (1, 2), 30: (1, 2),
    # Q4_0, Q4_1, Q5_0, Q5_1, Q8_0:
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    # Q2_K to Q6_K:
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    # I8, I16, I32, I64, F64:
    24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8),
}  # fmt: skip


def check_gguf(file: Path) -> None:
    """Raise ConfigError unless every length in the header lies inside the file and every tensor does too."""
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(file, data).check()
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} cannot be read as GGUF: {error}") from error


class _Header:
    """One walk over a header; `_at` is the next byte."""

    def __init__(self, file: Path, data: mmap.mmap) -> None:
        self._file, self._data, self._at = file, data, 0
        self._alignment = _ALIGNMENT

    def check(self) -> None:
        """Raise ConfigError at the first thing that is wrong."""
        if self._take(4, "the magic") != _MAGIC:
            raise self._damage("it does not begin with GGUF")
        if (version := self._number("<I", "the version")) not in _VERSIONS:
            raise self._damage(f"version {version} is not one of {', '.join(map(str, _VERSIONS))}")
        tensors, keys = self._count("tensors"), self._count("keys")
        for _ in range(keys):
            self._key()
        ends = [self._tensor() for _ in range(tensors)]
        start = -(-self._at // self._alignment) * self._alignment
        for name, end in ends:
            if start + end > len(self._data):
                raise self._damage(f"tensor {name!r} ends {start + end - len(self._data)} bytes behind the file's end")

    def _key(self) -> None:
        name = self._string("a key", _MAX_NAME)
        kind, at = self._number("<I", "a type"), self._at
        self._value(kind, f"key {_shown(name)!r}")
        if name == _ALIGNMENT_KEY:
            found = struct.unpack_from("<I", self._data, at)[0] if kind == _U32 else 0
            if not 8 <= found <= _MAX_ALIGNMENT or found % 8:
                raise self._damage(f"general.alignment is no multiple of 8 up to {_MAX_ALIGNMENT} as a u32")
            self._alignment = found

    def _value(self, kind: int, of: str) -> None:
        if kind == _STRING:
            self._string(of)
        elif kind == _ARRAY:
            self._array(of)
        elif kind in _SCALAR_NBYTES:
            self._take(_SCALAR_NBYTES[kind], of)
        else:
            raise self._damage(f"{of} has the unknown type {kind}")

    def _array(self, of: str) -> None:
        kind, count = self._number("<I", of), self._number("<Q", of)
        if kind == _STRING:
            if count > self._left // 8:
                raise self._damage(f"{of} has {count} texts, more than the file holds")
            for _ in range(count):
                self._string(of)
        elif kind in _SCALAR_NBYTES:
            self._take(count * _SCALAR_NBYTES[kind], of)
        else:
            raise self._damage(f"{of} is an array of the type {kind}, which is not read")

    def _tensor(self) -> tuple[str, int]:
        """Return the tensor's name, and where it ends behind the beginning of all tensors."""
        name = _shown(self._string("a tensor's name", _MAX_NAME))
        axes = self._number("<I", f"tensor {name!r}")
        if not 1 <= axes <= MAX_AXES:
            raise self._damage(f"tensor {name!r} has {axes} axes, 1 to {MAX_AXES} are possible")
        sides = [self._number("<Q", f"tensor {name!r}") for _ in range(axes)]
        kind, offset = self._number("<I", f"tensor {name!r}"), self._number("<Q", f"tensor {name!r}")
        if kind not in _BLOCKS:
            raise self._damage(f"tensor {name!r} has the type {kind}, which is not read")
        elements, nbytes = _BLOCKS[kind]
        if not all(1 <= side <= _MAX_SIDE for side in sides) or sides[0] % elements or offset % self._alignment:
            raise self._damage(f"tensor {name!r} has an impossible shape or place: {sides} at {offset}")
        count = 1
        for side in sides:
            count *= side
        return name, offset + count // elements * nbytes

    def _count(self, what: str) -> int:
        count = self._number("<Q", f"the number of {what}")
        if count > self._left // _LEAST_NBYTES:
            raise self._damage(f"it declares {count} {what}, more than the file holds")
        return count

    def _string(self, of: str, longest: int | None = None) -> bytes:
        nbytes = self._number("<Q", of)
        if longest is not None and nbytes > longest:
            raise self._damage(f"{of} of {nbytes} bytes is longer than {longest}")
        return self._take(nbytes, of)

    def _number(self, form: str, of: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form), of))[0])

    def _take(self, nbytes: int, of: str) -> bytes:
        if nbytes > self._left:
            raise self._damage(f"{of} would take {nbytes} bytes, {self._left} are left")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    @property
    def _left(self) -> int:
        return len(self._data) - self._at

    def _damage(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._file} cannot be read as GGUF: {reason}")


def _shown(name: bytes) -> str:
    return name[:80].decode("utf-8", "replace")
