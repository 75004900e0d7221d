"""The planes behind an interop peer: the product's own, set up for either channel.

On the legacy channel they hide what native peers recognise each other by, so that two of them speak it too.
"""

from __future__ import annotations

import json

import attrs

from pdplane.control.lookup import Announcement, PrefillFound, PrefillNotFound
from pdplane.ids import Room
from pdplane.kv.arena import Arena
from pdplane.kv.layout import Layout
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.testing.interop_options import InteropOptions
from pdplane.transport.options import TransportOptions

_SLACK_S = 60.0  # the peer's own time is over before the plane's
_LEGACY_KEYS = ("role", "world_size", "dp_size", "rank_ip", "rank_port", "engine_rank", "cache_layout")


def prefill_plane(options: InteropOptions, layout: Layout, arena: Arena) -> PrefillPlane:
    """A prefill rank that is not started yet. Raises ConfigError."""
    legacy = options.channel == "legacy"
    config = PrefillConfig(
        host=options.host,
        tp_size=options.tp_size,
        tp_rank=options.tp_rank,
        dp_size=options.dp_size,
        dp_rank=options.dp_rank,
        transport=options.transport,
        transport_options=TransportOptions(mooncake_protocol=options.protocol),
        legacy=legacy,
        bootstrap_port=options.bootstrap_port,
        rendezvous=None if options.serve_bootstrap else options.rendezvous,
        bootstrap_timeout_s=options.timeout + _SLACK_S,
        waiting_timeout_s=options.timeout + _SLACK_S,
    )
    return (_LegacyPrefillPlane if legacy else PrefillPlane)(config, layout=layout, arena=arena)


def decode_plane(options: InteropOptions, layout: Layout, arena: Arena) -> DecodePlane:
    """A decode rank that is not started yet. Raises ConfigError."""
    legacy = options.channel == "legacy"
    config = DecodeConfig(
        host=options.host,
        tp_size=options.tp_size,
        tp_rank=options.tp_rank,
        transport=options.transport,
        transport_options=TransportOptions(mooncake_protocol=options.protocol),
        legacy=legacy,
        bootstrap_timeout_s=max(1.0, options.wait_bootstrap),
        waiting_timeout_s=options.timeout + _SLACK_S,
        record_events=True,
    )
    return (_LegacyDecodePlane if legacy else DecodePlane)(config, layout=layout, arena=arena)


class _LegacyPrefillPlane(PrefillPlane):
    def _announcement(self) -> Announcement:
        return _LegacyAnnouncement(**attrs.asdict(super()._announcement()))


@attrs.frozen
class _LegacyAnnouncement(Announcement):
    def body(self) -> str:
        found = json.loads(super().body())
        return json.dumps({key: found[key] for key in _LEGACY_KEYS})


class _LegacyDecodePlane(DecodePlane):
    def _found(self, number: Room, found: PrefillFound | PrefillNotFound) -> None:
        if isinstance(found, PrefillFound):
            ranks = tuple(attrs.evolve(rank, router_port=None, life=None) for rank in found.ranks)
            found = attrs.evolve(found, ranks=ranks)
        super()._found(number, found)
