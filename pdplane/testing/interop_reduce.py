"""The ranks of one side agree on each poll: the minimum of every room's state, taken by rank 0."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pdplane.errors import ConfigError
from pdplane.ids import Endpoint

_PATIENCE_S = 20.0


class Reduce(Protocol):
    """One collective call a poll."""

    def minimum(self, states: Sequence[int]) -> list[int]:
        """The least state of each room over the ranks; our own when the others are gone."""

    def close(self) -> None: ...


class Alone:
    """Ranks that do not wait for each other."""

    def minimum(self, states: Sequence[int]) -> list[int]:
        return list(states)

    def close(self) -> None:
        """There is nothing to close."""


def join_ranks(where: Endpoint, tp_size: int, tp_rank: int) -> Reduce:
    """Meet the other ranks at rank 0's address; waits for all of them. Raises ConfigError."""
    if where.port <= 0 or tp_size == 1:
        return Alone()
    try:
        return _gather(where, tp_size) if tp_rank == 0 else _Member(_connect(where))
    except OSError as error:
        raise ConfigError(f"the ranks do not meet at {where}: {error}") from error


class _Line:
    """JSON lines over one connection."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_PATIENCE_S)
        self._connection = connection
        self._reader = connection.makefile("rb")

    def send(self, states: Sequence[int]) -> None:
        self._connection.sendall(json.dumps(list(states)).encode() + b"\n")

    def receive(self) -> list[int]:
        line = self._reader.readline()
        if not line:
            raise ConnectionResetError("the rank is gone")
        found: Any = json.loads(line)
        return [int(state) for state in found]

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


class _Leader:
    def __init__(self, lines: list[_Line]) -> None:
        self._lines = lines

    def minimum(self, states: Sequence[int]) -> list[int]:
        try:
            every = [list(states), *(line.receive() for line in self._lines)]
            least = [min(column) for column in zip(*every, strict=True)]
            for line in self._lines:
                line.send(least)
        except OSError:
            self.close()
            return list(states)
        return least

    def close(self) -> None:
        for line in self._lines:
            line.close()
        self._lines = []


class _Member:
    def __init__(self, line: _Line) -> None:
        self._line: _Line | None = line

    def minimum(self, states: Sequence[int]) -> list[int]:
        if self._line is None:
            return list(states)
        try:
            self._line.send(states)
            return self._line.receive()
        except OSError:
            self.close()
            return list(states)

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None


def _gather(where: Endpoint, tp_size: int) -> _Leader:
    family = socket.AF_INET6 if where.is_ipv6 else socket.AF_INET
    with socket.create_server((where.host, where.port), family=family) as server:
        server.settimeout(_PATIENCE_S)
        return _Leader([_Line(server.accept()[0]) for _ in range(tp_size - 1)])


def _connect(where: Endpoint) -> _Line:
    """Rank 0 may start later than we do."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _Line(socket.create_connection((where.host, where.port), _PATIENCE_S))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
