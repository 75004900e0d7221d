"""GGUF files with lies in their headers: refused by name, and what passes the check does not crash MLX."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from pdplane.engine.gguf import check_gguf
from pdplane.errors import ConfigError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    file = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    tensors = {"weight": mx.arange(96, dtype=mx.float32).reshape(3, 32), "bias": mx.zeros((32,), mx.float16)}
    keys = {"name": "llama", "texts": ["a", "bc", ""], "count": mx.array(7, mx.uint32), "list": mx.arange(3)}
    mx.save_gguf(str(file), tensors, keys)
    check_gguf(file)
    return file.read_bytes()


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def _tensor(axes: int = 1, side: int = 32, kind: int = 0, offset: int = 0) -> bytes:
    sides = [side] * min(axes, 8)
    return _text(b"w") + struct.pack(f"<I{len(sides)}QIQ", axes, *sides, kind, offset) + bytes(256)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GGML" + bytes(64), "does not begin"),
        (_head(version=1), "version 1"),
        (b"GGUF", "version would take"),
        (_head(keys=2**63), "declares"),
        (_head(tensors=2**40), "declares"),
        (_head(keys=1) + struct.pack("<Q", 2**62) + bytes(64), "a key of"),
        (_head(keys=1) + _text(b"k") + struct.pack("<IQ", 8, 2**63) + bytes(64), "key 'k' would take"),
        (_head(keys=1) + _text(b"k") + struct.pack("<I", 77) + bytes(64), "unknown type 77"),
        (_head(keys=1) + _text(b"k") + struct.pack("<IIQ", 9, 4, 2**62) + bytes(64), "key 'k' would take"),
        (_head(keys=1) + _text(b"k") + struct.pack("<IIQ", 9, 8, 2**62) + bytes(64), "texts"),
        (_head(keys=1) + _text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "array of the type 9"),
        (_head(keys=1) + _text(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(64), "alignment"),
        (_head(tensors=1) + _tensor(axes=2**31), "axes"),
        (_head(tensors=1) + _tensor(axes=0), "axes"),
        (_head(tensors=1) + _tensor(kind=99), "type 99"),
        (_head(tensors=1) + _tensor(side=2**40), "impossible shape"),
        (_head(tensors=1) + _tensor(side=33, kind=2), "impossible shape"),
        (_head(tensors=1) + _tensor(offset=3), "impossible shape"),
        (_head(tensors=1) + _tensor(side=4096), "behind the file's end"),
        (_head(tensors=1) + _tensor(offset=2**63), "behind the file's end"),
        (b"", "cannot be read as GGUF"),
    ],
)
def test_a_lie_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    file = tmp_path / "lie.gguf"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        check_gguf(file)


def test_no_byte_of_a_header_can_crash_the_reader(tmp_path: Path, whole: bytes) -> None:
    """Each byte of the header in turn is made 1 more, and 255, and each length the file may end at is tried."""
    file = tmp_path / "whole.gguf"
    file.write_bytes(whole)
    program = """if True:
        import sys
        from pathlib import Path
        from pdplane.engine.gguf import check_gguf
        from pdplane.engine.untyped import load_gguf
        import mlx.core as mx
        whole, file, passed = Path(sys.argv[1]).read_bytes(), Path(sys.argv[1] + ".bad"), 0
        header = range(whole.index(b"weight") + 64)
        variants = [whole[:at] + bytes([value % 256]) + whole[at + 1:]
                    for at in header for value in (whole[at] + 1, 255)]
        for data in variants + [whole[:end] for end in header]:
            file.write_bytes(data)
            try:
                check_gguf(file)
                tensors, _keys = load_gguf(file)
                mx.eval(list(tensors.values()))
                passed += 1
            except (ValueError, RuntimeError):
                pass
        print(len(variants), passed)
    """
    done = subprocess.run(
        [sys.executable, "-c", program, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    tried, passed = map(int, done.stdout.split())
    assert 0 < passed < tried
