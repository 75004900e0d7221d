"""Linked machines: every rank of a prefill and of a decode instance in one thread, without a socket or a clock.

    world = LinkedMachines(prefill_tp=2, decode_tp=1)
    world.request(room=7, prompt=42)
    world.run()
    assert world.delivered == 1

Messages wait in queues until a test delivers, drops, tears, duplicates or postpones them; time passes only in
`advance`, from one WakeAt to the next. A simulated data plane moves real bytes and fails an assertion when one
lands in a block that its room does not own, or when a delivered cache holds a stale byte or another prompt's token.
"""

from __future__ import annotations

import attrs

from pdplane.errors import Cause, Why
from pdplane.ids import Endpoint, Life, Rank, Room, SessionId
from pdplane.machine import events
from pdplane.machine.actions import DecodeSettings, PrefillSettings
from pdplane.machine.decode import DecodeMachine
from pdplane.machine.prefill import PrefillMachine
from pdplane.messages import Fingerprint, Registration
from tests.linked.decode import DecodeEnd
from tests.linked.memory import linked_layout
from tests.linked.net import Net
from tests.linked.prefill import PrefillEnd

LONGEST_S = 60.0
"""Enough virtual time for every deadline of the linked settings to pass, one after the other."""

_PREFILL = PrefillSettings(
    peer_timeout_s=10.0, bootstrap_timeout_s=10.0, waiting_timeout_s=20.0, tombstone_s=5.0, idle_peer_s=30.0
)
_DECODE = DecodeSettings(peer_timeout_s=10.0, waiting_timeout_s=20.0, tombstone_s=5.0, late_bytes_s=3.0)
_MAX_LETTERS = 20_000


