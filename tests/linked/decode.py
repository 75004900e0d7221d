"""A decode rank of linked machines: machine, memory, callers and data receiver in one."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import attrs

from pdplane.errors import Cause, PoolExhausted, Why
from pdplane.ids import Life, Rank, Room, SessionId
from pdplane.kv.copies import Copies
from pdplane.kv.manifest import build_manifest
from pdplane.machine import actions, events
from pdplane.machine.decode import DecodeMachine
from pdplane.messages import Cancel, Notice, Push, Registration, Window
from tests.linked.memory import Memory
from tests.linked.net import Letter
from tests.linked.prefill import first_token

if TYPE_CHECKING:
    from tests.linked.machines import LinkedMachines


@attrs.frozen
class Connection:
    """A channel and the port that it was connected to."""

    channel: events.Channel
    port: int


class DecodeEnd:
    """One life of one decode rank. Its callers check every byte and the first token of what is delivered."""

    def __init__(
        self, world: LinkedMachines, rank: int, life: Life, machine: DecodeMachine, session: SessionId
    ) -> None:
        self.world, self.rank, self.life, self.machine, self.session = world, rank, life, machine, session
        self.identity = life.encode()
        self.memory = Memory(world.decode_layout)
        self.connections: dict[int, Connection] = {}
        self.wake: float | None = None
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.causes: dict[int, str] = {}
        self._prompts: dict[int, int] = {}
        self._tickets = 0

    # ---- callers

    def request(self, room: Room, prompt: int, *, prompt_len: int, prompt_hash: str) -> int:
        """A caller opens blocks for the room; gives its ticket, or 0 when there are no blocks."""
        ticket = self._tickets + 1
        try:
            blocks = self.memory.allocate(ticket, 0, prompt_len)
        except PoolExhausted:
            return 0
        self._tickets = ticket
        self._prompts[ticket] = prompt
        manifest = build_manifest(self.memory.layout, blocks, 0, prompt_len)
        self.take(events.DecodeRequested(room, ticket, self.world.bootstrap, manifest, prompt_hash))
        return ticket

    def cancel(self, room: Room, ticket: int, cause: str) -> None:
        self.take(events.RoomCancelled(room, ticket, Why(Cause.CANCELLED, cause)))

    # ---- the machine

    def take(self, event: events.DecodeEvent) -> None:
        if self.world.decodes[self.rank] is not self:
            return  # this life is over
        found = self.machine.handle(event, self.world.net.now)
        wakes = [action for action in found if isinstance(action, actions.WakeAt)]
        self.wake = wakes[-1].time if wakes else None
        pending: actions.Tell | None = None
        for action in found:
            if pending is not None:
                gives_up = isinstance(action, actions.Tell) and isinstance(action.message, Cancel)
                assert gives_up or isinstance(action, actions.Offer), "a window notice names the very next message"
                self._send(pending, action)
                pending = None
            elif isinstance(action, actions.Tell) and isinstance(action.message, Window):
                pending = action
            else:
                self._perform(action)

    def _perform(self, action: actions.DecodeAction) -> None:
        match action:
            case actions.Tell():
                self._send(action)
            case actions.LookUp(_, room):
                answer = partial(self._look_up, room)
                self.world.net.post(("lookup", self.rank, 0), Letter(f"look up {room}", (answer,)))
            case actions.Connect(channel, endpoint):
                self.connections[channel.prefill_rank] = Connection(channel, endpoint.port)
                self._forget_letters(channel.prefill_rank)
            case actions.Disconnect(channel):
                if self.connections.get(channel.prefill_rank) == Connection(channel, self._port(channel)):
                    del self.connections[channel.prefill_rank]
            case _:
                self._tell_caller(action)

    def _tell_caller(self, action: actions.DecodeAction) -> None:
        match action:
            case actions.OpenFence(room, generation, manifest, writers):
                self.memory.open(room, generation, manifest, dict(writers))
            case actions.CloseFence(room, generation):
                self.memory.close(room, generation)
            case actions.Deliver(room, ticket, delivered):
                self._deliver(room, ticket, delivered)
            case actions.Fail(room, ticket, error):
                self.causes[ticket] = str(error)
                self._ends(room, ticket, "failed")
            case _:
                return

    def _deliver(self, room: Room, ticket: int, delivered: actions.Delivered) -> None:
        prompt = self._prompts[ticket]
        assert self.memory.values(ticket) == {prompt}, f"room {room} holds stale bytes"
        assert delivered.first_token == first_token(prompt), f"room {room} got another prompt's first token"
        self._ends(room, ticket, "delivered")

    def _ends(self, room: Room, ticket: int, how: str) -> None:
        assert not any(seen == ticket for seen, _ in self.outcomes), f"ticket {ticket} ends twice: {how}"
        window = self.memory.windows.get(room)
        assert window is None or window.generation != ticket, "the caller gets blocks whose window is open"
        self.outcomes[ticket, how] += 1
        self.memory.release(ticket)

    # ---- control messages

    def _send(self, *sends: actions.Tell | actions.Offer) -> None:
        channel = sends[0].channel
        joined = self.connections.get(channel.prefill_rank)
        assert joined is not None, "a message for a channel that is not connected"
        assert joined.channel == channel, "a message for a channel that was dropped"
        texts = [type(send.message).__name__ if isinstance(send, actions.Tell) else "Offer" for send in sends]
        letter = Letter(" + ".join(texts), tuple(partial(self._arrive, joined, send) for send in sends))
        self.world.net.post(("up", self.rank, channel.prefill_rank), letter)

    def _arrive(self, joined: Connection, send: actions.Tell | actions.Offer) -> None:
        prefill = self.world.prefills[joined.channel.prefill_rank]
        if prefill is None or prefill.port != joined.port or self.world.decodes[self.rank] is not self:
            return
        if isinstance(send, actions.Offer):
            prefill.take(events.PreallocationReceived(self.identity, send.room, self.session, send.manifest))
        else:
            message: Registration | Notice = send.message
            prefill.hear(self.identity, message)

    def _port(self, channel: events.Channel) -> int:
        joined = self.connections.get(channel.prefill_rank)
        return joined.port if joined else 0

    def _forget_letters(self, prefill_rank: int) -> None:
        """What a dropped connection still carried downwards is gone; what was sent up may yet arrive."""
        self.world.net.clear("down", prefill_rank, self.rank)

    def _look_up(self, room: Room) -> None:
        self.take(self.world.look_up(room))

    # ---- data

    def lands(self, push: Push, rank: int, life: Life, copies: Copies, source: Memory) -> bool:
        """Let bytes in as the fence allows; what it allows must belong to the room's caller."""
        if not self.memory.admits(push.room, push.generation, Rank(rank), life, copies):
            return False
        self.memory.land(int(push.generation), copies, source)
        return True

    def landed(self, push: Push, rank: Rank) -> None:
        """A push has landed whole."""
        landed = self.memory.windows[push.room].landed
        landed[rank] = landed.get(rank, 0) + push.copies.nbytes
        report = events.Landed(push.room, push.generation, rank, landed[rank])
        text = f"{report.nbytes} bytes of {push.room} landed"
        self.world.net.post(("landed", rank, self.rank), Letter(text, (partial(self.take, report),)))

    def cut(self, life: Life) -> None:
        """A prefill rank's life is over, and with it its data connection."""
        cut = events.WriterCut(Rank(0), life, "connection reset")
        self.world.net.post(("landed", 0, self.rank), Letter("writer cut", (partial(self.take, cut),)))
