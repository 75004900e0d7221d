"""Whether the real Mooncake engine runs here, and the mark for tests that need it."""

from __future__ import annotations

import importlib.util

import pytest

from pdplane.errors import ConfigError
from pdplane.kv.arena import Arena
from pdplane.transport.mooncake import MooncakeEngine
from pdplane.transport.reports import TransportOptions


def _missing() -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine-non-cuda is not installed"
    try:
        MooncakeEngine("127.0.0.1", Arena.zeros(4096), TransportOptions()).close()
    except ConfigError as wrong:  # the package is there, a shared library of the system is not
        return str(wrong)
    return ""


needs_engine = pytest.mark.skipif(bool(reason := _missing()), reason=reason)
