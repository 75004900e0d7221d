"""Machines under watch: whatever is thrown at them, what they ask for must keep these rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from pdplane.errors import Cause, LocalProtocolError, Why
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.kv.manifest import Manifest, ManifestGroup
from pdplane.machine import actions, events
from pdplane.machine.actions import DecodeSettings, PrefillSettings
from pdplane.machine.decode import DecodeMachine
from pdplane.machine.prefill import PrefillMachine
from pdplane.messages import Failed, Fingerprint, Hello, Registration, Status, StatusCode, Window, legacy_identity
from tests.linked.memory import KV, STATES, linked_layout

LAYOUT = linked_layout(1)
PREFILL_LIFE, DECODE_LIFE = Life("p" * 32), Life("d" * 32)
ME, RAW, OTHER = b"native", b"raw", b"other"
SESSION = SessionId("decode:9")
REGISTRATION = Registration("decode", 9, SESSION, 4096, b"{}", 1, 0)
LEGACY = legacy_identity(REGISTRATION.route)
HELLO = Hello("0", DECODE_LIFE)
BOOTSTRAP = Endpoint("prefill", 8998)
CHANNEL = events.Channel(BOOTSTRAP, Rank(0), PREFILL_LIFE)
FOUND = events.PeerFound(
    Room(7), BOOTSTRAP, 0, 1, LAYOUT, (events.PeerRank(Rank(0), Endpoint("prefill", 4001), PREFILL_LIFE),)
)
GONE = Why(Cause.CANCELLED, "gone")
_MUCH_TIME_S = 5000.0


def manifest(prompt_len: int = 6, first_block: int = 1) -> Manifest:
    """Blocks for a prompt of five to eight tokens: two of the history, one snapshot."""
    history = ManifestGroup(KV, (first_block, first_block + 1))
    return Manifest((history, ManifestGroup(STATES, (first_block + 2,))), 0, prompt_len)


def some_copies(nbytes: int = 8) -> Copies:
    one = np.zeros(1, np.uint64)
    return Copies(one, one, one + np.uint64(nbytes))


class PrefillWitness:
    """A prefill machine. One ticket: one Succeed or Fail, then one Release, never while a push is outstanding."""

    def __init__(self, settings: PrefillSettings | None = None) -> None:
        self.machine = PrefillMachine(settings or PrefillSettings(), LAYOUT, PREFILL_LIFE, Fingerprint())
        self.now = 0.0
        self.wake: float | None = None
        self.asked: Counter[int] = Counter()
        self.ended: dict[int, str] = {}
        self.released: set[int] = set()
        self.outstanding: dict[int, tuple[actions.StartPush, int]] = {}
        self._spoiled: set[int] = set()
        self._finished: set[int] = set()
        self._failed_uses: set[tuple[bytes, Room, Generation]] = set()
        self._announced: dict[tuple[bytes, Room], Generation] = {}

    def handle(self, *said: events.PrefillEvent) -> list[actions.PrefillAction]:
        """Take the events; gives the last one's actions without WakeAt."""
        found: list[actions.PrefillAction] = []
        for event in said:
            self._before(event)
            found = self.machine.handle(event, self.now)
            self.wake = next((a.time for a in found if isinstance(a, actions.WakeAt)), None)
            for action in found:
                self._check(action, event)
        return [action for action in found if not isinstance(action, actions.WakeAt)]

    def end_push(self, cause: str | None) -> list[actions.PrefillAction]:
        """The oldest outstanding push ends; without one, a push that nobody knows."""
        action, _ = next(iter(self.outstanding.values()), (None, 0))
        if action is None:
            return self.handle(events.PushEnded(SESSION, Room(7), Generation(1), 999, cause))
        push = action.push
        return self.handle(events.PushEnded(action.session, push.room, push.generation, push.push, cause))

    def drain(self) -> None:
        """Every push ends, every deadline passes: nothing is left."""
        while self.outstanding:
            self.end_push("closed")
        self.handle(events.Undeliverable(LEGACY))  # time alone does not end a legacy peer
        while self.wake is not None and self.now < _MUCH_TIME_S:
            assert self.wake > self.now, "woken for nothing"
            self.now = self.wake
            self.handle(events.Tick())
        counts = self.machine.counts()
        assert (counts.rooms, counts.pushes, counts.tombstones) == ({}, 0, 0)
        assert set(counts.sessions.values()) == {0}
        assert set(self.asked) == set(self.ended) == self.released

    def _before(self, event: events.PrefillEvent) -> None:
        match event:
            case events.PrefillRequested(_, ticket):
                self.asked[ticket] += 1
            case events.RoomFinished(_, ticket):
                self._finished.add(ticket)
            case events.PushEnded(push=push, text=cause) if push in self.outstanding:
                _, ticket = self.outstanding.pop(push)
                if cause is not None:
                    self._spoiled.add(ticket)
            case _:
                pass

    def _check(self, action: actions.PrefillAction, event: events.PrefillEvent) -> None:
        match action:
            case actions.StartPush(push=push):
                assert isinstance(event, events.PushRequested)
                assert event.ticket not in self.ended, "a push of a room that has ended"
                self.outstanding[push.push] = (action, event.ticket)
            case actions.Succeed(_, ticket):
                assert ticket in self._finished - self._spoiled, "a success without its pushes"
                self._ends(ticket, "succeeded")
                assert not self._pushes(ticket)
            case actions.Fail(_, ticket):
                self._ends(ticket, "failed")
            case actions.Release(_, ticket):
                assert ticket in self.ended, "released before its end"
                assert ticket not in self.released, "released twice"
                assert not self._pushes(ticket), "released while a push reads"
                self.released.add(ticket)
            case actions.Send(identity, message):
                self._sent(identity, message)
            case _:
                pass

    def _sent(self, identity: bytes, message: object) -> None:
        match message:
            case Window(room, generation):
                self._announced[identity, room] = generation
            case Failed(room, generation):
                self._failed_uses.add((identity, room, generation))
            case Status(room, StatusCode.SUCCESS):
                use = identity, room, self._announced.pop((identity, room), Generation(0))
                assert use not in self._failed_uses, "a success after Failed"
            case _:
                pass

    def _pushes(self, ticket: int) -> list[int]:
        return [push for push, (_, owner) in self.outstanding.items() if owner == ticket]

    def _ends(self, ticket: int, how: str) -> None:
        assert self.asked[ticket] == 1
        assert ticket not in self.ended, f"ticket {ticket} ends twice"
        self.ended[ticket] = how


