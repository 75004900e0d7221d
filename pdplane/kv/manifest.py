"""A room's blocks: which block ids of each group hold the tokens from `prefix_len` to `prompt_len`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from pdplane.errors import LocalProtocolError, WireError
from pdplane.ids import GroupId
from pdplane.kv.layout import FULL_SUFFIX, SLIDING_WINDOW, GroupSpec, Layout

MAX_TOKENS = 2**63 - 1


@attrs.frozen
class ManifestGroup:
    """Block ids of one group in slot order."""

    group_id: GroupId
    block_ids: tuple[int, ...]


@attrs.frozen
class Manifest:
    """Decode's offer for one room; groups stand in the order of the layout's group specs."""

    groups: tuple[ManifestGroup, ...]
    prefix_len: int
    prompt_len: int

    def blocks(self) -> dict[GroupId, tuple[int, ...]]:
        """Return the block ids of each group."""
        return {group.group_id: group.block_ids for group in self.groups}


def logical_slots(spec: GroupSpec, prefix_len: int, prompt_len: int) -> range:
    """Return the slots of a group's block table that a transfer of the tokens [prefix_len, prompt_len) takes.

    A suffix group takes every slot from the prefix on (a sliding one only those inside the window); a snapshot
    group takes the one slot of the last token. Rules: docs/legacy_wire.md section 5.1.
    """
    tokens = spec.block_granularity
    if spec.transfer_policy != FULL_SUFFIX:
        last = (prompt_len - 1) // tokens
        return range(last, last + 1)
    start = prefix_len // tokens
    if spec.retention == SLIDING_WINDOW and spec.sliding_window_tokens is not None:
        start = max(start, max(0, prompt_len - spec.sliding_window_tokens + 1) // tokens)
    return range(start, -(-prompt_len // tokens))


def blocks_needed(layout: Layout, prompt_len: int, prefix_len: int = 0) -> dict[GroupId, int]:
    """Return how many blocks of each group hold a prompt's tokens from `prefix_len` on, as `Pool.allocate` takes it."""
    return {spec.group_id: _length(logical_slots(spec, prefix_len, prompt_len)) for spec in layout.group_specs}


def blocks_behind(
    layout: Layout, blocks: Mapping[GroupId, Sequence[int]], prefix_len: int, prompt_len: int
) -> dict[GroupId, Sequence[int]]:
    """Return those of a whole prompt's blocks, in slot order, that hold the tokens from `prefix_len` on."""
    found: dict[GroupId, Sequence[int]] = {}
    for spec in layout.group_specs:
        first = logical_slots(spec, prefix_len, prompt_len).start - logical_slots(spec, 0, prompt_len).start
        found[spec.group_id] = blocks[spec.group_id][first:]
    return found


def build_manifest(
    layout: Layout, blocks: Mapping[GroupId, Sequence[int]], prefix_len: int, prompt_len: int
) -> Manifest:
    """Return a manifest of ours, from each group's blocks in slot order. Raises LocalProtocolError if it is invalid."""
    if set(blocks) != {spec.group_id for spec in layout.group_specs}:
        raise LocalProtocolError("the blocks' groups are not the layout's groups")
    groups = tuple(ManifestGroup(spec.group_id, tuple(blocks[spec.group_id])) for spec in layout.group_specs)
    manifest = Manifest(groups, prefix_len, prompt_len)
    try:
        validate_manifest(manifest, layout)
    except WireError as error:
        raise LocalProtocolError(str(error)) from error
    return manifest


def validate_manifest(manifest: Manifest, layout: Layout) -> None:
    """Raise WireError unless the manifest is a whole offer of decode's blocks in decode's layout.

    Types, negative lengths and duplicate blocks are checked beyond what legacy receivers check. Two groups' blocks may
    be the same bytes, since legacy decode ranks send such manifests.
    """
    _check_window(manifest, layout)
    if [group.group_id for group in manifest.groups] != [spec.group_id for spec in layout.group_specs]:
        raise WireError("manifest.groups", "manifest.groups do not stand in the order of the layout's groups")
    for group, spec in zip(manifest.groups, layout.group_specs, strict=True):
        path = f"manifest.groups[{group.group_id!r}].block_ids"
        wanted = _length(logical_slots(spec, manifest.prefix_len, manifest.prompt_len))
        if len(group.block_ids) != wanted:
            raise WireError(path, f"{path} has {len(group.block_ids)} blocks where the window takes {wanted}")
        _check_ids(group.block_ids, layout.group(group.group_id).page_count, path)


