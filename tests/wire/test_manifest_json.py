"""The manifest's JSON."""

from __future__ import annotations

import json

import pytest

from pdplane import wire
from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import GroupId
from pdplane.kv.manifest import Manifest, ManifestGroup
from tests.golden import Case, each, wire_bytes


@each("legacy/manifests", lambda case: "wire_hex" in case["expected"])
def test_written_canonically(case: Case) -> None:
    data = wire_bytes(case["input"]["manifest"])
    assert data.hex() == case["expected"]["wire_hex"]
    assert wire.encode_manifest(wire.decode_manifest(data)) == data


def test_any_spelling_is_read() -> None:
    manifest = Manifest((ManifestGroup(GroupId("a"), (3, 1)), ManifestGroup(GroupId("b"), ())), 0, 5)
    found = json.loads(wire.encode_manifest(manifest))
    found["later"] = {"ignored": [1.5, None]}
    spelled = json.dumps(found, indent=2, sort_keys=True).encode("utf-16")
    assert wire.decode_manifest(spelled) == manifest


GOOD = '{"groups":[{"group_id":"a","block_ids":[1]}],"prefix_len":0,"prompt_len":1}'


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("[1]", "[true]", "manifest.groups[0].block_ids"),
        ("[1]", "[1.0]", "manifest.groups[0].block_ids"),
        ("[1]", "[-1]", "manifest.groups[0].block_ids"),
        ("[1]", '["1"]', "manifest.groups[0].block_ids"),
        ("[1]", "[9223372036854775808]", "manifest.groups[0].block_ids"),
        ("[1]", "null", "manifest.groups[0].block_ids"),
        ('"a"', "7", "manifest.groups[0].group_id"),
        (':0,"', ':-4,"', "manifest.prefix_len"),
        (':0,"', ':false,"', "manifest.prefix_len"),
        (":1}", ':"1"}', "manifest.prompt_len"),
        (":1}", ":1e3}", "manifest.prompt_len"),
        (":1}", ":" + "1" * 30 + "}", "manifest.prompt_len"),
        (":1}", ":" + "1" * 5000 + "}", "manifest"),
        (',"prompt_len":1', "", "manifest.prompt_len"),
        ('"prefix_len":0', '"prefix_len":0,"prefix_len":0', "manifest"),
    ],
)
def test_refused_with_the_field_named(old: str, new: str, field: str) -> None:
    assert old in GOOD
    with pytest.raises(WireError) as caught:
        wire.decode_manifest(GOOD.replace(old, new).encode())
    assert caught.value.field == field


def test_a_manifest_beyond_two_mebibytes_is_not_written() -> None:
    with pytest.raises(LocalProtocolError, match="2097152"):
        wire.encode_manifest(Manifest((ManifestGroup(GroupId("a"), tuple(range(400_000))),), 0, 1))
