"""The older generation of peers, played for tests: both roles and their rendezvous, misbehaviour included.

    with LegacyDecode(layout) as decode:                      # beside your prefill
        contact = decode.offer(rendezvous, room, blocks, prompt_len=100)
        status = decode.wait(room, contact)

    with LegacyRendezvous() as http, LegacyPrefill(layout, http.endpoint) as prefill:     # beside your decode
        prefill.serve(room, source_blocks, token=42)

They are written from the description of that wire, not from our codecs, and step by step: nothing happens
that the test did not say. `prefill.write`, `report` and `say` do any part of it, in any order, or wrongly.
"""

from __future__ import annotations

from pdplane.testing.legacy_decode import Contact, LegacyDecode, LegacyStatus
from pdplane.testing.legacy_prefill import (
    LegacyOffer,
    LegacyPrefill,
    LegacyRegistration,
    status_frames,
    write_in_process,
)
from pdplane.testing.legacy_rendezvous import LegacyRendezvous, look_up, put_rank

__all__ = [
    "Contact",
    "LegacyDecode",
    "LegacyOffer",
    "LegacyPrefill",
    "LegacyRegistration",
    "LegacyRendezvous",
    "LegacyStatus",
    "look_up",
    "put_rank",
    "status_frames",
    "write_in_process",
]
