"""A room's blocks: which block ids of each group hold the tokens from `prefix_len` to `prompt_len`."""

from __future__ import annotations

import attrs

from pdplane.ids import GroupId


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
