"""Reading another process's memory: `process_vm_readv`, on Linux, between processes of one user.

A sender on the same host need not copy its bytes into a socket: it names them, and the receiver copies
them straight into its arena. The kernel allows that to whoever may trace the process: the same user (and,
under Yama, only a tracer that the process has named). Who the process is comes from the kernel too
(SO_PEERCRED), and a nonce in its memory proves that the number means the same process on both sides.
Nothing here ever writes into another process.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64, Copies
from pdplane.transport.iovec import merge

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
    """Who is at the other end; None where the system does not say (macOS)."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Credentials(pid, uid)


def can_pull() -> bool:
    """Whether this system has the call at all."""
    return hasattr(_libc, "process_vm_readv") and hasattr(socket, "SO_PEERCRED")


def allow_tracer(pid: int) -> None:
    """Let that process of our user read our memory, where Yama asks for it.

    The kernel keeps one tracer for each process: from the second receiver on it is any process of our user.
    """
    if not _YAMA.exists() or not hasattr(_libc, "prctl"):
        return
    with _tracers_lock:
        _tracers.add(pid)
        chosen = pid if len(_tracers) == 1 else _ANY_TRACER
        _libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(chosen), 0, 0, 0)


class Nonce:
    """Random bytes in our memory that only a reader of it can know."""

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
        """Whether the process has these bytes there: it is the one that told us of them."""
        found = np.zeros(len(nonce), np.uint8)
        one = np.array([len(nonce)], np.uint64)
        try:
            _read(self.pid, _vector(np.array([found.ctypes.data], np.uint64), one), _vector(_u64(address), one))
        except OSError:
            return False
        return hmac.compare_digest(found.tobytes(), nonce)

    def read(self, part: Copies, target: Arena) -> int:
        """Copy the runs from the process's arena into ours in one call of at most 1,024. Raises OSError."""
        local = _vector(*merge(part.destination + np.uint64(target.base), part.length))
        remote = _vector(*merge(part.source + np.uint64(self.base), part.length))
        read, wanted = _read(self.pid, local, remote), part.nbytes
        if read != wanted:
            raise OSError(errno.EFAULT, f"read {read} of {wanted} bytes of the sender's memory")
        return read


def _u64(value: int) -> U64:
    return np.array([value], np.uint64)


def _vector(addresses: U64, lengths: U64) -> U64:
    vector = np.empty((len(addresses), 2), np.uint64)
    vector[:, 0], vector[:, 1] = addresses, lengths
    return vector


def _read(pid: int, local: U64, remote: U64) -> int:
    found = _libc.process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot read the sender's memory: {os.strerror(code)}")
    return int(found)
