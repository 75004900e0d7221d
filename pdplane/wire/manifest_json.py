"""The manifest as JSON (frame 2 of a pre-allocation), at most 2 MiB.

    {"groups": [{"group_id": text, "block_ids": [whole, ...]}, ...], "prefix_len": whole, "prompt_len": whole}

Extra keys are ignored. Only the form is checked here; pdplane.kv.manifest checks it against a layout.
"""

from __future__ import annotations

import attrs

from pdplane.errors import LocalProtocolError
from pdplane.ids import GroupId
from pdplane.kv.manifest import Manifest, ManifestGroup
from pdplane.wire.json_value import Value, parse, write
from pdplane.wire.preallocation import MAX_MANIFEST


def encode_manifest(manifest: Manifest) -> bytes:
    """Canonical bytes; LocalProtocolError beyond 2 MiB."""
    data = write(attrs.asdict(manifest))
    if len(data) > MAX_MANIFEST:
        raise LocalProtocolError(f"the manifest's JSON has {len(data)} bytes, more than {MAX_MANIFEST}")
    return data


def decode_manifest(data: bytes) -> Manifest:
    """Parse; WireError names the value at fault."""
    root = parse(data, "manifest", MAX_MANIFEST)
    return Manifest(
        tuple(_group(entry) for entry in root.member("groups").items()),
        root.member("prefix_len").whole(),
        root.member("prompt_len").whole(),
    )


def _group(entry: Value) -> ManifestGroup:
    return ManifestGroup(GroupId(entry.member("group_id").text()), entry.member("block_ids").wholes())
