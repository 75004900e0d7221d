"""Codecs: nothing lost, nothing expanded beyond its limit, and no surprise from damaged bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import ConfigError, WireError
from pdplane.workers.cache import codecs
from pdplane.workers.cache.codecs import LOSSLESS, decode, encode, from_planes, is_installed, to_planes

INSTALLED = [codec for codec in LOSSLESS if is_installed(codec)]
COMPRESSED = [codec for codec in INSTALLED if codec != "none"]
SAMPLE = bytes(range(256)) * 40 + b"rest!"


@pytest.mark.parametrize("codec", INSTALLED)
@pytest.mark.parametrize("data", [b"", b"a", SAMPLE, bytes(100_000)], ids=["empty", "one", "sample", "zeros"])
def test_round_trip(codec: str, data: bytes) -> None:
    packed = encode(codec, memoryview(data), 4)
    assert bytes(decode(codec, memoryview(packed), len(data))) == data


@given(st.binary(max_size=70), st.integers(1, 8))
def test_planes_come_back(data: bytes, width: int) -> None:
    assert from_planes(to_planes(data, width), width) == data


def test_planes_put_like_bytes_side_by_side() -> None:
    assert to_planes(b"aAbBcC!", 2) == b"abcABC!"


@pytest.mark.parametrize("codec", INSTALLED)
def test_expansion_stops_at_the_limit(codec: str) -> None:
    with pytest.raises(WireError) as refused:
        decode(codec, encode(codec, bytes(100_000)), 99_999)
    assert refused.value.field == "payload"


@pytest.mark.parametrize("codec", COMPRESSED)
def test_damage_is_a_wire_error(codec: str) -> None:
    packed = bytes(encode(codec, SAMPLE, 2))
    for damaged in (b"", packed[:-1], packed[: len(packed) // 2], b"\xff" * 20, b"\x02" + b"\xff" * 20):
        with pytest.raises(WireError):
            decode(codec, damaged, len(SAMPLE))


@pytest.mark.parametrize("codec", [codec for codec in COMPRESSED if codec != "bp-zstd"])
@pytest.mark.parametrize("data", [b"", b"a", bytes(1 << 20)])
def test_bytes_behind_a_stream_are_refused(codec: str, data: bytes) -> None:
    packed = bytes(encode(codec, data))
    for more in (b"b", packed, bytes(70_000)):
        with pytest.raises(WireError, match=r"follow|Unknown frame"):  # after nothing zstd looks for another frame
            decode(codec, packed + more, 1 << 20)


def test_bytes_behind_the_planes_are_refused() -> None:
    with pytest.raises(WireError, match="follow"):
        decode("bp-zstd", bytes(encode("bp-zstd", b"abcd")) + b"b", 10)


@pytest.mark.parametrize("codec", ["zz", "q8", "", "ZLIB"])
def test_unknown_names(codec: str) -> None:
    with pytest.raises(ValueError, match=f"^codec {codec}$"):
        encode(codec, b"")


@pytest.mark.parametrize("codec", ["lz4", "zstd", "bp-zstd"])
def test_a_codec_that_is_not_installed_says_what_to_install(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lz4", "lz4.frame", "zstandard"):
        monkeypatch.setitem(codecs.importlib.sys.modules, name, None)  # type: ignore[attr-defined]  # as if absent
    with pytest.raises(ConfigError, match=r"pip install 'pdplane\[zstd\]'"):
        encode(codec, b"a")
    assert bytes(decode("zlib", encode("zlib", b"a"), 1)) == b"a"


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("sizes", [[], [5], [300_000, 0, 7], [1] * 4000])
def test_frames_of_other_encoders_end_where_they_end(sizes: list[int], *, checksum: bool) -> None:
    """Streamed frames declare no size, may have checksums and small or empty blocks."""
    zstandard = pytest.importorskip("zstandard")
    stream = zstandard.ZstdCompressor(level=3, write_checksum=checksum).compressobj()
    packed = b"".join(stream.compress(bytes(n)) + stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for n in sizes)
    packed += stream.flush()
    assert bytes(decode("zstd", packed, 400_000)) == bytes(sum(sizes))
    with pytest.raises(WireError, match=r"follow|Unknown frame"):
        decode("zstd", packed + b"\0", 400_000)
    with pytest.raises(WireError, match="cut short"):
        decode("zstd", packed[:-1], 400_000)
