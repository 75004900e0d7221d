"""Both ends of each transport, closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdplane.transport.registry import TRANSPORTS
from tests.transport.ends import Ends


@pytest.fixture(params=sorted(TRANSPORTS))
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


@pytest.fixture
def tcp() -> Iterator[Ends]:
    made = Ends("tcp")
    yield made
    made.close()
