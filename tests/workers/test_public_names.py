"""The package's public names, and what asking for the light ones loads."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from pdplane import workers


@pytest.mark.parametrize("name", workers.__all__)
def test_each_name_is_there_and_documented(name: str) -> None:
    assert inspect.getdoc(getattr(workers, name))


def test_the_client_loads_no_mlx() -> None:
    code = (
        "import sys; from pdplane.workers import Wp30Client, Tx1Token; "
        "print([name for name in ('mlx', 'mlx_lm', 'zmq', 'aiohttp') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        workers.no_such_name  # noqa: B018  (the access is the test)
