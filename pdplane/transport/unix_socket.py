"""The Unix socket that a receiver offers to senders of its own host.

On Linux its name is abstract (the kernel forgets it with the process, however that ends) and whoever connects
shows its user to the receiver. Elsewhere it is a file in a folder that only its user can enter.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import attrs

from pdplane.net import listen_on

logger = logging.getLogger(__name__)

ABSTRACT = sys.platform == "linux"
_MARK = "@"  # how the greeting writes the zero byte before an abstract name


@attrs.frozen(eq=False)
class UnixListener:
    """The listening socket, its path as the greeting has it, and the folder that goes with it."""

    listener: socket.socket
    path: str
    folder: str | None = None

    def close(self) -> None:
        self.listener.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def address_of(path: str) -> str:
    """Return the address that `connect` takes for a greeting's Unix path."""
    return "\0" + path[1:] if path.startswith(_MARK) else path


def open_unix_listener() -> UnixListener | None:
    """Listen under a new path; return None when there is no place for one, so that senders stay on TCP."""
    folder = None
    try:
        folder = None if ABSTRACT else tempfile.mkdtemp(prefix="pdplane-")  # mode 0700
        path = f"{_MARK}pdplane-{secrets.token_hex(16)}" if folder is None else str(Path(folder) / "data")
        return UnixListener(listen_on(socket.AF_UNIX, address_of(path)), path, folder)
    except OSError as error:  # no folder, or a path beyond the 104 or 108 bytes of an address
        logger.warning("no Unix socket, peers of this host stay on tcp: %s", error)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return None