def _check_window(manifest: Manifest, layout: Layout) -> None:
    for name, length in (("prefix_len", manifest.prefix_len), ("prompt_len", manifest.prompt_len)):
        if type(length) is not int or not 0 <= length <= MAX_TOKENS:
            raise WireError(f"manifest.{name}", f"manifest.{name} must be a whole number of 0..{MAX_TOKENS}")
    if manifest.prefix_len >= manifest.prompt_len:
        raise WireError("manifest.prompt_len", "manifest.prompt_len must be larger than prefix_len")
    if manifest.prefix_len % layout.prefix_granularity:
        raise WireError("manifest.prefix_len", "manifest.prefix_len is no multiple of the layout's prefix_granularity")


def check_window(layout: Layout, prefix_len: int, prompt_len: int) -> None:
    """Raise LocalProtocolError for prefix and prompt lengths that no manifest of the layout can have."""
    try:
        _check_window(Manifest((), prefix_len, prompt_len), layout)
    except WireError as error:
        raise LocalProtocolError(str(error)) from error


def _check_ids(block_ids: tuple[int, ...], page_count: int, path: str) -> None:
    if not block_ids:
        return
    if set(map(type, block_ids)) != {int}:
        raise WireError(path, f"{path} holds something that is no whole number")
    if min(block_ids) < 1 or max(block_ids) >= page_count:
        raise WireError(path, f"{path} holds an id outside 1..{page_count - 1}")
    if len(set(block_ids)) != len(block_ids):
        raise WireError(path, f"{path} holds a block twice")


def _length(slots: range) -> int:
    return max(0, slots.stop - slots.start)  # len() overflows beyond sys.maxsize


# ---- Which blocks of a room are ready after a chunk of the prompt, and where they stand in decode's manifest
#
# A chunk completes the blocks that its end has passed; the last one also completes the block that the prompt ends in,
# and every snapshot. Rules: docs/legacy_wire.md section 9.


def chunk_positions(spec: GroupSpec, prefix_len: int, prompt_len: int, chunk: range) -> range:
    """Return the positions of a group's blocks in the manifest that the tokens of `chunk` complete.

    Positions count from the manifest's first block of the group. A room's first chunk begins at `prefix_len` at
    the latest, so that blocks which prefill took from a cache of its own belong to it. The lengths are trusted.
    """
    slots = logical_slots(spec, prefix_len, prompt_len)
    count, final = max(0, slots.stop - slots.start), chunk.stop == prompt_len
    if spec.transfer_policy != FULL_SUFFIX:
        return range(count if final else 0)
    tokens = spec.block_granularity
    end = -(-chunk.stop // tokens) if final else chunk.stop // tokens
    first = min(count, max(0, chunk.start // tokens - slots.start))
    return range(first, max(first, min(count, end - slots.start)))


def chunk_blocks(
    layout: Layout, blocks: Mapping[GroupId, Sequence[int]], prefix_len: int, prompt_len: int, chunk: range
) -> dict[GroupId, Sequence[int]]:
    """Return the part of each group's blocks (all of a manifest's, in slot order) that this chunk completes.

    Raises LocalProtocolError for a window that no manifest has, or a chunk outside it.
    """
    check_chunk(layout, prefix_len, prompt_len, chunk)
    found: dict[GroupId, Sequence[int]] = {}
    for spec in layout.group_specs:
        positions = chunk_positions(spec, prefix_len, prompt_len, chunk)
        found[spec.group_id] = blocks[spec.group_id][positions.start : positions.stop]
    return found


def check_chunk(layout: Layout, prefix_len: int, prompt_len: int, chunk: range) -> None:
    """Raise LocalProtocolError unless `chunk` is a part of the prompt of a possible window."""
    check_window(layout, prefix_len, prompt_len)
    if not 0 <= chunk.start < chunk.stop <= prompt_len or chunk.step != 1:
        raise LocalProtocolError(f"the tokens {chunk.start}..{chunk.stop} are no chunk of a prompt of {prompt_len}")
