"""What a scheduler's step loop polls instead of waiting on futures."""

from __future__ import annotations

from typing import TypeAlias

import attrs

from pdplane.errors import PdplaneError
from pdplane.ids import Room
from pdplane.machine.actions import Delivered
from pdplane.plane.rooms import RoomWindow


@attrs.frozen
class RoomWindowed:
    """Decode's offer is whole: compute and push."""

    room: Room
    ticket: int
    window: RoomWindow


@attrs.frozen
class RoomOffered:
    """Every prefill rank knows this decode; the room's blocks are offered to them."""

    room: Room


@attrs.frozen
class RoomDelivered:
    """The cache is whole in the arena."""

    room: Room
    ticket: int
    delivered: Delivered


@attrs.frozen
class RoomSucceeded:
    """Success has gone out."""

    room: Room
    ticket: int


@attrs.frozen
class RoomReleased:
    """The source blocks are free."""

    room: Room
    ticket: int


@attrs.frozen
class RoomEnded:
    """The room failed."""

    room: Room
    ticket: int
    error: PdplaneError


PlaneEvent: TypeAlias = RoomWindowed | RoomOffered | RoomDelivered | RoomSucceeded | RoomReleased | RoomEnded
