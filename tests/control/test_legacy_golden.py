"""Whole message sequences that a legacy prefill was seen to answer, played to our channel and machine."""

from __future__ import annotations

from collections import Counter

import pytest

from pdplane import wire
from pdplane.control.legacy import LegacyPrefillChannel, reply_host
from pdplane.errors import Cause, Why, WireError
from pdplane.ids import Life, Room
from pdplane.machine import events
from pdplane.machine.actions import PrefillAction, PrefillSettings, Send
from pdplane.machine.prefill import PrefillMachine
from pdplane.messages import Fingerprint, Status
from tests.golden import Case, each, frames, layout_of

# Where we answer otherwise, by (case, step): who hears Failed from us, and why.
OTHERWISE: dict[tuple[str, int], tuple[list[int], str]] = {
    ("prealloc_duplicate", 2): ([], "the same offer said twice changes nothing"),
    ("prealloc_success_room", 1): ([4000], "the room has ended: nobody will write, so decode need not wait"),
    ("prealloc_manifest_keyerror", 1): ([4000], "decode hears of a manifest that cannot be read"),
    ("prealloc_manifest_typeerror", 1): ([4000], "decode hears of a manifest that cannot be read"),
    ("fanout_same_rank_two_sessions", 3): ([4009], "a stranger in a rank's place harms only itself"),
    ("fanout_exceeded", 5): ([4009], "a stranger in a full room harms only itself"),
}


class Played:
    """Our prefill rank without sockets: frames in, statuses out."""

    def __init__(self, case: Case) -> None:
        given = case["input"]
        settings = PrefillSettings(prefill_rank=given["tp_rank"], tp_size=given["tp_size"])
        self.rejected: Counter[str] = Counter()
        self.channel = LegacyPrefillChannel(self.rejected)
        self.machine = PrefillMachine(settings, layout_of(given["layout"]), Life("a" * 32), Fingerprint())
        for room, status in given["room_status"].items():
            self._begin(Room(int(room)), status)

    def _begin(self, room: Room, status: int) -> None:
        self.machine.handle(events.PrefillRequested(room, 1, None, None), 0.0)
        if status in (0, 5):  # ended here; that it succeeded needs a peer, and the tombstone is the same
            self.machine.handle(events.RoomCancelled(room, 1, Why(Cause.CANCELLED, "ended")), 0.0)

    def hear(self, message: list[str]) -> list[PrefillAction]:
        found: list[PrefillAction] = []
        for event in self.channel.read(frames(message)) if message else []:
            found += self.machine.handle(event, 1.0)
        return found

    @property
    def sessions(self) -> int:
        return self.machine.counts().sessions["sessions"]


def failed_ports(actions: list[PrefillAction]) -> list[int]:
    """The ports of those who hear Failed, each once."""
    sent = [action for action in actions if isinstance(action, Send) and isinstance(action.message, Status)]
    assert all(send.message.code.value == 0 for send in sent if isinstance(send.message, Status))
    return sorted({int(send.identity.split()[2]) for send in sent})


@each("legacy/prefill_bootstrap_sequences")
def test_golden_sequences(case: Case) -> None:
    played = Played(case)
    for step, (message, expected) in enumerate(zip(case["input"]["messages"], case["expected"], strict=True)):
        actions = played.hear(message)
        ports, _ = OTHERWISE.get((case["name"], step), (None, ""))
        told = sorted({int(sent["endpoint"].rpartition(":")[2]) for sent in expected["sent"]})
        assert failed_ports(actions) == (told if ports is None else ports), step
        assert played.sessions == len(expected["registered"]), step
        for sent in expected["sent"] if ports is None else []:
            statuses = [wire.encode_status(a.message) for a in actions if isinstance(a, Send) and _is_status(a)]
            assert frames(sent["frames"]) in [status[:5] for status in statuses]
            assert {len(status) for status in statuses} == {7}


def _is_status(send: Send) -> bool:
    return isinstance(send.message, Status)


@each("legacy/status_messages", lambda case: case["name"].startswith("emit_endpoint"))
def test_golden_ways_back(case: Case) -> None:
    host, wanted = case["input"]["endpoint"], case["expected"]["endpoint"]
    if host.count(":") > 1:  # the legacy peer would connect to half of an address
        with pytest.raises(WireError, match="IPv6"):
            reply_host(host)
        return
    assert f"tcp://{reply_host(host)}:{case['input']['port']}" == wanted


def test_a_way_back_needs_a_host() -> None:
    with pytest.raises(WireError, match="empty"):
        reply_host(":99")
