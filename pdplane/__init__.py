"""A ZeroMQ prefill/decode disaggregation plane.

The names below are the library. Importing this package loads neither zmq nor mlx nor aiohttp: what needs them
is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdplane.errors import (
        ConfigError,
        IncompatibleCache,
        InternalError,
        LayoutMismatch,
        LocalProtocolError,
        PdplaneError,
        PoolExhausted,
        ProtocolError,
        RemoteProtocolError,
        RendezvousError,
        RoomFailed,
        SessionLost,
        TransferError,
        WaitTimeout,
        WireError,
    )
    from pdplane.ids import Endpoint, new_room
    from pdplane.kv.arena import Arena, Pool
    from pdplane.kv.layout import GroupSpec, Layout
    from pdplane.kv.manifest import Manifest, blocks_needed, build_manifest
    from pdplane.kv.planning import FieldSpec, plan_layout
    from pdplane.machine.actions import Delivered
    from pdplane.messages import Fingerprint, hash_prompt
    from pdplane.plane.config import DecodeConfig, PrefillConfig
    from pdplane.plane.decode import DecodePlane
    from pdplane.plane.prefill import PrefillPlane
    from pdplane.plane.rooms import DecodeRoom, PrefillRoom, RoomWindow
    from pdplane.security import Secret

__version__ = "0.1.0"

_HOMES = {
    "pdplane.errors": (
        "ConfigError", "IncompatibleCache", "InternalError", "LayoutMismatch", "LocalProtocolError", "PdplaneError",
        "PoolExhausted", "ProtocolError", "RemoteProtocolError", "RendezvousError", "RoomFailed", "SessionLost",
        "TransferError", "WaitTimeout", "WireError",
    ),
    "pdplane.ids": ("Endpoint", "new_room"),
    "pdplane.kv.arena": ("Arena", "Pool"),
    "pdplane.kv.layout": ("GroupSpec", "Layout"),
    "pdplane.kv.manifest": ("Manifest", "blocks_needed", "build_manifest"),
    "pdplane.kv.planning": ("FieldSpec", "plan_layout"),
    "pdplane.machine.actions": ("Delivered",),
    "pdplane.messages": ("Fingerprint", "hash_prompt"),
    "pdplane.plane.config": ("DecodeConfig", "PrefillConfig"),
    "pdplane.plane.decode": ("DecodePlane",),
    "pdplane.plane.prefill": ("PrefillPlane",),
    "pdplane.plane.rooms": ("DecodeRoom", "PrefillRoom", "RoomWindow"),
    "pdplane.security": ("Secret",),
}  # fmt: skip

__all__ = [
    "Arena",
    "ConfigError",
    "DecodeConfig",
    "DecodePlane",
    "DecodeRoom",
    "Delivered",
    "Endpoint",
    "FieldSpec",
    "Fingerprint",
    "GroupSpec",
    "IncompatibleCache",
    "InternalError",
    "Layout",
    "LayoutMismatch",
    "LocalProtocolError",
    "Manifest",
    "PdplaneError",
    "Pool",
    "PoolExhausted",
    "PrefillConfig",
    "PrefillPlane",
    "PrefillRoom",
    "ProtocolError",
    "RemoteProtocolError",
    "RendezvousError",
    "RoomFailed",
    "RoomWindow",
    "Secret",
    "SessionLost",
    "TransferError",
    "WaitTimeout",
    "WireError",
    "blocks_needed",
    "build_manifest",
    "hash_prompt",
    "new_room",
    "plan_layout",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names:
            found: object = getattr(importlib.import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
