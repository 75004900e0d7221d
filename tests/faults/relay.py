"""A link between two network namespaces: `python -m tests.faults.relay NAMESPACE NAMESPACE`.

Each namespace gets an interface `pd0`; what one sends the other receives, after a delay, at a rate, without the packets
that are lost. Lines of JSON on standard input change that: `delay` and `jitter` (seconds; packets overtake each
other), `loss` and `twice` (shares of the packets), `rate` (bytes a second), `cut` (nothing passes), `nat` (an address
that the second side knows the first one by: [outside, inside]).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import socket
import struct
import sys
import time
from typing import Any

_CLONE_NEWNET, _TUNSETIFF, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001
_LONGEST_QUEUE_S = 1.0


def enter(namespace: str) -> None:
    """Move this process to a network namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def open_end(namespace: str) -> int:
    """Make the interface in a namespace; return the descriptor of its packets."""
    enter(namespace)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", b"pd0", _TUN_WITHOUT_HEADER))
    return end


def summed(old: int, before: bytes, after: bytes) -> int:
    """Return an internet checksum after some bytes have changed (RFC 1624)."""
    total = ~old & 0xFFFF
    for was, now in zip(struct.iter_unpack("!H", before), struct.iter_unpack("!H", after), strict=True):
        total += (~was[0] & 0xFFFF) + now[0]
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def readdressed(packet: bytes, place: int, before: bytes, after: bytes) -> bytes:
    """Return an IPv4 packet whose address at `place` (12 source, 16 destination) is another one, if it was `before`."""
    if packet[0] >> 4 != 4 or packet[place : place + 4] != before:
        return packet
    changed = bytearray(packet)
    changed[place : place + 4] = after
    sums = [10]
    if packet[9] == socket.IPPROTO_TCP:
        sums.append((packet[0] & 15) * 4 + 16)
    for at in sums:
        (old,) = struct.unpack_from("!H", packet, at)
        struct.pack_into("!H", changed, at, summed(old, before, after))
    return bytes(changed)


class Link:
    """Both ends and the packets under way."""

    def __init__(self, ends: tuple[int, int]) -> None:
        self._ends, self._chance = ends, random.Random(7)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._free = [0.0, 0.0]
        self.how: dict[str, Any] = {
            "delay": 0.0,
            "jitter": 0.0,
            "loss": 0.0,
            "twice": 0.0,
            "rate": 1e9,
            "cut": False,
            "nat": None,
        }

    def take(self, side: int) -> None:
        """Take one packet from a side."""
        packet, now = os.read(self._ends[side], 1 << 16), time.monotonic()
        start = max(now, self._free[side])
        if self.how["cut"] or self._chance.random() < self.how["loss"] or start - now > _LONGEST_QUEUE_S:
            return
        if self.how["nat"]:
            outside, inside = (socket.inet_aton(address) for address in self.how["nat"])
            change = (12, inside, outside) if side == 0 else (16, outside, inside)
            packet = readdressed(packet, *change)
        self._free[side] = start + len(packet) / self.how["rate"]
        for _copy in range(2 if self._chance.random() < self.how["twice"] else 1):
            due = self._free[side] + self.how["delay"] + self._chance.random() * self.how["jitter"]
            heapq.heappush(self._under_way, (due, next(self._numbers), 1 - side, packet))

    def give(self) -> float:
        """Deliver what is due; return how long the next packet has time."""
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _due, _number, side, packet = heapq.heappop(self._under_way)
            if not self.how["cut"]:
                with contextlib.suppress(OSError):  # an interface that is not up takes nothing
                    os.write(self._ends[side], packet)
        return self._under_way[0][0] - time.monotonic() if self._under_way else 1.0


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    ends = open_end(sys.argv[1]), open_end(sys.argv[2])
    link = Link(ends)
    say("up")
    while True:
        ready, _, _ = select.select([*ends, 0], [], [], max(0.0, link.give()))
        for side in (0, 1):
            if ends[side] in ready:
                link.take(side)
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            link.how |= json.loads(line)
            say("changed")


if __name__ == "__main__":
    main()
