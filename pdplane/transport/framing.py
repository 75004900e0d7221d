"""Segments and acknowledgements as bytes, without any input or output.

Every frame starts with 64 bytes, little-endian:

    magic "PDP1" | u8 version 1 | u8 kind | u16 flags | u32 count | u32 0 | u64 session number |
    u64 room | u64 generation | u64 segment | u64 nbytes | u64 checksum

`SEGMENT` (prefill to decode): then `count` u64 offsets into the receiver's arena, `count` u64 lengths, and
`nbytes` bytes, which are the runs one after another. The flag LAST asks for the push's one acknowledgement.
A push without bytes is one LAST segment of count 0.
`PULL` (prefill to decode, on connections that agreed on it): as SEGMENT, but a third table, `count` u64 offsets
into the sender's arena, takes the place of the bytes: the receiver reads them from the sender's memory.
`TAKEN` (decode to prefill): a PULL that is not the LAST has been read.
`ACK` (decode to prefill): the segment number of the LAST segment, `count` is the status (0 landed, else a
`Refusal`), `nbytes` the push's bytes that are in the arena.
`ABANDON` (prefill to decode): the push ends here, unfinished. With the flag LAST it asks for an ACK of its own
number, which means that nothing of the push is read any more; without, it gets none.

With the flag CHECKSUM `checksum` is the xxh3 (64 bits) of the segment's bytes, run after run; without it the
field is 0.

A segment number is `push << 32 | index`: the same push cut the same way has the same numbers, so that whole
segments of a repeated push count once.
"""

from __future__ import annotations

import bisect
import enum
import importlib
import importlib.util
import itertools
import struct
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np

from pdplane.errors import WireError
from pdplane.ids import MAX_ROOM, Generation, Room
from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64, Copies
from pdplane.kv.layout import FEW
from pdplane.messages import PushKey
from pdplane.transport.vector import merge, pieces

XXH3 = "xxh3"


def can_check() -> bool:
    """Return whether the extra `checksum` is installed."""
    return importlib.util.find_spec("xxhash") is not None


def checksum_of(arena: Arena, offsets: U64, lengths: U64) -> int:
    """Return the xxh3 (64 bits) of the runs' bytes, one run after another; needs the extra."""
    xxhash: Any = importlib.import_module("xxhash")
    digest = xxhash.xxh3_64()
    starts, lengths = merge(offsets, lengths)
    for start, end in zip(starts.tolist(), np.add(starts, lengths).tolist(), strict=True):
        digest.update(arena.bytes[start:end])
    return int(digest.intdigest())


# ---- Frames


MAGIC = b"PDP1"
VERSION = 1
HEADER_BYTES = 64
MAX_SEGMENT_BYTES = 64 << 20
MAX_RUNS = 16_384
MAX_PUSH = 2**32 - 1
MAX_STATUS = 5

_HEADER = struct.Struct("<4sBBHIIQQQQQQ")
_LAST = 1
_CHECKSUM = 2
_TABLE = np.dtype("<u8")


class FrameKind(enum.IntEnum):
    """What a frame is."""

    __hash__ = int.__hash__  # an enum's own is that of its name, in Python

    SEGMENT = 1
    ACK = 2
    ABANDON = 3
    PULL = 4
    TAKEN = 5


FROM_SENDER = (FrameKind.SEGMENT, FrameKind.ABANDON)
FROM_PULLED_SENDER = (FrameKind.PULL, FrameKind.ABANDON)
FROM_RECEIVER = (FrameKind.ACK, FrameKind.TAKEN)
_TABLES = {FrameKind.SEGMENT: 2, FrameKind.PULL: 3}
_KINDS = {kind.value: kind for kind in FrameKind}  # quicker than the class's call


@attrs.frozen
class Header:
    """The first 64 bytes of a frame; `count` is the number of runs, in an ACK the status."""

    kind: FrameKind
    session_number: int
    room: Room
    generation: Generation
    segment: int
    count: int = 0
    nbytes: int = 0
    last: bool = False
    checksum: int | None = None

    @property
    def push(self) -> int:
        return self.segment >> 32

    @property
    def key(self) -> PushKey:
        return self.room, self.generation, self.segment >> 32

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that follow the header."""
        return _TABLES.get(self.kind, 0) * _TABLE.itemsize * self.count


def segment_number(push: int, index: int) -> int:
    """Return the number of a push's segment."""
    return push << 32 | index


def encode_header(header: Header) -> bytes:
    """Return the 64 bytes of a header."""
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        (_LAST if header.last else 0) | (0 if header.checksum is None else _CHECKSUM),
        header.count,
        0,
        header.session_number,
        header.room,
        header.generation,
        header.segment,
        header.nbytes,
        header.checksum or 0,
    )


def encode_segment(header: Header, *tables: U64) -> bytes:
    """Return header and tables: offsets and lengths (the runs' bytes follow), for a PULL source offsets too."""
    numbers = np.concatenate(tables).astype(_TABLE, copy=False)
    return encode_header(header) + numbers.tobytes()


