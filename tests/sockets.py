"""Facts of this process's TCP connections that no API of ours tells."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
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


def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let no name that ends in .test have an answer, which is 127.0.0.1, before the event is set."""
    look_up, answers = socket.getaddrinfo, threading.Event()

    def answer(host: str, *args: Any, **named: Any) -> list[Any]:  # noqa: ANN401  (whatever look-ups take)
        if not host.endswith(".test"):
            return look_up(host, *args, **named)
        if named.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        answers.wait()
        return look_up("127.0.0.1", *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return answers
