"""Names of prefill ranks to addresses."""

from __future__ import annotations

import asyncio
import socket

import pytest

from pdplane.control.lookup import find_address
from tests.sockets import name_two_addresses


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
