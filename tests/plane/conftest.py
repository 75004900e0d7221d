"""Planes on loopback with short deadlines; closed after the test, in the reverse order of their start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdplane.kv.arena import Arena, Pool
from pdplane.kv.layout import Layout
from pdplane.messages import Fingerprint
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from tests.plane.sides import DecodeSide, PrefillSide
from tests.samples import two_group_layout
from tests.waiting import until

StartPrefill = Callable[..., PrefillSide]
StartDecode = Callable[..., DecodeSide]

SHORT: dict[str, Any] = {"bootstrap_timeout_s": 5, "waiting_timeout_s": 5, "tombstone_s": 0.3}


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def start_prefill(opened: contextlib.ExitStack) -> StartPrefill:
    """Start a prefill plane that is ready; keywords are those of its config."""

    def start(layout: Layout | None = None, fingerprint: Fingerprint | None = None, **config: object) -> PrefillSide:
        layout = layout or two_group_layout(num_lcm_blocks=16)
        settings = PrefillConfig(**SHORT | {"bootstrap_port": 0} | config)
        plane = PrefillPlane(settings, layout=layout, arena=Arena.zeros(layout.arena_bytes), fingerprint=fingerprint)
        opened.enter_context(plane)
        until(lambda: plane.ready, "prefill's readiness")
        return PrefillSide(plane, Pool(layout))

    return start


@pytest.fixture
def start_decode(opened: contextlib.ExitStack) -> StartDecode:
    """Start a decode plane; keywords are those of its config."""

    def start(layout: Layout | None = None, fingerprint: Fingerprint | None = None, **config: object) -> DecodeSide:
        layout = layout or two_group_layout(num_lcm_blocks=16)
        arena = Arena.zeros(layout.arena_bytes)
        plane = DecodePlane(DecodeConfig(**SHORT | config), layout=layout, arena=arena, fingerprint=fingerprint)
        opened.enter_context(plane)
        return DecodeSide(plane, Pool(layout))

    return start