def decode_header(
    data: bytes | bytearray, session_number: int, kinds: tuple[FrameKind, ...] = tuple(FrameKind)
) -> Header:
    """Read 64 bytes. Raises WireError for anything but a frame of these kinds and this connection."""
    if len(data) != HEADER_BYTES:
        raise WireError("header", f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, kind, flags, count, zero, number, room, generation, segment, nbytes, check = _HEADER.unpack(data)
    _expect(
        ("magic", magic == MAGIC, magic),
        ("version", version == VERSION, version),
        ("kind", kind in kinds, kind),
        ("flags", flags <= (_LAST | _CHECKSUM), flags),
        ("fifth number", zero == 0, zero),
        ("checksum", bool(flags & _CHECKSUM) or not check, check),
        ("session number", number == session_number, number),
        ("room", room <= MAX_ROOM, room),
    )
    checksum = check if flags & _CHECKSUM else None
    header = Header(_KINDS[kind], number, room, generation, segment, count, nbytes, bool(flags & _LAST), checksum)
    _check_counts(header)
    return header


def _check_counts(header: Header) -> None:
    if header.kind in _TABLES:
        _expect(
            ("count", header.count <= MAX_RUNS, header.count),
            ("nbytes", header.count <= header.nbytes <= MAX_SEGMENT_BYTES, header.nbytes),
            ("count", bool(header.count) or (header.last and not header.nbytes), header.count),
        )
        return
    _expect(("checksum", header.checksum is None, header.checksum))
    if header.kind is FrameKind.ACK:
        _expect(("status", header.count <= MAX_STATUS, header.count), ("flags", header.last, 0))
    else:
        _expect(
            ("nbytes", not header.count and not header.nbytes, header.nbytes),
            ("flags", header.kind is FrameKind.ABANDON or not header.last, header.last),
        )


def decode_tables(header: Header, tables: U64) -> tuple[U64, U64]:
    """Return a segment's offsets and lengths from its tables. Raises WireError when they contradict the header."""
    if tables.nbytes != header.table_bytes:
        raise WireError("tables", f"{len(tables)} numbers for {header.count} runs")
    offsets, lengths = tables[: header.count], tables[header.count : 2 * header.count]
    if header.count:
        least, longest, total = _least_greatest_sum(lengths)
        _expect(
            ("length", least > 0, least),
            ("length", longest <= MAX_SEGMENT_BYTES, longest),  # also keeps the sum below 2**64
            ("nbytes", total == header.nbytes, f"{header.nbytes}, the lengths' sum is {total}"),
        )
    return offsets, lengths


def _least_greatest_sum(numbers: U64) -> tuple[int, int, int]:
    if len(numbers) <= FEW:
        few = numbers.tolist()
        return min(few), max(few), sum(few)
    return int(numbers.min()), int(numbers.max()), int(numbers.sum())


def decode_sources(header: Header, tables: U64, source_nbytes: int) -> U64:
    """Return a PULL's offsets into its sender's arena of `source_nbytes`. Raises WireError for a run that leaves it.

    The other tables were checked by `decode_tables`.
    """
    sources, lengths = tables[2 * header.count :], tables[header.count : 2 * header.count]
    _expect(("source", are_inside(sources, lengths, source_nbytes), "outside the sender's arena"))
    return sources


def are_inside(offsets: U64, lengths: U64, nbytes: int) -> bool:
    """Return whether every run lies inside an arena of `nbytes`."""
    if len(offsets) <= FEW:
        return all(offset + length <= nbytes for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True))
    # No difference of a start inside the arena wraps around.
    return int(offsets.max()) <= nbytes and bool((lengths <= np.uint64(nbytes) - offsets).all())


def _expect(*checks: tuple[str, bool, object]) -> None:
    """Raise WireError for the first check that does not hold; each is a field, whether it is right, its value."""
    for field, holds, value in checks:
        if not holds:
            raise WireError(field, f"a frame's {field} is {value!r}")


def segments(copies: Copies, max_bytes: int, max_runs: int = MAX_RUNS) -> Iterator[Copies]:
    """Yield copies in segments of at most so many bytes and runs, always cut the same way; one for empty copies."""
    if len(copies.length) <= max_runs and copies.nbytes <= max_bytes:
        yield copies
        return
    copies = with_short_runs(copies, max_bytes)
    for start, stop in itertools.pairwise(cut(copies.length, max_bytes, max_runs)):
        part = slice(start, stop)
        yield Copies(copies.source[part], copies.destination[part], copies.length[part])


def cut(lengths: U64, max_bytes: int, max_runs: int) -> Iterator[int]:
    """Yield the rows at which to cut runs of at most `max_bytes` each into parts: from 0 to the number of rows."""
    ends, count = np.cumsum(lengths), len(lengths)
    row, done = 0, 0
    yield row
    while row < count:
        # Python's bisect: numpy's releases the GIL, and getting it back from a busy thread takes a turn each time.
        row = min(bisect.bisect_right(ends, done + max_bytes, row), row + max_runs)
        done = int(ends[row - 1])
        yield row


def with_short_runs(copies: Copies, max_bytes: int) -> Copies:
    """Return the same bytes in the same order, in runs of at most `max_bytes`."""
    if not len(copies.length) or int(copies.length.max()) <= max_bytes:
        return copies
    rows, offsets, lengths = pieces(copies.length, max_bytes)
    return Copies(copies.source[rows] + offsets, copies.destination[rows] + offsets, lengths)
