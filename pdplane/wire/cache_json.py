"""The layout and the manifest as JSON.

The layout (frame 5 of a registration, `cache_layout` of the rendezvous), at most 262,144 bytes:

    {"plan": {"prefix_granularity", "lcm_block_bytes", "num_lcm_blocks", "groups": [...], "planes": [...],
              "fields": [...]},
     "group_specs": [...],
     "transfer_schema": {"fields": [{"field_id", "partition": {"axis", "global_extent", "global_parts"}}]}}

The entries' keys are the attributes of Group, Plane, Field and GroupSpec in their order; absent values are null.
Canonical bytes have no blanks and keep this key order. Extra keys are ignored at the top, in `plan` and in
`transfer_schema`, and refused inside groups, planes, fields and group specs. Rules: docs/legacy_wire.md section 4.

The manifest (frame 2 of a pre-allocation), at most 2 MiB; extra keys are ignored. Rules: docs/legacy_wire.md section
5.1.

    {"groups": [{"group_id": text, "block_ids": [whole, ...]}, ...], "prefix_len": whole, "prompt_len": whole}
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import FieldId, GroupId
from pdplane.kv.layout import HISTORY, Field, Group, GroupSpec, Layout, Partition, Plane, validate_layout
from pdplane.kv.manifest import Manifest, ManifestGroup
from pdplane.net import JsonValue, parse_json, write_json
from pdplane.wire.frames import MAX_LAYOUT, MAX_MANIFEST

_PLAN_NUMBERS = ("prefix_granularity", "lcm_block_bytes", "num_lcm_blocks")


def encode_layout(layout: Layout) -> bytes:
    """Return canonical bytes; raise LocalProtocolError if the layout is invalid or too large for a registration."""
    try:
        validate_layout(layout)
    except WireError as error:
        raise LocalProtocolError(str(error)) from error
    plan: dict[str, object] = {name: getattr(layout, name) for name in _PLAN_NUMBERS}
    for name in ("groups", "planes", "fields"):
        plan[name] = [attrs.asdict(entry) for entry in getattr(layout, name)]
    schema = [{"field_id": field_id, "partition": attrs.asdict(partition)} for field_id, partition in layout.partitions]
    data = write_json(
        {
            "plan": plan,
            "group_specs": [attrs.asdict(spec) for spec in layout.group_specs],
            "transfer_schema": {"fields": schema},
        }
    )
    if len(data) > MAX_LAYOUT:
        raise LocalProtocolError(f"the layout's JSON has {len(data)} bytes, more than {MAX_LAYOUT}")
    return data


@lru_cache(maxsize=16)  # every room's look-up brings the same bytes
def decode_layout(data: bytes) -> Layout:
    """Parse and validate. Raises WireError, which names the value at fault."""
    layout = parse_layout(data)
    validate_layout(layout)
    return layout


def parse_layout(data: bytes) -> Layout:
    """Parse, and check the form but not the geometry. Raises WireError."""
    root = parse_json(data, "layout", MAX_LAYOUT)
    _refuse_other_generations(root)
    plan = root.member("plan")
    return Layout(
        **{name: plan.member(name).whole(1) for name in _PLAN_NUMBERS},
        groups=tuple(_group(entry) for entry in plan.member("groups").items()),
        planes=tuple(_plane(entry) for entry in plan.member("planes").items()),
        fields=tuple(_field(entry) for entry in plan.member("fields").items()),
        group_specs=tuple(_spec(entry) for entry in root.member("group_specs").items()),
        partitions=tuple(_partition(entry) for entry in root.member("transfer_schema").member("fields").items()),
        given_steps=(),
    )


_NEWER_KEYS = frozenset({"shard_count", "replayable", "replay_checkpoint_group", "max_state_lag_tokens"})


def _refuse_other_generations(root: JsonValue) -> None:
    """Raise WireError for the layout of a legacy engine whose revision pdplane does not speak, known by its keys."""
    spoken = "pdplane speaks that of 2026-08-16 and the weeks after"
    specs = root.member("group_specs")
    newer = {key for entry in specs.items() if isinstance(entry.json, dict) for key in entry.json.keys() & _NEWER_KEYS}
    if newer:
        specs.refuse(f"are of a newer generation of legacy engines ({', '.join(sorted(newer))}): {spoken}")
    if root.optional("field_dtypes") is not None:
        fields = root.member("plan").member("fields")
        if any(isinstance(entry.json, dict) and "dtype" not in entry.json for entry in fields.items()):
            fields.refuse(f"are of an older generation of legacy engines (field_dtypes): {spoken}")


def _keys(kind: type[Any]) -> frozenset[str]:
    return frozenset(attribute.name for attribute in attrs.fields(kind))


_GROUP_KEYS, _PLANE_KEYS, _FIELD_KEYS, _SPEC_KEYS = map(_keys, (Group, Plane, Field, GroupSpec))


def _group(entry: JsonValue) -> Group:
    entry.only(_GROUP_KEYS)
    return Group(
        GroupId(entry.member("group_id").text()),
        entry.member("cache_blocks_per_lcm_block").whole(1),
        entry.member("page_count").whole(1),
    )


def _plane(entry: JsonValue) -> Plane:
    entry.only(_PLANE_KEYS)
    return Plane(
        entry.member("plane_id").text(),
        entry.member("bytes_per_lcm_block").whole(1),
        entry.member("arena_offset_bytes").whole(),
    )


def _field(entry: JsonValue) -> Field:
    entry.only(_FIELD_KEYS)
    return Field(
        GroupId(entry.member("group_id").text()),
        FieldId(entry.member("field_id").text()),
        entry.member("plane_id").text(),
        entry.member("shape").wholes(1),
        entry.member("dtype").text(),
        entry.member("field_offset_bytes").whole(),
        entry.member("page_stride_bytes").whole(1),
    )


def _spec(entry: JsonValue) -> GroupSpec:
    entry.only(_SPEC_KEYS)
    family, policy = entry.optional("family"), entry.optional("transfer_policy")
    return GroupSpec(
        GroupId(entry.member("group_id").text()),
        entry.member("retention").text(),
        rows_per_page=_optional_whole(entry, "rows_per_page"),
        entry_stride_tokens=_optional_whole(entry, "entry_stride_tokens"),
        sliding_window_tokens=_optional_whole(entry, "sliding_window_tokens"),
        family=family.text() if family else HISTORY,
        transfer_policy=policy.text() if policy else None,
        checkpoint_granularity=_optional_whole(entry, "checkpoint_granularity"),
    )


def _optional_whole(entry: JsonValue, key: str) -> int | None:
    value = entry.optional(key)
    return None if value is None else value.whole(1)


def _partition(entry: JsonValue) -> tuple[FieldId, Partition]:
    partition = entry.member("partition")
    return FieldId(entry.member("field_id").text()), Partition(
        partition.member("axis").whole(),
        partition.member("global_extent").whole(1),
        partition.member("global_parts").wholes(1),
    )


# ---- The manifest. Only its form is checked here; pdplane.kv.manifest checks it against a layout


# The most that JSON makes of a character, of a number with its comma, and of the rest of a group.
_NAME_BYTES, _NUMBER_BYTES, _FRAME_BYTES = 12, 21, 128


def encode_manifest(manifest: Manifest) -> bytes:
    """Return canonical bytes; raise LocalProtocolError beyond 2 MiB."""
    groups = [{"group_id": group.group_id, "block_ids": group.block_ids} for group in manifest.groups]
    data = write_json({"groups": groups, "prefix_len": manifest.prefix_len, "prompt_len": manifest.prompt_len})
    if len(data) > MAX_MANIFEST:
        raise LocalProtocolError(f"the manifest's JSON has {len(data)} bytes, more than {MAX_MANIFEST}")
    return data


def check_manifest(manifest: Manifest) -> None:
    """Raise LocalProtocolError for a manifest that no frame can carry; encode only what may be near the limit."""
    names = sum(len(group.group_id) for group in manifest.groups)
    ids = sum(len(group.block_ids) for group in manifest.groups)
    if _NAME_BYTES * names + _NUMBER_BYTES * ids + _FRAME_BYTES * (len(manifest.groups) + 1) > MAX_MANIFEST:
        encode_manifest(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Parse, and check the form. Raises WireError, which names the value at fault."""
    root = parse_json(data, "manifest", MAX_MANIFEST)
    return Manifest(
        tuple(_manifest_group(entry) for entry in root.member("groups").items()),
        root.member("prefix_len").whole(),
        root.member("prompt_len").whole(),
    )


def _manifest_group(entry: JsonValue) -> ManifestGroup:
    return ManifestGroup(GroupId(entry.member("group_id").text()), entry.member("block_ids").wholes())
