"""Reading another process's memory: `process_vm_readv`, on Linux, between processes of one user.

A sender on the same host need not copy its bytes into a socket: it sends their addresses, and the receiver copies
them straight into its arena. The kernel allows that to a process that may trace the other one: of the same user, and
under Yama only the tracer that the process has named. The kernel also says which process it is (SO_PEERCRED), and a
nonce in its memory proves that the number means the same process on both sides.
Nothing here ever writes into another process.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hmac
import os
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64, Copies
from pdplane.kv.layout import FEW
from pdplane.transport.framing import cut, with_short_runs
from pdplane.transport.vector import ENTRY_BYTES, IOV_MAX, joined_entries

NONCE_BYTES = 32
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61
_ANY_TRACER = 2**64 - 1
_CREDENTIALS = struct.Struct("3i")

_libc: Any = ctypes.CDLL(None, use_errno=True)
if hasattr(_libc, "process_vm_readv"):
    _libc.process_vm_readv.restype = ctypes.c_ssize_t
    _libc.process_vm_readv.argtypes = [
        ctypes.c_int,
        *[ctypes.c_void_p, ctypes.c_ulong] * 2,
        ctypes.c_ulong,
    ]

_tracers: set[int] = set()
_tracers_lock = threading.Lock()


@attrs.frozen
class Credentials:
    """The process at the other end of a Unix socket, as the kernel names it here; `pid` 0: not visible here."""

    pid: int
    uid: int


def peer_credentials(connected: socket.socket) -> Credentials | None:
    """Return the process at the other end; None where the system does not say (macOS)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid, uid)


def can_pull() -> bool:
    """Return whether this system has `process_vm_readv`."""
    return hasattr(_libc, "process_vm_readv") and hasattr(socket, "SO_PEERCRED")


def allow_tracer(pid: int) -> None:
    """Let that process of our user read our memory, where Yama requires it.

    The kernel keeps one tracer for each process, so from the second receiver on any process of our user may.
    """
    if not _YAMA.exists() or not hasattr(_libc, "prctl"):
        return
    with _tracers_lock:
        _tracers.add(pid)
        chosen = pid if len(_tracers) == 1 else _ANY_TRACER
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(chosen), 0, 0, 0)


class Nonce:
    """Random bytes in our memory, which only a reader of it can know."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(bytearray(os.urandom(NONCE_BYTES)), np.uint8)

    @property
    def address(self) -> int:
        return int(self._bytes.ctypes.data)

    @property
    def text(self) -> str:
        return self._bytes.tobytes().hex()


@attrs.frozen
class PeerMemory:
    """One arena of another process."""

    pid: int
    base: int
    nbytes: int

    def holds(self, address: int, nonce: bytes) -> bool:
        """Return whether the process has these bytes there, which shows that it is the one that sent their address."""
        found = np.zeros(len(nonce), np.uint8)
        here, there = array("Q", (found.ctypes.data, len(nonce))), array("Q", (address, len(nonce)))
        try:
            self._read(_entries(here), _entries(there), len(nonce), (here, there))
        except OSError:
            return False
        return hmac.compare_digest(found.tobytes(), nonce)

    def readings(self, part: Copies, target: Arena, call_bytes: int) -> Iterator[Callable[[], int]]:
        """Yield calls that copy the runs from the process into our arena, at most `call_bytes` each.

        They raise OSError.
        """
        if not len(part.length):
            return iter(())
        if len(part.length) <= FEW and part.nbytes <= call_bytes:
            lengths = part.length.tolist()
            here = joined_entries((part.destination + np.uint64(target.base)).tolist(), lengths)
            there = joined_entries((part.source + np.uint64(self.base)).tolist(), lengths)
            return iter((functools.partial(self._read, _entries(here), _entries(there), part.nbytes, (here, there)),))
        part = with_short_runs(part, call_bytes)
        borders = list(cut(part.length, call_bytes, IOV_MAX))
        nbytes = np.add.reduceat(part.length, borders[:-1]).tolist()
        local = _Vector(part.destination + np.uint64(target.base), part.length, borders)
        remote = _Vector(part.source + np.uint64(self.base), part.length, borders)
        return (
            functools.partial(self._read, local.of(number), remote.of(number), count, (local, remote))
            for number, count in enumerate(nbytes)
        )

    def _read(self, local: tuple[int, int], remote: tuple[int, int], nbytes: int, _memory: object) -> int:
        """Make one call on the entries at two addresses, which `_memory` keeps. Raises OSError."""
        read = _libc.process_vm_readv(self.pid, *local, *remote, 0)
        if read < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot read the sender's memory: {os.strerror(code)}")
        if read != nbytes:
            raise OSError(errno.EFAULT, f"read {read} of {nbytes} bytes of the sender's memory")
        return int(read)


def _entries(flat: array[int]) -> tuple[int, int]:
    """Return the address and number of iovec entries."""
    address, numbers = flat.buffer_info()
    return address, numbers // 2


class _Vector:
    """One side's runs as iovec entries, neighbours joined, and where each call begins in them.

    Made for all calls at once: numpy releases the GIL in each operation, and getting it back from a busy thread takes a
    turn.
    """

    def __init__(self, addresses: U64, lengths: U64, borders: Sequence[int]) -> None:
        """Join the runs between `borders`: each call's first row, and the number of rows."""
        first = np.ones(len(addresses), np.bool_)
        np.not_equal(addresses[1:], addresses[:-1] + lengths[:-1], out=first[1:])
        first[borders[:-1]] = True
        rows = np.flatnonzero(first)
        self._entries = np.empty((len(rows), 2), np.uint64)
        self._entries[:, 0] = addresses[rows]
        self._entries[:, 1] = np.add.reduceat(lengths, rows)
        self._places = np.searchsorted(rows, borders).tolist()
        self._address = self._entries.ctypes.data

    def of(self, number: int) -> tuple[int, int]:
        """Return the address and number of a call's entries."""
        start, stop = self._places[number : number + 2]
        return self._address + ENTRY_BYTES * start, stop - start
