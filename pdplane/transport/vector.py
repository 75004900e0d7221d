"""System calls that gather and scatter: numpy arrays of addresses and lengths handed to libc."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import ClassVar, Protocol

import numpy as np

from pdplane.kv.copies import U64
from pdplane.kv.layout import FEW

SWITCH_INTERVAL_S = 0.001


def take_turns_often() -> None:
    """Let this process's threads take turns every millisecond instead of every five.

    Each system call on the arena releases the GIL and takes it again, some dozens of times in a large push; while
    another thread runs Python, each time costs one interval. The setting is of the whole process: the daemons make it,
    and a program that embeds the planes decides for itself.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


# ---- Gather and scatter
#
# No Python object is made for a block: an iovec array is one numpy array of shape [n, 2] (address, length),
# and libc reads it in place. ctypes releases the GIL for the length of a call, and since every return to
# Python may wait for the GIL, calls are few and large: up to 1,024 entries and a byte limit.


IOV_MAX = 1024
ENTRY_BYTES = 16

_libc = ctypes.CDLL(None, use_errno=True)
_DARWIN = sys.platform == "darwin"


class _MsgHdr(ctypes.Structure):
    """`struct msghdr`: POSIX gives the counts as int and socklen_t (macOS), Linux as size_t."""

    _fields_: ClassVar = [
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_int if _DARWIN else ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_uint32 if _DARWIN else ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


for _name in ("sendmsg", "recvmsg"):
    _function = getattr(_libc, _name)
    _function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
    _function.restype = ctypes.c_ssize_t

# A closed peer is an error to us, never a signal to the process that embeds us.
_SEND_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)


class VectorCall(Protocol):
    """Calls `sendmsg` or `recvmsg` on `count` iovec entries at an address; returns the bytes moved."""

    def __call__(self, descriptor: int, address: int, count: int, /) -> int: ...


def send(descriptor: int, address: int, count: int) -> int:
    """Gather and send; on a blocking socket until all is queued or SO_SNDTIMEO is over. Raises OSError."""
    message = _MsgHdr(iov=address, iovlen=count)
    while (sent := _libc.sendmsg(descriptor, ctypes.byref(message), _SEND_FLAGS)) < 0:
        _raise_errno()
    return int(sent)


def receive_all(descriptor: int, address: int, count: int) -> int:
    """Receive and scatter until every entry is full, SO_RCVTIMEO is over, or the peer ends. Raises OSError."""
    message = _MsgHdr(iov=address, iovlen=count)
    while (received := _libc.recvmsg(descriptor, ctypes.byref(message), socket.MSG_WAITALL)) < 0:
        _raise_errno()
    return int(received)


def _raise_errno() -> None:
    code = ctypes.get_errno()
    if code != errno.EINTR:
        raise OSError(code, os.strerror(code))


def merge(addresses: U64, lengths: U64) -> tuple[U64, U64]:
    """Return the same bytes in the same order with neighbours in memory joined."""
    if len(addresses) < 2:
        return addresses, lengths
    breaks = np.flatnonzero(addresses[1:] != addresses[:-1] + lengths[:-1]) + 1
    if len(breaks) == len(addresses) - 1:
        return addresses, lengths
    starts = np.concatenate(([0], breaks))
    return addresses[starts], np.add.reduceat(lengths, starts)


def joined_entries(addresses: list[int], lengths: list[int]) -> array[int]:
    """Return iovec entries, address and length by turns, for a few runs, neighbours in memory joined."""
    flat: list[int] = []
    end = -1
    for address, length in zip(addresses, lengths, strict=True):
        if address == end:
            flat[-1] += length
        else:
            flat += (address, length)
        end = address + length
    return array("Q", flat)


def pieces(lengths: U64, limit: int) -> tuple[U64, U64, U64]:
    """Cut runs longer than `limit`: for each piece the row it comes from, its offset in that row, its length."""
    size = np.uint64(limit)
    counts = (lengths + (size - np.uint64(1))) // size
    times = counts.astype(np.int64)
    rows = np.repeat(np.arange(len(lengths), dtype=np.uint64), times)
    firsts = np.repeat(np.cumsum(counts) - counts, times)
    offsets = (np.arange(len(rows), dtype=np.uint64) - firsts) * size
    return rows, offsets, np.minimum(lengths[rows] - offsets, size)


class Cursor:
    """An iovec array that is used up by calls which may move less than asked."""

    __slots__ = ("_address", "_done", "_ends", "_index", "_limit", "_vector", "total")

    def __init__(self, addresses: U64, lengths: U64, limit: int) -> None:
        """Take the runs; `limit` bounds the bytes of one call."""
        self._vector: array[int] | U64
        self._ends: list[int] | U64
        self._limit = limit
        self._done = self._index = 0
        few = joined_entries(addresses.tolist(), lengths.tolist()) if len(lengths) <= FEW else None
        if few is not None and max(few[1::2], default=0) <= limit:
            self._vector, self._ends = few, list(accumulate(few[1::2]))
            self._address = few.buffer_info()[0]
        else:
            self._vector, self._ends = _many_entries(addresses, lengths, limit)
            self._address = self._vector.ctypes.data
        self.total = int(self._ends[-1]) if len(self._ends) else 0

    @property
    def done(self) -> int:
        return self._done

    @property
    def left(self) -> int:
        return self.total - self._done

    def advance(self, call: VectorCall, descriptor: int) -> tuple[int, bool]:
        """Make one call; return the bytes moved and whether that was all of them. Raises OSError."""
        last = bisect_right(self._ends, self._done + self._limit)
        last = min(max(last, self._index + 1), self._index + IOV_MAX)
        wanted = int(self._ends[last - 1]) - self._done
        moved = call(descriptor, self._address + ENTRY_BYTES * self._index, last - self._index)
        if moved > 0:
            self._move(moved)
        return moved, moved == wanted

    def _move(self, nbytes: int) -> None:
        self._done += nbytes
        index = bisect_right(self._ends, self._done)
        self._index = index
        if index < len(self._ends):
            left = int(self._ends[index]) - self._done
            used = int(self._vector[2 * index + 1]) - left
            if used:  # the call stopped inside this entry
                self._vector[2 * index] += used
                self._vector[2 * index + 1] = left


def _many_entries(addresses: U64, lengths: U64, limit: int) -> tuple[U64, U64]:
    """Return iovec entries of at most `limit` bytes, address and length by turns, and where each ends."""
    addresses, lengths = merge(addresses, lengths)
    if int(lengths.max()) > limit:
        rows, offsets, lengths = pieces(lengths, limit)
        addresses = addresses[rows] + offsets
    flat = np.empty(2 * len(addresses), np.uint64)
    flat[::2] = addresses
    flat[1::2] = lengths
    return flat, np.cumsum(lengths)
