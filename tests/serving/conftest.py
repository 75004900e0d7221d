"""A fake node served over real HTTP on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pdplane.control.http_thread import HttpThread
from pdplane.ids import Endpoint
from pdplane.serving.routes import decode_app, prefill_app
from tests.serving.fake_node import FakeNode


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def http() -> Iterator[HttpThread]:
    thread = HttpThread("pdplane-http-test")
    thread.start()
    yield thread
    thread.close()


@pytest.fixture
def prefill(http: HttpThread, node: FakeNode) -> Endpoint:
    return http.serve(prefill_app(node), "127.0.0.1", 0)


@pytest.fixture
def decode(http: HttpThread, node: FakeNode) -> Endpoint:
    return http.serve(decode_app(node), "127.0.0.1", 0)
