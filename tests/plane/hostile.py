"""Messages that are none: each must be counted, and change nothing else."""

from __future__ import annotations

import random

from pdplane import wire
from pdplane.kv.layout import Layout
from tests.raw_peers import Frames

NOTICE = b"pdplane/1"
PICKLE = b"cos\nsystem\n(S'touch /tmp/canary'\ntR."  # loading it would run a command


def registration(geometry: Layout, **changes: bytes) -> Frames:
    """A registration with some frames replaced, by name."""
    names = ("marker", "host", "port", "session", "pointer", "layout", "tp_size", "tp_rank")
    good = [b"None", b"127.0.0.1", b"7000", b"127.0.0.1:7001", b"\1" * 8, wire.encode_layout(geometry), b"1", b"0"]
    return [changes.get(name, frame) for name, frame in zip(names, good, strict=True)]


def bad_registrations(geometry: Layout) -> list[Frames]:
    return [
        registration(geometry, host=b""),
        registration(geometry, host=b"h" * 256),
        registration(geometry, host=b"\xff"),
        registration(geometry, port=b"0"),
        registration(geometry, port=b"70000"),
        registration(geometry, port=b"+7000"),
        registration(geometry, session=b""),
        registration(geometry, session=b"s" * 600),
        registration(geometry, session=b"\x80:1"),
        registration(geometry, pointer=b"\1\2\3\4"),
        registration(geometry, pointer=b"\0" * 8),
        registration(geometry, layout=b""),
        registration(geometry, layout=b"null"),
        registration(geometry, layout=b"x" * 300_000),
        registration(geometry, layout=b"[" * 100_000),
        registration(geometry, layout=b'{"groups": ' + b"9" * 5000 + b"}"),
        registration(geometry, layout=PICKLE),
        registration(geometry, tp_size=b"0"),
        registration(geometry, tp_size=b"1025"),
        registration(geometry, tp_size=b"1_0"),
        registration(geometry, tp_rank=b"1"),
        registration(geometry, tp_rank=b"-1"),
        registration(geometry)[:7],
        [*registration(geometry), b""],
    ]


def bad_offers(session: bytes) -> list[Frames]:
    rooms = (b"", b"-1", b"1e9", b"007", b"9223372036854775808", b"9" * 5000, "\u0661".encode(), b" 1", b"1\n")
    return [
        *([room, session, b"{}"] for room in rooms),
        [b"1", b"", b"{}"],
        [b"1", b"s" * 600, b"{}"],
        [b"1", b"\xff", b"{}"],
        [b"1", session, b"x" * (2 * 1024 * 1024 + 1)],
    ]


def bad_notices() -> list[Frames]:
    bodies = (b"", b"{}", b"null", b"[" * 50_000, b'{"room":1}', b"\xff", b"x" * 70_000, PICKLE)
    return [
        *([NOTICE, b"window", body] for body in bodies),
        [NOTICE],
        [NOTICE, b"window"],
        [NOTICE, b"window", b"{}", b""],
        [NOTICE, b"nothing", b"{}"],
        [NOTICE, b"window", b'{"room":-1,"generation":1,"prompt_hash":""}'],
        [NOTICE, b"window", b'{"room":1,"generation":18446744073709551616,"prompt_hash":""}'],
        [NOTICE, b"window", b'{"room":true,"generation":1,"prompt_hash":""}'],
        [NOTICE, b"hello", b'{"version":"1","life":"","fingerprint":{"required":[],"advisory":[]}}'],
        *(
            [NOTICE, b"hello", b'{"version":"1","life":"a","fingerprint":{"required":[%s1],"advisory":[]}}' % before]
            for before in (b"", b'["a","b"],' * 3)
        ),
        [b"pdplane/2", b"ping", b"{}"],
    ]


def no_messages() -> list[Frames]:
    return [
        [b""],
        [b"None"],
        [PICKLE],
        [b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}", b"", b""],
        *([b"7"] * count for count in (1, 2, 4, 7, 9)),
        [b"GET / HTTP/1.1\r\n\r\n"],
        [b""] * 3,
        [b""] * 7,
    ]


def bad_statuses() -> list[Frames]:
    good = [b"1", b"5", b"0", b"42", b"", b"0", b""]
    changes: list[tuple[int, bytes]] = [
        *((0, room) for room in (b"", b"-1", b"1e9", b"9223372036854775808")),
        *((1, code) for code in (b"", b"x", b"6", b"-1", b"9" * 5000)),
        (2, b"one"),
        (3, b""),
        (4, b"12345"),
        (5, b""),
        (5, b"1.5"),
        (6, b"1234567"),
    ]
    return [good[:2], *([*good[:index], frame, *good[index + 1 :]] for index, frame in changes)]


def fuzz(count: int, seed: int) -> list[Frames]:
    """Random frames, half of them of the words that messages are made of."""
    source = random.Random(seed)
    words = [b"None", NOTICE, b"window", b"hello", b"failed", b"1", b"0", b"-1", b"{}", b"[]", b"127.0.0.1:7001", b""]

    def frame() -> bytes:
        return source.choice(words) if source.random() < 0.5 else source.randbytes(source.randrange(24))

    return [[frame() for _ in range(source.randrange(1, 10))] for _ in range(count)]
