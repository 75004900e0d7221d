"""Whole pre-allocations with the manifest inside, as the legacy peer reads them."""

from __future__ import annotations

import pytest

from pdplane import wire
from pdplane.errors import WireError
from pdplane.ids import Room, SessionId
from pdplane.kv.manifest import Manifest
from pdplane.messages import Preallocation
from tests.golden import Case, each, frames, refused

# Rows that the legacy peer accepts and we refuse, with the reason.
STRICTER = {
    "block_ids_unchecked_types": "no block ids; the legacy peer fails later, in the middle of a copy",
}


def _read(case: Case) -> tuple[Preallocation, Manifest | None]:
    found = wire.decode_preallocation(frames(case["input"]["frames"]))
    return found, wire.decode_manifest(found.manifest) if found.manifest else None


@each("legacy/preallocations", lambda case: not refused(case) and case["name"] not in STRICTER)
def test_accepted(case: Case) -> None:
    expected = case["expected"]
    found, manifest = _read(case)
    assert (found.room, found.session) == (int(expected["room_s"]), expected["session"])
    assert (manifest is None) == expected["is_dummy"]
    if manifest is not None:
        assert wire.encode_manifest(manifest).hex() == expected["manifest_wire_hex"]
    assert wire.encode_preallocation(found) == frames(case["input"]["frames"])


@each("legacy/preallocations", refused)
def test_refused(case: Case) -> None:
    with pytest.raises(WireError) as caught:
        _read(case)
    assert caught.value.field.partition(".")[0] == case["expected"]["error"]["category"]


@each("legacy/preallocations", lambda case: case["name"] in STRICTER)
def test_each_reason_is_needed(case: Case) -> None:
    assert not refused(case)
    with pytest.raises(WireError):
        _read(case)


def test_a_manifest_beyond_two_mebibytes_is_refused() -> None:
    given = Preallocation(Room(1), SessionId("s:1"), b" " * (2 * 1024 * 1024 + 1))
    with pytest.raises(WireError, match="2097152"):
        wire.decode_preallocation(wire.encode_preallocation(given))