class LinkedMachines:
    """One data-parallel group: `prefill_tp` prefill ranks and `decode_tp` decode ranks."""

    def __init__(self, prefill_tp: int = 1, decode_tp: int = 1) -> None:
        self.prefill_layout, self.decode_layout = linked_layout(prefill_tp), linked_layout(decode_tp)
        self.prefill_tp, self.decode_tp = prefill_tp, decode_tp
        self.bootstrap = Endpoint("linked", 8998)
        self.net = Net()
        self._lives = 0
        self._ports = 4000
        self.ended_lives: list[PrefillEnd | DecodeEnd] = []
        self.prefills: list[PrefillEnd | None] = [None] * prefill_tp
        self.decodes: list[DecodeEnd] = []
        for rank in range(prefill_tp):
            self.start_prefill(rank)
        for rank in range(decode_tp):
            self.decodes.append(self._decode(rank))

    # ---- names

    def session(self, decode_rank: int) -> SessionId:
        return SessionId(f"decode-{decode_rank}:9")

    def rank_of(self, session: SessionId) -> int:
        return next(decode.rank for decode in self.decodes if decode.session == session)

    def decode_of(self, session: SessionId) -> DecodeEnd | None:
        return next((decode for decode in self.decodes if decode.session == session), None)

    def decode_with(self, identity: bytes) -> DecodeEnd | None:
        return next((decode for decode in self.decodes if decode.identity == identity), None)

    # ---- callers

    def request(self, room: int, prompt: int) -> None:
        """Both requests of a room: `prompt` is a number of 1..255 that stands for the tokens."""
        self.request_prefill(room, prompt)
        self.request_decode(room, prompt)

    def request_prefill(self, room: int, prompt: int) -> None:
        for prefill in self.prefills:
            if prefill is not None:
                prefill.request(Room(room), prompt, prompt_len=_prompt_len(prompt), prompt_hash=str(prompt))

    def request_decode(self, room: int, prompt: int) -> None:
        for decode in self.decodes:
            decode.request(Room(room), prompt, prompt_len=_prompt_len(prompt), prompt_hash=str(prompt))

    # ---- time and messages

    def run(self) -> None:
        """Deliver until no letter waits."""
        for _ in range(_MAX_LETTERS):
            if not (waiting := self.net.waiting):
                return
            self.net.deliver(waiting[0])
        raise AssertionError("the machines talk without end")

    def advance(self, seconds: float) -> None:
        """Let time pass: each machine is woken when it asked to be, and letters are delivered in between."""
        end = self.net.now + seconds
        self.run()
        while True:
            ends = [e for e in (*self.prefills, *self.decodes) if e is not None and e.wake is not None]
            soonest = min(ends, key=lambda e: e.wake or 0.0, default=None)
            if soonest is None or soonest.wake is None or soonest.wake > end:
                break
            self.net.now = max(self.net.now, soonest.wake)
            soonest.take(events.Tick())
            assert soonest.wake is None or soonest.wake > self.net.now, "woken for nothing"
            self.run()
        self.net.now = end

    # ---- faults

    def cut(self, decode_rank: int, prefill_rank: int) -> None:
        """The control connection breaks with what it carries; libzmq makes a new one by itself."""
        self.net.clear("up", decode_rank, prefill_rank)
        self.net.clear("down", prefill_rank, decode_rank)

    def stop_prefill(self, rank: int) -> None:
        """The process is gone: its sockets close, its promises end."""
        gone, self.prefills[rank] = self.prefills[rank], None
        if gone is None:
            return
        self.ended_lives.append(gone)
        for kind in ("data", "probe", "engine", "ended", "down"):
            self.net.clear(kind, rank, None)
        for decode in self.decodes:
            decode.cut(gone.life)

    def start_prefill(self, rank: int, *, port: int | None = None) -> None:
        """A new life of a rank that is down, on a new port or a given one."""
        self._ports += 1
        settings = attrs.evolve(_PREFILL, prefill_rank=rank, tp_size=self.prefill_tp)
        life = self._life("p")
        machine = PrefillMachine(settings, self.prefill_layout, life, Fingerprint())
        self.prefills[rank] = PrefillEnd(self, rank, life, machine, self._ports if port is None else port)

    def restart_decode(self, rank: int) -> None:
        """A new life at the same data address, with empty memory and tickets from 1."""
        gone = self.decodes[rank]
        self.ended_lives.append(gone)
        self.decodes[rank] = self._decode(rank)
        for kind in ("lookup", "landed", "up"):
            self.net.clear(kind, rank if kind != "landed" else None, None if kind != "landed" else rank)
        self.net.clear("down", None, rank)
        for prefill in self.prefills:
            if prefill is not None:
                prefill.cut(gone.session, gone.life)

    def look_up(self, room: Room) -> events.PeerFound | events.PeerMissing:
        """What the rendezvous says now."""
        ranks = [
            events.PeerRank(Rank(end.rank), Endpoint("prefill", end.port), end.life) for end in self.prefills if end
        ]
        if len(ranks) < self.prefill_tp:
            return events.PeerMissing(room, self.bootstrap, Why(Cause.UNREACHABLE, "no such prefill rank"))
        return events.PeerFound(room, self.bootstrap, 0, 1, self.prefill_layout, tuple(ranks))

    # ---- answers

    @property
    def delivered(self) -> int:
        """Caches delivered by the decode ranks that live now."""
        return sum(how == "delivered" for end in self.decodes for _, how in end.outcomes.elements())

    def assert_drained(self) -> None:
        """Every room has ended, every block is back, every table is empty but for the sessions of living peers."""
        for end in (*self.prefills, *self.decodes):
            if end is None:
                continue
            counts = end.machine.counts()
            assert counts.rooms == {}, counts
            assert counts.tombstones == 0, counts
            assert end.memory.owners == (), f"blocks lost: {end.memory.owners}"
            assert end.memory.windows == {}
            assert end.memory.pool.free_parents == end.memory.pool.total_parents
        for prefill in self.prefills:
            if prefill is not None:
                assert prefill.machine.counts().pushes == 0
                assert set(prefill.released) == {ticket for ticket, _ in prefill.outcomes} == set(prefill.prompts)

    # ---- lives

    def _life(self, role: str) -> Life:
        self._lives += 1
        return Life(f"{role}{self._lives:031x}")

    def _decode(self, rank: int) -> DecodeEnd:
        settings = attrs.evolve(_DECODE, tp_size=self.decode_tp, tp_rank=rank)
        life, session = self._life("d"), self.session(rank)
        registration = Registration("decode", 9, session, 4096, b"{}", self.decode_tp, rank)
        machine = DecodeMachine(settings, self.decode_layout, life, registration, Fingerprint())
        return DecodeEnd(self, rank, life, machine, session)


def _prompt_len(prompt: int) -> int:
    return 1 + prompt % 11
