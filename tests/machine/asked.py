"""What a prefill machine is expected to ask for."""

from __future__ import annotations

import attrs

from pdplane.errors import Cause, RoomFailed, Why
from pdplane.ids import Generation, Rank
from pdplane.machine import actions, events
from pdplane.machine.actions import Fail, Offered, Send
from pdplane.messages import Failed, Status, StatusCode
from tests.linked.memory import linked_layout
from tests.machine.said import ROOM, connected, hello, offer, registration, request
from tests.machine.witness import ME, REGISTRATION, PrefillWitness

SUCCESS = Status(ROOM, StatusCode.SUCCESS, Rank(0), 42)
FAILED = Status(ROOM, StatusCode.FAILED, Rank(0))


def registered_prefill(tp_size: int = 1) -> PrefillWitness:
    """Registered with one native decode rank (of `tp_size`)."""
    witness = PrefillWitness()
    wide = events.RegistrationReceived(ME, attrs.evolve(REGISTRATION, tp_size=tp_size), linked_layout(tp_size))
    witness.handle(hello(), registration() if tp_size == 1 else wide, connected())
    return witness


def told(cause: Cause, text: str, generation: int = 1, identity: bytes = ME) -> Send:
    return Send(identity, Failed(ROOM, Generation(generation), Why(cause, text)))


def seen(found: list[actions.PrefillAction]) -> list[object]:
    """Actions with errors as (ticket, text), since errors do not compare."""
    return [
        (a.ticket, a.error.text if isinstance(a.error, RoomFailed) else str(a.error)) if isinstance(a, Fail) else a
        for a in found
    ]


def windowed(ticket: int = 1, generation: int = 1) -> Offered:
    probe = PrefillWitness()
    probe.handle(hello(), registration(), connected(), request())
    (found,) = probe.handle(*offer())
    assert isinstance(found, Offered)
    (to,) = found.destinations
    return Offered(ROOM, ticket, 0, 6, (attrs.evolve(to, generation=Generation(generation)),))
