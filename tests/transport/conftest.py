"""Both ends of each transport, closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transport.ends import Ends

FENCED = ("loopback", "tcp", "unix", "pull", "tls")
"""Every transport that lands through the fence; one-sided ones keep to less and have their own tests."""


@pytest.fixture(params=FENCED)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Ends]:
    made = Ends("tcp")
    yield made
    made.close()


@pytest.fixture
def pulled() -> Iterator[Ends]:
    made = Ends("pull")
    yield made
    made.close()
