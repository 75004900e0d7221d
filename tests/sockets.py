"""Facts of this process's TCP connections that no API of ours tells."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import pytest


def sends_at_once(port: int) -> list[bool]:
    """For each end that this process has of the port's TCP connections: whether small writes leave without a wait."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor, or a socket that is not connected
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as end:
                    if _is_of(end, port):
                        found.append(bool(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    return found


def _is_of(end: socket.socket, port: int) -> bool:
    is_ip = end.family in (socket.AF_INET, socket.AF_INET6)
    return is_ip and port in (end.getsockname()[1], end.getpeername()[1])


def name_two_addresses(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a host name have an address where nobody listens, and behind it 127.0.0.1."""
    look_up = socket.getaddrinfo

    def answer(host: str, *args: Any, **named: Any) -> list[Any]:  # noqa: ANN401  (whatever look-ups take)
        hosts = ("127.0.0.99", "127.0.0.1") if host == name else (host,)
        return [found for each in hosts for found in look_up(each, *args, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
