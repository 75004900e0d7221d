"""A Unix socket that listens in a directory which only its user can enter."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import tempfile
from pathlib import Path

import attrs

logger = logging.getLogger(__name__)

_BACKLOG = 128


@attrs.frozen(eq=False)
class UnixDoor:
    """The listening socket and its path; `close` removes both."""

    listener: socket.socket
    path: str

    def close(self) -> None:
        self.listener.close()
        shutil.rmtree(Path(self.path).parent, ignore_errors=True)


def open_door() -> UnixDoor | None:
    """Listen under a fresh path; None when there is no place for one: senders then stay on TCP."""
    try:
        folder = tempfile.mkdtemp(prefix="pdplane-")  # mode 0700
    except OSError as error:
        logger.warning("no folder for a Unix socket, peers of this host stay on tcp: %s", error)
        return None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    path = str(Path(folder) / "data")
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
        listener.settimeout(0)
    except OSError as error:  # a path beyond the 104 or 108 bytes of an address, for one
        listener.close()
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        logger.warning("no Unix socket at %s, peers of this host stay on tcp: %s", path, error)
        return None
    return UnixDoor(listener, path)
