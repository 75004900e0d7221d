"""TLS over a data connection's TCP: the same bounded waits, and records instead of gathered system calls."""

from __future__ import annotations

import ctypes
import select
import socket
import ssl
import time
from collections.abc import Callable

from pdplane.errors import WireError
from pdplane.transport import vector as iovec
from pdplane.transport.line import ENDED, DataSocket

_RECORD_BYTES = 16 << 10
"""The most that one TLS record carries; shorter runs are gathered before they are encrypted."""
_GATHER_BYTES = 4 * _RECORD_BYTES
_READ, _WRITE = 0x100, 0x200
_WANTS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)

_memory: Callable[[int, int, int], memoryview] = ctypes.pythonapi.PyMemoryView_FromMemory
ctypes.pythonapi.PyMemoryView_FromMemory.restype = ctypes.py_object
ctypes.pythonapi.PyMemoryView_FromMemory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class TlsSocket(DataSocket):
    """A connected TCP socket whose bytes are encrypted after `handshake`; both ends show a certificate of the CA."""

    way = "tls"

    def __init__(
        self, connected: socket.socket, buffer_bytes: int | None, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        super().__init__(connected, buffer_bytes)
        connected.settimeout(0)
        self._tls = context.wrap_socket(connected, server_side=server_side, do_handshake_on_connect=False)
        self._socket = self._tls
        self._is_plain = False
        self._gathered = bytearray(_GATHER_BYTES)

    def handshake(self, deadline_s: float) -> None:
        """Agree on keys. Raises WireError for a peer that speaks no TLS or is not of our CA, and OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except _WANTS as wants:
                self._wait_for(wants, deadline_s)
            except ssl.SSLError as error:
                self._is_plain = True  # so that a peer without TLS can read why it is refused
                reason = getattr(error, "verify_message", None) or error.reason or str(error)
                raise WireError(
                    "tls", f"this data connection asks for TLS with a certificate of its CA: {reason}"
                ) from error
            else:
                return

    @property
    def has_buffered(self) -> bool:
        return not self._is_plain and self._tls.pending() > 0

    def wait(self, event: int, deadline_s: float | None) -> None:
        if event == select.POLLIN and self.has_buffered:
            self.check()
        else:
            super().wait(event, deadline_s)

    def read(self, view: memoryview, deadline_s: float) -> None:
        while len(view):
            try:
                count = self._tls.recv_into(view)
            except _WANTS as wants:
                self._wait_for(wants, deadline_s)
                continue
            except ssl.SSLEOFError:
                count = 0
            self.check()
            if not count:
                raise ConnectionResetError(f"{ENDED}; it may not know the CA of our certificate")
            view = view[count:]
            if len(view) and time.monotonic() > deadline_s:
                raise TimeoutError("the peer stalled")

    def read_available(self) -> bytes:
        try:
            data = self._tls.recv(4096)
        except _WANTS:
            return b""
        if not data:
            self.check()
            raise ConnectionResetError(ENDED)
        return data

    def write(self, data: bytes, deadline_s: float) -> None:
        view = memoryview(data)
        while len(view):
            try:
                view = view[socket.socket.send(self._tls, view) if self._is_plain else self._tls.send(view) :]
            except _WANTS as wants:
                self._wait_for(wants, deadline_s)
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline_s)

    def write_vector(self, cursor: iovec.Cursor, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        while cursor.left:
            self.check()
            try:
                cursor.advance(self._send, self.descriptor)
            except BlockingIOError:
                self.wait(select.POLLOUT, deadline_s)
            else:
                deadline_s = time.monotonic() + within_s

    def receive_vector(self, cursor: iovec.Cursor) -> bool:
        try:
            moved, full = cursor.advance(self._receive, self.descriptor)
        except BlockingIOError:
            return False
        if not moved:
            self.check()
            raise ConnectionResetError(ENDED)
        return full

    def _shut_down(self) -> None:
        # Not `SSLSocket.shutdown`: that would let the thread that reads take encrypted bytes for plain ones.
        socket.socket.shutdown(self._tls, socket.SHUT_RDWR)

    def _wait_for(self, wants: OSError, deadline_s: float) -> None:
        self.wait(select.POLLIN if isinstance(wants, ssl.SSLWantReadError) else select.POLLOUT, deadline_s)

    def _send(self, _descriptor: int, address: int, count: int) -> int:
        """Encrypt and send iovec entries; return how many bytes were taken. Raises BlockingIOError for none.

        OpenSSL sends one record a call, and wants to be given again what it could not send: the next call begins there,
        with as many bytes or more.
        """
        runs, moved, index = _runs(address, count), 0, 0
        try:
            while index < count:
                chunk, index = self._chunk(runs, index, count)
                while chunk:
                    sent = self._tls.send(chunk)
                    moved += sent
                    chunk = chunk[sent:]
        except _WANTS:
            if not moved:
                raise BlockingIOError from None
        return moved

    def _chunk(self, runs: memoryview, index: int, count: int) -> tuple[memoryview, int]:
        """Return the next long run, or the next short ones gathered, and the index behind them."""
        length = runs[2 * index + 1]
        if length >= _RECORD_BYTES:
            return _memory(runs[2 * index], length, _READ), index + 1
        done = 0
        while length < _RECORD_BYTES and done + length <= _GATHER_BYTES:
            self._gathered[done : done + length] = _memory(runs[2 * index], length, _READ)
            done, index = done + length, index + 1
            if index == count:
                break
            length = runs[2 * index + 1]
        return memoryview(self._gathered)[:done], index

    def _receive(self, _descriptor: int, address: int, count: int) -> int:
        """Decrypt into iovec entries what has come; return how many bytes. Raises BlockingIOError for none yet."""
        runs, moved = _runs(address, count), 0
        try:
            for index in range(count):
                view = _memory(runs[2 * index], runs[2 * index + 1], _WRITE)
                while view:
                    got = self._tls.recv_into(view)
                    if not got:
                        return moved
                    moved += got
                    view = view[got:]
        except _WANTS:
            if not moved:
                raise BlockingIOError from None
        return moved


def _runs(address: int, count: int) -> memoryview:
    """Return iovec entries: addresses and lengths by turns."""
    return _memory(address, count * iovec.ENTRY_BYTES, _READ).cast("Q")
