"""WP30 frames: every golden case, both ways."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import socket
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdplane.errors import LocalProtocolError, WireError
from pdplane.workers.cache.wp30 import Wp30Limits, decode_header, decode_prefix, encode_frame, read_frame
from pdplane.workers.listener import BoundedSocket
from tests.rows import rows
from tests.workers.ends import tcp_pair
from tests.workers.wp30_cases import FRAMES, Case, header_of, payload_of, stream_of

# Where we differ from what was recorded, and why.
STRICTER = {
    "frame/nan_inf/empty": "NaN and Infinity are no JSON; ours never leave",
    "frame/nan_inf/one": "NaN and Infinity are no JSON; ours never leave",
    "decode/header_nan": "NaN is no JSON; it closes the connection",
    "decode/header_list": "read here as a value, and fatal to the recorded server one call later",
    "decode/header_null": "read here as a value, and fatal to the recorded server one call later",
}
_ENCODED = [case for case in FRAMES if case["kind"] == "encode" and case["name"] != "encode/payload_len_2^32"]
_DECODED = [case for case in FRAMES if case["kind"] == "decode"]


def _ids(cases: list[Case]) -> list[str]:
    return [case["name"] for case in cases]


def test_every_case_is_run() -> None:
    assert len(FRAMES) == 80 == len(_ENCODED) + len(_DECODED) + 1  # and the length of 2**32 below
    assert set(STRICTER) <= set(_ids(FRAMES))


@rows("case", _ENCODED, ids=_ids(_ENCODED))
def test_encodes(case: Case) -> None:
    if "error" in case:
        with pytest.raises(TypeError):
            encode_frame(header_of(case) if case["name"] != "odd_header/set" else {"x": {1}})
        return
    if case["name"] == "payload/memoryview_float32x2":
        # Recorded with a length of 2, the count of items, which put the stream out of step; ours counts bytes.
        made = b"".join(encode_frame({"a": 1}, memoryview(array("f", [1.0, 2.0]))))
        assert made.hex() == case["frame_hex"].replace("00000002", "00000008", 1)
        return
    if case["name"] in STRICTER:
        with pytest.raises(ValueError, match="Out of range float"):
            encode_frame(header_of(case))
        return
    made = b"".join(encode_frame(header_of(case), payload_of(case)))
    if case.get("frame_hex_is_prefix"):
        assert made.hex().startswith(case["frame_hex"])
    else:
        assert made.hex() == case["frame_hex"]
    assert len(made) == case["returned_bytes"]
    if "frame_sha256" in case:
        assert hashlib.sha256(made).hexdigest() == case["frame_sha256"]
    _check_read_back(case, made)


def _check_read_back(case: Case, made: bytes) -> None:
    if not isinstance(header_of(case), dict):
        return
    header_bytes, payload_bytes = decode_prefix(made[:12], Wp30Limits())
    header = decode_header(made[12 : 12 + header_bytes])
    if "decoded_back" in case and not case["decoded_back"]["header_repr"].endswith("..."):
        assert repr(header).startswith(case["decoded_back"]["header_repr"].rstrip("'}"))
    assert payload_bytes == len(payload_of(case))


@pytest.mark.parametrize("case", _DECODED, ids=_ids(_DECODED))
def test_decodes(case: Case) -> None:
    if case["name"] == "decode/deep_nesting":
        with pytest.raises(WireError, match="nested too deeply"):
            decode_header(stream_of(case)[12:])
        return
    with tcp_pair(stall_s=0.1) as (line, theirs):
        theirs.sendall(stream_of(case))
        if case["sender_closes"]:
            theirs.shutdown(socket.SHUT_WR)
        _check_decoded(case, line)


def _check_decoded(case: Case, line: BoundedSocket) -> None:
    if "error" in case or case["name"] in STRICTER:
        with pytest.raises((WireError, OSError)):
            read_frame(line, Wp30Limits(header_bytes=2**32, payload_bytes=2**32))
        return
    frame = read_frame(line, Wp30Limits())
    assert frame.header == case["header"]
    assert bytes(frame.payload).hex() == case["payload_hex"]


def test_a_length_of_2_to_the_32_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb+") as file:
        file.truncate(2**32)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            _check_too_long(mapped)


def _check_too_long(mapped: mmap.mmap) -> None:
    with memoryview(mapped) as view, pytest.raises(LocalProtocolError, match="u32"):
        encode_frame({}, view)


@pytest.mark.parametrize(("lengths", "field"), [((0, 0), "header"), ((101, 0), "header"), ((2, 201), "payload")])
def test_lengths_are_checked_before_anything_is_read(lengths: tuple[int, int], field: str) -> None:
    prefix = b"WP30" + lengths[0].to_bytes(4, "big") + lengths[1].to_bytes(4, "big")
    with pytest.raises(WireError) as refused:
        decode_prefix(prefix, Wp30Limits(header_bytes=100, payload_bytes=200))
    assert refused.value.field == field


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(decode_header(data), dict)
