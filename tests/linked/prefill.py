"""A prefill rank of linked machines: machine, memory, callers and data senders in one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import attrs

from pdplane.errors import Cause, PoolExhausted, Why
from pdplane.ids import Life, Rank, Room, SessionId
from pdplane.kv.copies import Copies, plan_copies
from pdplane.machine import actions, events
from pdplane.machine.prefill import PrefillMachine
from pdplane.messages import Notice, Registration, Status, Window
from tests.linked.memory import Memory, half
from tests.linked.net import Letter

if TYPE_CHECKING:
    from tests.linked.machines import LinkedMachines


def first_token(prompt: int) -> int:
    """The token that a linked prefill finds for a prompt."""
    return 1000 + prompt


@attrs.define(eq=False)
class _Push:
    action: actions.StartPush
    cancelled: bool = False


class PrefillEnd:
    """One life of one prefill rank. Its callers push in two steps, then finish."""

    def __init__(self, world: LinkedMachines, rank: int, life: Life, machine: PrefillMachine, port: int) -> None:
        self.world, self.rank, self.life, self.machine, self.port = world, rank, life, machine, port
        self.memory = Memory(world.prefill_layout)
        self.wake: float | None = None
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.released: Counter[int] = Counter()
        self.prompts: dict[int, int] = {}  # by ticket
        self._outstanding: list[_Push] = []
        self._tickets = 0

    # ---- callers

    def request(self, room: Room, prompt: int, *, prompt_len: int | None, prompt_hash: str | None) -> int:
        """A caller asks for the room; gives its ticket."""
        self._tickets += 1
        self.prompts[self._tickets] = prompt
        self.take(events.PrefillRequested(room, self._tickets, prompt_len, prompt_hash))
        return self._tickets

    def cancel(self, room: Room, ticket: int, cause: str) -> None:
        self.take(events.RoomCancelled(room, ticket, Why(Cause.CANCELLED, cause)))

    # ---- the machine

    def take(self, event: events.PrefillEvent) -> None:
        if self.world.prefills[self.rank] is not self:
            return  # this life is over
        found = self.machine.handle(event, self.world.net.now)
        wakes = [action for action in found if isinstance(action, actions.WakeAt)]
        self.wake = wakes[-1].time if wakes else None
        pending = None
        for action in found:
            if pending is not None:
                assert isinstance(action, actions.Send), "a window notice names the very next message"
                self._send((pending, action))
                pending = None
            elif isinstance(action, actions.Send) and isinstance(action.message, Window):
                pending = action
            else:
                self._perform(action)

    def _perform(self, action: actions.PrefillAction) -> None:
        match action:
            case actions.Send():
                self._send((action,))
            case actions.OpenData(session, life):
                self._later("probe", f"who answers at {session}?", partial(self._probe, session, life))
            case actions.StartPush() | actions.CancelPush():
                self._move_data(action)
            case _:
                self._tell_caller(action)

    def _move_data(self, action: actions.StartPush | actions.CancelPush) -> None:
        match action:
            case actions.StartPush(session):
                push = _Push(action)
                self._outstanding.append(push)
                number = self.world.rank_of(session)
                letter = Letter(f"push {action.push.push} of {action.push.room}", (partial(self._advance, push, 0),))
                self.world.net.post(("data", self.rank, number), letter)
            case actions.CancelPush(session, life, room, generation):
                for push in self._outstanding:
                    asked = push.action
                    found = (asked.session, asked.life, asked.push.room, asked.push.generation)
                    push.cancelled |= found == (session, life, room, generation)

    def _tell_caller(self, action: actions.PrefillAction) -> None:
        match action:
            case actions.Offered():
                self._begin(action)
            case actions.Succeed(_, ticket):
                self._ends(ticket, "succeeded")
            case actions.Fail(_, ticket):
                self._ends(ticket, "failed")
            case actions.Release(room, ticket):
                self._release(room, ticket)
            case _:
                return

    def _ends(self, ticket: int, how: str) -> None:
        assert not any(seen == ticket for seen, _ in self.outcomes), f"ticket {ticket} ends twice: {how}"
        self.outcomes[ticket, how] += 1

    def _release(self, room: Room, ticket: int) -> None:
        self.released[ticket] += 1
        assert self.released[ticket] == 1, "blocks released twice"
        assert any(seen == ticket for seen, _ in self.outcomes), "released before its end"
        if ticket in self.memory.owners:
            self.memory.release(ticket)

    # ---- control messages

    def _send(self, sends: tuple[actions.Send, ...]) -> None:
        identity = sends[0].identity
        decode = self.world.decode_with(identity)
        joined = decode.connections.get(self.rank) if decode else None
        if decode is None or joined is None or joined.port != self.port:
            self.take(events.Undeliverable(identity))
            return
        end, channel = decode, joined.channel

        def part(message: Status | Notice) -> None:
            at = end.connections.get(self.rank)
            if at is None or at.channel != channel:
                return
            if isinstance(message, Status):
                end.take(events.StatusFromPrefill(channel, message))
            else:
                end.take(events.NoticeFromPrefill(channel, message))

        text = " + ".join(type(send.message).__name__ for send in sends)
        letter = Letter(text, tuple(partial(part, send.message) for send in sends))
        self.world.net.post(("down", self.rank, end.rank), letter)

    def hear(self, identity: bytes, message: Registration | Notice) -> None:
        if isinstance(message, Registration):
            layout = self.world.decode_layout
            self.take(events.RegistrationReceived(identity, message, layout))
        else:
            self.take(events.NoticeReceived(identity, message))

    # ---- the engine and the data senders

    def _begin(self, window: actions.Offered) -> None:
        """Compute the prompt (fill blocks with its number), then push twice and finish."""
        room, ticket = window.room, window.ticket
        prompt = self.prompts[ticket]
        done = events.RoomFinished(room, ticket, first_token(prompt), None, None, 0)
        if not window.destinations:  # an idle rank
            self._later("engine", f"finish {room}", partial(self.take, done))
            return
        try:
            blocks = self.memory.allocate(ticket, window.prefix_len, window.prompt_len)
        except PoolExhausted as full:
            self._later("engine", f"no blocks for {room}", partial(self.cancel, room, ticket, str(full)))
            return
        self.memory.fill(ticket, prompt)
        for step in self.world.prefill_layout.steps:
            copies: Mapping[SessionId, Copies] = {
                to.session: plan_copies(to.route, self.memory.layout, blocks, to.layout, to.manifest, step)
                for to in window.destinations
            }
            asked = events.PushRequested(room, ticket, {name: found for name, found in copies.items() if found.nbytes})
            self._later("engine", f"compute {room}", partial(self.take, asked))
        self._later("engine", f"finish {room}", partial(self.take, done))

    def _later(self, kind: str, text: str, part: Callable[[], None]) -> None:
        self.world.net.post((kind, self.rank, 0), Letter(text, (part,)))

    def _advance(self, push: _Push, step: int) -> None:
        """Land half of a push; a push that ends tells its receiver first, then its machine."""
        asked = push.action
        if self.world.prefills[self.rank] is not self or push not in self._outstanding:
            return
        decode = self.world.decode_of(asked.session)
        copies = half(asked.push.copies, step)
        if push.cancelled:
            self._push_ends(push, "cancelled")
        elif decode is None or decode.life != asked.life:
            self._push_ends(push, "nobody answers")
        elif not decode.lands(asked.push, self.rank, self.life, copies, self.memory):
            self._push_ends(push, "refused by the fence")
        elif step == 0:
            letter = Letter(
                f"push {asked.push.push} of {asked.push.room}, second half", (partial(self._advance, push, 1),)
            )
            self.world.net.post(("data", self.rank, decode.rank), letter, first=True)
        else:
            decode.landed(asked.push, Rank(self.rank))
            self._push_ends(push, None)

    def _push_ends(self, push: _Push, cause: str | None) -> None:
        self._outstanding.remove(push)
        asked = push.action.push
        ended = events.PushEnded(push.action.session, asked.room, asked.generation, asked.push, cause)
        self._later("ended", f"push {asked.push} ended: {cause}", partial(self.take, ended))

    def cut(self, session: SessionId, life: Life) -> None:
        """The decode rank's life is over: its pushes end."""
        for push in [push for push in self._outstanding if (push.action.session, push.action.life) == (session, life)]:
            self._push_ends(push, "connection reset")
        lost = events.DataLost(session, life, "connection reset")
        self._later("ended", f"{session} cut", partial(self.take, lost))

    def _probe(self, session: SessionId, life: Life) -> None:
        decode = self.world.decode_of(session)
        if decode is None:
            self.take(events.DataLost(session, life, "connection refused"))
        else:
            self.take(events.DataConnected(session, life, decode.life))
