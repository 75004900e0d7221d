"""Whole registrations, as the legacy peer reads them; the layout inside is read too."""

from __future__ import annotations

import sys

import pytest

from pdplane import wire
from pdplane.errors import RemoteProtocolError, WireError
from pdplane.ids import SessionId
from pdplane.messages import Registration
from tests.golden import Case, each, frames, refused

# Only "layout" is shared with the layout's own reader, which names the value at fault below it.
_FIELD = {category: category for category in ("frame_count", "endpoint", "session", "port", "pointer", "layout")}
_FIELD |= {"tp_size": "tp_size", "tp_rank": "tp_rank"}


@each("legacy/registrations", lambda case: not refused(case))
def test_accepted(case: Case) -> None:
    given, expected = frames(case["input"]["frames"]), case["expected"]
    found = wire.decode_registration(given)
    assert [found.host, found.port, found.session] == [expected["endpoint"], expected["dst_port"], expected["session"]]
    assert found.arena_base == int(expected["dst_ptr_s"])
    assert (found.tp_size, found.tp_rank) == (expected["tp_size"], expected["tp_rank"])
    assert wire.encode_layout(wire.decode_layout(found.layout)).hex() == expected["layout_wire_hex"]
    assert wire.encode_registration(found) == given


@each("legacy/registrations", refused)
def test_refused(case: Case) -> None:
    given, expected = frames(case["input"]["frames"]), case["expected"]
    with pytest.raises(WireError) as caught:
        wire.decode_layout(wire.decode_registration(given).layout)
    assert caught.value.field == _FIELD[expected["error"]["category"]]


@each("legacy/registrations", refused)
def test_a_refusal_can_be_sent_whenever_the_route_is_readable(case: Case) -> None:
    given, expected = frames(case["input"]["frames"]), case["expected"]["reply_route"]
    if expected is None:
        with pytest.raises(RemoteProtocolError):
            wire.decode_route(given)
        return
    route = wire.decode_route(given)
    assert [route.host, route.port, route.session] == [expected["endpoint"], expected["dst_port"], expected["session"]]


def test_arena_base_is_in_native_order() -> None:
    registration = Registration("h", 1, SessionId("s"), 0x0102030405060708, b"x", 1, 0)
    assert wire.encode_registration(registration)[4] == (0x0102030405060708).to_bytes(8, sys.byteorder)
    assert wire.decode_registration(wire.encode_registration(registration)) == registration


def test_the_route_of_a_registration() -> None:
    registration = Registration("fd00::2", 4000, SessionId("[fd00::2]:5000"), 8, b"x", 2, 1)
    assert wire.decode_route(wire.encode_registration(registration)) == registration.route


def test_a_layout_beyond_the_limit_is_refused() -> None:
    given = wire.encode_registration(Registration("h", 1, SessionId("s"), 8, b" " * 262_145, 1, 0))
    with pytest.raises(WireError, match="262144"):
        wire.decode_registration(given)
