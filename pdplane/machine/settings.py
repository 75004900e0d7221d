"""What a machine is made with: ranks, deadlines in seconds, and bounds."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class PrefillSettings:
    """Settings of a prefill rank's machine.

    `reoffer_s`: how long a request waits for another offer when decode gave the use up just before it came.
    """

    prefill_rank: int = 0
    tp_size: int = 1
    exact: bool = False
    bootstrap_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    ping_interval_s: float = 2.0
    ping_misses: int = 3
    idle_peer_s: float = 600.0
    tombstone_s: float = 10.0
    reoffer_s: float = 2.0
    max_peers: int = 1024
    max_rooms: int = 4096


@attrs.frozen(kw_only=True)
class DecodeSettings:
    """Settings of a decode rank's machine.

    `one_sided`: the transport writes past the fence and reports nothing; that of legacy ranks always does.
    """

    tp_size: int = 1
    tp_rank: int = 0
    version: str = ""
    bootstrap_timeout_s: float = 120.0
    waiting_timeout_s: float = 300.0
    ping_interval_s: float = 2.0
    ping_misses: int = 3
    tombstone_s: float = 10.0
    late_bytes_s: float = 10.0
    one_sided: bool = False
    quarantine_timeout_s: float = 300.0
    max_rooms: int = 4096