class DecodeWitness:
    """A decode machine. One ticket: one Deliver or Fail, after its window is closed, never on less than everything."""

    def __init__(self, settings: DecodeSettings | None = None) -> None:
        settings = settings or DecodeSettings()
        self.machine = DecodeMachine(settings, LAYOUT, DECODE_LIFE, REGISTRATION, Fingerprint())
        self.now = 0.0
        self.wake: float | None = None
        self.asked: dict[int, events.DecodeRequested] = {}
        self.ended: dict[int, str] = {}
        self.windows: dict[Room, actions.OpenFence] = {}
        self.connected: set[events.Channel] = set()
        self._landed: dict[tuple[Room, Generation], int] = {}
        self._succeeded: set[tuple[Room, Generation]] = set()
        self._failed: set[tuple[Room, Generation]] = set()
        self._announced: dict[Room, Generation] = {}
        self._looked_up: set[Room] = set()

    def handle(self, *said: events.DecodeEvent) -> list[actions.DecodeAction]:
        """Take the events; gives the last one's actions without WakeAt."""
        found: list[actions.DecodeAction] = []
        for event in said:
            self._before(event)
            if isinstance(event, events.PeerFound | events.PeerMissing):
                self._looked_up.discard(event.room)
            found = self.machine.handle(event, self.now)
            self.wake = next((a.time for a in found if isinstance(a, actions.WakeAt)), None)
            self._looked_up |= {action.room for action in found if isinstance(action, actions.LookUp)}
            for action in found:
                self._check(action)
        return [action for action in found if not isinstance(action, actions.WakeAt)]

    def drain(self) -> None:
        """Every deadline passes, and look-ups find nobody: nothing is left."""
        self._find_nobody()
        while self.wake is not None and self.now < _MUCH_TIME_S:
            assert self.wake > self.now, "woken for nothing"
            self.now = self.wake
            self.handle(events.Tick())
            self._find_nobody()
        counts = self.machine.counts()
        assert (counts.rooms, counts.tombstones, counts.partings) == ({}, 0, 0)
        assert set(counts.sessions.values()) == {0}
        assert set(self.asked) == set(self.ended)
        assert not self.windows
        assert not self.connected

    def _before(self, event: events.DecodeEvent) -> None:
        match event:
            case events.DecodeRequested(ticket=ticket):
                assert ticket not in self.asked
                self.asked[ticket] = event
            case events.Landed(room, generation, _, nbytes):
                self._landed[room, generation] = max(nbytes, self._landed.get((room, generation), 0))
            case events.NoticeFromPrefill(_, Window(room, generation)):
                self._announced[room] = generation
            case events.NoticeFromPrefill(_, Failed(room, generation)):
                self._failed |= {(room, generation)} & self._open_uses()
            case events.StatusFromPrefill(channel, Status(room, StatusCode.SUCCESS, rank)):
                generation = self._announced.pop(room, Generation(0))
                if rank == channel.prefill_rank:
                    self._succeeded |= {(room, generation)} & self._open_uses()
            case events.StatusFromPrefill(_, Status(room)):
                self._announced.pop(room, None)
            case _:
                pass

    def _find_nobody(self) -> None:
        while self._looked_up:
            room = self._looked_up.pop()
            self.handle(events.PeerMissing(room, BOOTSTRAP, Why(Cause.UNREACHABLE, "no answer")))

    def _open_uses(self) -> set[tuple[Room, Generation]]:
        return {(room, window.generation) for room, window in self.windows.items()}

    def _check(self, action: actions.DecodeAction) -> None:
        match action:
            case actions.OpenFence(room):
                assert room not in self.windows
                self.windows[room] = action
            case actions.CloseFence(room, generation):
                assert self.windows.pop(room).generation == generation
            case actions.Connect(channel):
                self.connected.add(channel)
            case actions.Disconnect(channel):
                self.connected.remove(channel)
            case actions.Tell(channel) | actions.Offer(channel):
                assert channel in self.connected
            case actions.Deliver(room, ticket, delivered):
                self._complete(room, Generation(ticket), delivered)
                self._ends(room, ticket, "delivered")
            case actions.Fail(room, ticket):
                self._ends(room, ticket, "failed")
            case _:
                pass

    def _complete(self, room: Room, generation: Generation, delivered: actions.Delivered) -> None:
        use = room, generation
        assert use in self._succeeded, "delivered without Success"
        assert use not in self._failed, "delivered after Failed"
        assert self._landed.get(use, 0) == whole(manifest())
        assert delivered.first_token is None or delivered.first_token >= 0

    def _ends(self, room: Room, ticket: int, how: str) -> None:
        assert ticket in self.asked
        assert ticket not in self.ended, f"ticket {ticket} ends twice"
        window = self.windows.get(room)
        assert window is None or window.generation != ticket, "ended with its window open"
        self.ended[ticket] = how


def whole(offered: Manifest) -> int:
    """Bytes that a manifest of the 1x1 layout stands for."""
    pages: Mapping[object, tuple[int, ...]] = offered.blocks()
    return sum(len(pages[field.group_id]) * field.payload_bytes for field in LAYOUT.fields)


def is_local(action: object) -> bool:
    """Whether the action tells a caller of its own mistake."""
    return isinstance(action, actions.Fail) and isinstance(action.error, LocalProtocolError)
