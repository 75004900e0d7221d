"""A ZeroMQ prefill/decode disaggregation plane.

The names below are the library. Importing this package loads neither zmq nor mlx nor aiohttp: what needs them
is imported when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdplane.control.http_thread import HttpThread
    from pdplane.errors import (
        Cause,
        ConfigError,
        InternalError,
        LocalProtocolError,
        PdplaneError,
        PoolExhausted,
        ProtocolError,
        RemoteProtocolError,
        RoomFailed,
        WaitTimeout,
        Why,
        WireError,
    )
    from pdplane.ids import Endpoint, FieldId, Generation, GroupId, Life, Room, SessionId, new_room
    from pdplane.kv.arena import Arena, ArenaMemory, Pool
    from pdplane.kv.layout import Field, Group, GroupSpec, Layout, Partition, Plane
    from pdplane.kv.manifest import Manifest, ManifestGroup, blocks_needed, build_manifest
    from pdplane.kv.planning import FieldSpec, plan_layout
    from pdplane.machine.actions import Delivered, Destination
    from pdplane.messages import Fingerprint, hash_prompt
    from pdplane.plane.config import DecodeConfig, PrefillConfig
    from pdplane.plane.decode import DecodePlane
    from pdplane.plane.prefill import PrefillPlane
    from pdplane.plane.rooms import (
        DecodeRoom,
        EventsLost,
        PlaneEvent,
        PrefillRoom,
        RoomDelivered,
        RoomEnded,
        RoomOffered,
        RoomReleased,
        RoomSucceeded,
        RoomWindow,
        RoomWindowed,
    )
    from pdplane.security import Secret, Tls
    from pdplane.transport.fence import OnLanded
    from pdplane.transport.reports import TransportOptions

__version__ = "0.1.0"

_HOMES = {
    "pdplane.control.http_thread": "HttpThread",
    "pdplane.errors": (
        "Cause ConfigError InternalError LocalProtocolError PdplaneError PoolExhausted ProtocolError "
        "RemoteProtocolError RoomFailed WaitTimeout Why WireError"
    ),
    "pdplane.ids": "Endpoint FieldId Generation GroupId Life Room SessionId new_room",
    "pdplane.kv.arena": "Arena ArenaMemory Pool",
    "pdplane.kv.layout": "Field Group GroupSpec Layout Partition Plane",
    "pdplane.kv.manifest": "Manifest ManifestGroup blocks_needed build_manifest",
    "pdplane.kv.planning": "FieldSpec plan_layout",
    "pdplane.machine.actions": "Delivered Destination",
    "pdplane.messages": "Fingerprint hash_prompt",
    "pdplane.plane.config": "DecodeConfig PrefillConfig",
    "pdplane.plane.decode": "DecodePlane",
    "pdplane.plane.prefill": "PrefillPlane",
    "pdplane.plane.rooms": (
        "DecodeRoom EventsLost PlaneEvent PrefillRoom RoomDelivered RoomEnded RoomOffered RoomReleased "
        "RoomSucceeded RoomWindow RoomWindowed"
    ),
    "pdplane.security": "Secret Tls",
    "pdplane.transport.fence": "OnLanded",
    "pdplane.transport.reports": "TransportOptions",
}

__all__ = [
    "Arena",
    "ArenaMemory",
    "Cause",
    "ConfigError",
    "DecodeConfig",
    "DecodePlane",
    "DecodeRoom",
    "Delivered",
    "Destination",
    "Endpoint",
    "EventsLost",
    "Field",
    "FieldId",
    "FieldSpec",
    "Fingerprint",
    "Generation",
    "Group",
    "GroupId",
    "GroupSpec",
    "HttpThread",
    "InternalError",
    "Layout",
    "Life",
    "LocalProtocolError",
    "Manifest",
    "ManifestGroup",
    "OnLanded",
    "Partition",
    "PdplaneError",
    "Plane",
    "PlaneEvent",
    "Pool",
    "PoolExhausted",
    "PrefillConfig",
    "PrefillPlane",
    "PrefillRoom",
    "ProtocolError",
    "RemoteProtocolError",
    "Room",
    "RoomDelivered",
    "RoomEnded",
    "RoomFailed",
    "RoomOffered",
    "RoomReleased",
    "RoomSucceeded",
    "RoomWindow",
    "RoomWindowed",
    "Secret",
    "SessionId",
    "Tls",
    "TransportOptions",
    "WaitTimeout",
    "Why",
    "WireError",
    "blocks_needed",
    "build_manifest",
    "hash_prompt",
    "new_room",
    "plan_layout",
]


def __getattr__(name: str) -> object:
    for module, names in _HOMES.items():
        if name in names.split():
            found: object = getattr(importlib.import_module(module), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
