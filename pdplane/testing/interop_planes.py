"""The planes behind an interop peer: the product's own, set up for either channel."""

from __future__ import annotations

from pdplane.errors import ConfigError
from pdplane.kv.arena import Arena
from pdplane.kv.layout import Layout
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.testing.interop_options import InteropOptions

_SLACK_S = 60.0  # the peer's own time is over before the plane's


def prefill_plane(options: InteropOptions, layout: Layout, arena: Arena) -> PrefillPlane:
    """A prefill rank that is not started yet. Raises ConfigError."""
    _check_channel(options)
    config = PrefillConfig(
        host=options.host,
        tp_size=options.tp_size,
        tp_rank=options.tp_rank,
        dp_size=options.dp_size,
        dp_rank=options.dp_rank,
        transport=_transport(options),
        bootstrap_port=options.bootstrap_port,
        rendezvous=None if options.serve_bootstrap else options.rendezvous,
        bootstrap_timeout_s=options.timeout + _SLACK_S,
        waiting_timeout_s=options.timeout + _SLACK_S,
    )
    return PrefillPlane(config, layout=layout, arena=arena)


def decode_plane(options: InteropOptions, layout: Layout, arena: Arena) -> DecodePlane:
    """A decode rank that is not started yet. Raises ConfigError."""
    _check_channel(options)
    config = DecodeConfig(
        host=options.host,
        tp_size=options.tp_size,
        tp_rank=options.tp_rank,
        transport=_transport(options),
        bootstrap_timeout_s=max(1.0, options.wait_bootstrap),
        waiting_timeout_s=options.timeout + _SLACK_S,
        record_events=True,
    )
    return DecodePlane(config, layout=layout, arena=arena)


def _check_channel(options: InteropOptions) -> None:
    if options.channel == "legacy":
        raise ConfigError("the legacy channel is not built yet: take --channel native")


def _transport(options: InteropOptions) -> str:
    return "tcp" if options.transport == "auto" else options.transport
