"""Checksums of scattered bytes: xxh3, from the extra `checksum`.

Off by default: TCP and memory have their own. One update a run is made in Python, so small blocks cost more
than the hash itself.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np

from pdplane.kv.arena import Arena
from pdplane.kv.copies import U64
from pdplane.transport.iovec import merge

XXH3 = "xxh3"


def can_check() -> bool:
    """Whether the extra is installed."""
    return importlib.util.find_spec("xxhash") is not None


def checksum_of(arena: Arena, offsets: U64, lengths: U64) -> int:
    """The xxh3 (64 bits) of the runs' bytes, one run after another; needs the extra."""
    xxhash: Any = importlib.import_module("xxhash")
    digest = xxhash.xxh3_64()
    starts, lengths = merge(offsets, lengths)
    for start, end in zip(starts.tolist(), np.add(starts, lengths).tolist(), strict=True):
        digest.update(arena.bytes[start:end])
    return int(digest.intdigest())
