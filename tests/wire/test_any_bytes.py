"""Any bytes whatever give a message or a WireError."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings

from pdplane import wire
from pdplane.errors import WireError
from pdplane.kv.manifest import validate_manifest
from tests.samples import two_group_layout
from tests.strategies import MESSAGES, broken_messages

_LAYOUT = two_group_layout()

_OF_FRAMES: list[Callable[[list[bytes]], object]] = [
    wire.decode_registration,
    wire.decode_route,
    wire.decode_preallocation,
    wire.preallocation_route,
    wire.decode_status,
    wire.decode_notice,
    wire.is_notice,
    wire.is_registration,
]


def _read_everything(frames: list[bytes]) -> None:
    for read in _OF_FRAMES:
        with suppress(WireError):
            read(frames)
    for frame in frames:
        with suppress(WireError):
            layout = wire.decode_layout(frame)
            assert wire.decode_layout(wire.encode_layout(layout)) == layout
        with suppress(WireError):
            manifest = wire.decode_manifest(frame)
            assert wire.decode_manifest(wire.encode_manifest(manifest)) == manifest
            validate_manifest(manifest, _LAYOUT)


@given(broken_messages())
def test_any_bytes(frames: list[bytes]) -> None:
    _read_everything(frames)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(broken_messages())
@settings(max_examples=20_000)
def test_any_bytes_for_long(frames: list[bytes]) -> None:
    _read_everything(frames)


def test_the_unbroken_messages_are_read() -> None:
    readers = [wire.decode_registration, wire.decode_preallocation, wire.decode_status] + [wire.decode_notice] * 3
    for read, frames in zip(readers, MESSAGES, strict=True):
        assert read(frames)
