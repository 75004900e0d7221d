"""Bodies of PUT /route."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdplane.ids import Life

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "vectors" / "bootstrap_http.json").read_text())
LAYOUT: str = json.loads(CASES[1]["input"][0]["body"])["cache_layout"]


def registration(**changes: object) -> dict[str, Any]:
    """A legacy rank's body."""
    body = {"role": "Prefill", "world_size": 1, "dp_size": 1, "rank_ip": "127.0.0.1", "rank_port": 7000}
    return body | {"engine_rank": 0, "cache_layout": LAYOUT} | changes


def native(life: Life, **changes: object) -> dict[str, Any]:
    """A native rank's body."""
    return registration(pdplane=1, prefill_life=life, router_port=7100, **changes)


def other_layout() -> str:
    """A valid layout of fewer blocks."""
    fewer = LAYOUT.replace('"num_lcm_blocks":7', '"num_lcm_blocks":3').replace('"page_count":8', '"page_count":4')
    return fewer.replace('"arena_offset_bytes":768', '"arena_offset_bytes":384')
