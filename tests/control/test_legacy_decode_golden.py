"""Status sequences that a legacy decode was seen to take, played to our channel and machine."""

from __future__ import annotations

from collections import Counter

import attrs

from pdplane.control.legacy import LegacyPrefills, probed
from pdplane.ids import Endpoint, Life, Rank, Room, SessionId
from pdplane.kv.manifest import build_manifest
from pdplane.machine import events
from pdplane.machine.actions import Connect, DecodeAction, DecodeSettings, Deliver, Fail, Tell
from pdplane.machine.decode import DecodeMachine
from pdplane.messages import NO_TOKEN, Fingerprint, Ping, Registration
from tests.golden import Case, each, frames
from tests.samples import KV, SNAPSHOT, two_group_layout

BOOTSTRAP = Endpoint("prefill", 8998)
REGISTRATION = Registration("decode", 9, SessionId("decode:9"), 4096, b"{}", 1, 0)
WAITING, READY, FAILED = "waiting", "ready", "failed"

# Where ours goes on otherwise, by case: the state after each message, and why.
OTHERWISE: dict[str, tuple[list[str], str]] = {
    "unexpected_rank_fails": ([WAITING], "a stranger's word about a room changes nothing"),
    "unexpected_after_partial": ([WAITING, WAITING, READY], "a stranger's word about a room changes nothing"),
    "failed_from_unexpected_rank_still_fails": ([WAITING], "a stranger's word about a room changes nothing"),
    "failed_after_success_overrides": ([READY, READY], "the cache was whole and is delivered; nothing takes it back"),
    "unknown_status_9_poisons": ([WAITING, READY], "a number without a meaning changes nothing"),
}
# Cases whose start has no counterpart here.
NOT_OURS = {
    "no_route_fails": "a room is offered only when its ranks are known",
    "empty_expected_set": "some prefill rank always feeds us",
    "success_before_preallocation": "a status of a room that was never offered is unknown",
    "unknown_room_ignored": "played below: no room at all",
}


class Played:
    """Our decode rank without sockets, at a prefill of as many ranks as feed us."""

    def __init__(self, expected: list[int]) -> None:
        self.rejected: Counter[str] = Counter()
        self.channel = LegacyPrefills(self.rejected, lambda line: None)
        heads, self.ranks = (2, 4) if expected == [0, 2] else (4, max(expected) + 1)  # four ranks, two of them idle
        self.layout = two_group_layout(heads=heads, total_heads=heads)
        self.part = two_group_layout(heads=max(1, heads // self.ranks), total_heads=heads)
        self.machine = DecodeMachine(DecodeSettings(), self.layout, Life("d" * 32), REGISTRATION, Fingerprint())
        self.state = WAITING
        self.delivered: Deliver | None = None

    def open(self, room: Room) -> None:
        manifest = build_manifest(self.layout, {KV: (1, 2), SNAPSHOT: (3,)}, 0, 6)
        self.take(events.DecodeRequested(room, 1, BOOTSTRAP, manifest, ""))
        addresses = [Endpoint("prefill", 4000 + rank) for rank in range(self.ranks)]
        ranks = tuple(events.PeerRank(Rank(rank), address, Life("")) for rank, address in enumerate(addresses))
        self.take(events.PeerFound(room, BOOTSTRAP, 0, 1, self.part, ranks))

    def take(self, event: events.DecodeEvent) -> None:
        for action in self.machine.handle(event, 0.0):
            for answer in self._perform(action):
                self.take(answer)

    def hear(self, message: list[str]) -> None:
        for event in self.channel.read(frames(message)):
            self.take(event)

    def _perform(self, action: DecodeAction) -> list[events.DecodeEvent]:
        match action:
            case Connect(channel, endpoint):
                self.channel._lines[channel] = _Nowhere(channel, endpoint)
            case Tell():
                return self.channel.send(action)
            case Deliver():
                self.state, self.delivered = READY, action
            case Fail():
                self.state = FAILED
            case _:
                pass
        return []


@attrs.define
class _Nowhere:
    """A line that takes everything."""

    channel: events.Channel
    endpoint: Endpoint
    introduction: list[bytes] = attrs.field(factory=list)
    stands: bool = True

    def queue(self, _frames: list[bytes]) -> bool:
        return True


@each("legacy/decode_status_sequences", lambda case: case["name"] not in NOT_OURS)
def test_golden_sequences(case: Case) -> None:
    given, wanted = case["input"], case["expected"]
    played = Played(given["expected_prefill_ranks"])
    played.open(Room(given["room"]))
    states = []
    for message in given["messages"]:
        played.hear(message)
        states.append(played.state)
    names = {0: FAILED, 5: READY}
    theirs = [names.get(after["status"], WAITING) for after in wanted["after_each"]]
    assert states == OTHERWISE.get(case["name"], (theirs, ""))[0]
    if played.delivered is not None and case["name"] not in OTHERWISE:
        told = played.delivered.delivered
        _check_merged(
            case["name"],
            NO_TOKEN if told.first_token is None else told.first_token,
            list(told.candidates or ()),
            wanted,
        )


def _check_merged(name: str, token: int, candidates: list[int], wanted: Case) -> None:
    if name == "first_token_wins":  # theirs is the first to arrive, which is luck; ours that of the lowest rank
        assert (token, candidates) == (11, [9, 9])
    else:
        assert (token, candidates) == (wanted["bootstrap_token"], wanted["spec_candidate_ids"] or [])


def test_a_status_of_an_unknown_room_is_counted() -> None:
    played = Played([0])
    played.hear(["31", "35", "30", "3131", ""])
    assert played.rejected == {"unknown_room": 1}


@each("legacy/status_merge")
def test_golden_merges(case: Case) -> None:
    """Theirs is `max` over numbers, with Failed winning. Ours is a table of states, which the numbers do not touch."""
    old, new, merged = case["input"]["old"], case["input"]["new"], case["expected"]
    played = Played([0])
    if old not in (None, 1, 2):  # those are rooms without an offer: a status cannot be meant for them
        played.open(Room(1))
    for number in ([old] if old in (0, 5, 9) else []) + [new]:
        played.hear(["31", f"{number}".encode().hex(), "30", "3131", ""])
    theirs = {0: FAILED, 5: READY}.get(merged, WAITING)
    if old in (None, 1, 2):
        assert (played.state, played.rejected) == (WAITING, {"wire_status" if new == 9 else "unknown_room": 1})
    elif old == 5:
        assert played.state == READY  # nothing takes a whole cache back
    elif old == 9 or new == 9:  # a number without a meaning changes nothing
        assert played.state == {0: FAILED, 5: READY}.get(old if new == 9 else new, WAITING)
    else:
        assert played.state == theirs


def test_the_rendezvous_answer_is_the_ping() -> None:
    channel, known = events.Channel(BOOTSTRAP, Rank(0), Life("")), Endpoint("10.0.0.1", 4000)
    line = _Nowhere(channel, known)
    assert probed(line, None) is None
    assert probed(line, known) == events.NoticeFromPrefill(channel, Ping(Life("")))
    assert probed(attrs.evolve(line, stands=False), known) is None
    gone = probed(line, Endpoint("10.0.0.1", 4001))
    assert isinstance(gone, events.ChannelBroken)
