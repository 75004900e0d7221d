"""Names of prefill ranks to addresses."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import pdplane
from pdplane.control.lookup import find_address
from pdplane.net import Names
from tests.sockets import name_two_addresses, silent_name_server

PRODUCT = Path(pdplane.__file__).parent


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "192.0.2.1"])
def test_an_address_is_not_looked_up_and_not_tried(address: str) -> None:
    assert asyncio.run(find_address(address, 1, 1.0)) == address


def test_a_name_becomes_the_address_that_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(find_address("localhost", listener.getsockname()[1], 5.0)) == "127.0.0.1"


def test_every_address_of_a_name_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name_two_addresses(monkeypatch, "two.test")
        assert asyncio.run(find_address("two.test", listener.getsockname()[1], 5.0)) == "127.0.0.1"


def test_a_name_where_nobody_listens_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="cannot connect to localhost"):
            asyncio.run(find_address("localhost", unused.getsockname()[1], 5.0))


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "exa mple", "x" * 300, ""])
def test_what_is_no_name_says_so(name: str) -> None:
    with pytest.raises(OSError, match=r"no known host name|has no address|cannot connect"):
        asyncio.run(find_address(name, 1, 5.0))


def test_a_silent_name_server_is_waited_for_no_longer_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = silent_name_server(monkeypatch)
    names = Names(limit=2)
    ways: list[Callable[[], object]] = [
        lambda: asyncio.run(find_address("slow.test", 1, 0.05)),
        lambda: names.find("slow.test", 1, 0.05),
        lambda: names.connect("slow.test", 1, 0.05),
    ]
    for way in ways:
        with pytest.raises(OSError, match=r"no name server answered for slow\.test in 0\.05 s"):
            way()
    with pytest.raises(ConnectionAbortedError):
        Names().find("slow.test", 1, 60, is_over=lambda: True)
    with pytest.raises(OSError, match="too many host names"):
        names.find("other.test", 1, 60)
    assert names.find("127.0.0.1", 1, 0)
    answers.set()
    assert Names().find("slow.test", 1, 60)[0][4] == ("127.0.0.1", 1)


def test_names_are_looked_up_in_one_place() -> None:
    """Else one of them would wait for a name server without a deadline, or on a thread that others need."""
    looks_up = re.compile(r"getaddrinfo|gethostby|create_connection|open_connection\((?!address)")
    files = [path for path in PRODUCT.rglob("*.py") if not {"bench", "testing"} & set(path.parts)]
    assert [path.name for path in files if looks_up.search(path.read_text())] == ["net.py"]
