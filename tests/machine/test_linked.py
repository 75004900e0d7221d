"""Linked machines under faults: a room ends once, no block is lost or freed twice, no stale byte is delivered."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pdplane.ids import Room
from tests.linked.machines import LONGEST_S, LinkedMachines
from tests.linked.net import CONTROL, QueueName

SHAPES = [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)]
ROOMS = st.integers(6, 8)
PROMPTS = st.integers(1, 255)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), SHAPES)
def test_a_room_number_serves_again_and_again(prefill_tp: int, decode_tp: int) -> None:
    world = LinkedMachines(prefill_tp, decode_tp)
    for use in range(1, 51):
        world.request(7, use)
        world.run()
        assert world.delivered == use * decode_tp
    world.advance(LONGEST_S)
    world.assert_drained()


class Faults(RuleBasedStateMachine):
    """Callers come and go, letters are lost, doubled and mixed up, processes die."""

    @initialize(shape=st.sampled_from(SHAPES))
    def start(self, shape: tuple[int, int]) -> None:
        self.world = LinkedMachines(*shape)

    # ---- callers

    @rule(room=ROOMS, prompt=PROMPTS)
    def both(self, room: int, prompt: int) -> None:
        self.world.request(room, prompt)

    @rule(room=ROOMS, prompt=PROMPTS)
    def prefill_alone(self, room: int, prompt: int) -> None:
        self.world.request_prefill(room, prompt)

    @rule(room=ROOMS, prompt=PROMPTS)
    def decode_alone(self, room: int, prompt: int) -> None:
        self.world.request_decode(room, prompt)

    @rule(room=ROOMS, on_prefill=st.booleans())
    def cancel(self, room: int, on_prefill: bool) -> None:
        for end in self.world.prefills if on_prefill else self.world.decodes:
            for ticket in range(1, 200) if end is not None else ():
                if not any(seen == ticket for seen, _ in end.outcomes):
                    end.cancel(Room(room), ticket, "cancelled by the caller")
                    break

    # ---- letters

    def _pick(self, data: st.DataObject, kinds: tuple[str, ...] = ()) -> QueueName | None:
        waiting = [name for name in self.world.net.waiting if not kinds or name[0] in kinds]
        return data.draw(st.sampled_from(waiting)) if waiting else None

    @precondition(lambda self: self.world.net.waiting)
    @rule(data=st.data(), count=st.integers(1, 12))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            if queue := self._pick(data):
                self.world.net.deliver(queue)

    @rule()
    def deliver_all(self) -> None:
        self.world.run()

    @rule(data=st.data(), harm=st.sampled_from(["drop", "tear", "duplicate", "postpone"]))
    def harm(self, data: st.DataObject, harm: str) -> None:
        if queue := self._pick(data, CONTROL):
            getattr(self.world.net, harm)(queue)

    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        decode = data.draw(st.integers(0, self.world.decode_tp - 1))
        self.world.cut(decode, data.draw(st.integers(0, self.world.prefill_tp - 1)))

    # ---- processes and time

    @rule(data=st.data(), same_port=st.booleans(), instance=st.booleans())
    def restart_prefill(self, data: st.DataObject, same_port: bool, instance: bool) -> None:
        one = data.draw(st.integers(0, self.world.prefill_tp - 1))
        for rank in range(self.world.prefill_tp) if instance else (one,):
            gone = self.world.prefills[rank]
            self.world.stop_prefill(rank)
            self.world.start_prefill(rank, port=gone.port if gone and same_port else None)

    @rule(data=st.data())
    def stop_prefill(self, data: st.DataObject) -> None:
        self.world.stop_prefill(data.draw(st.integers(0, self.world.prefill_tp - 1)))

    @rule()
    def start_missing(self) -> None:
        for rank, end in enumerate(self.world.prefills):
            if end is None:
                self.world.start_prefill(rank)

    @rule(data=st.data())
    def restart_decode(self, data: st.DataObject) -> None:
        self.world.restart_decode(data.draw(st.integers(0, self.world.decode_tp - 1)))

    @rule(seconds=st.sampled_from([0.5, 2.5, 7.0, 12.0]))
    def wait(self, seconds: float) -> None:
        self.world.advance(seconds)

    def teardown(self) -> None:
        """Whatever happened: everything drains, and the next request is served."""
        if not hasattr(self, "world"):
            return
        self.world.advance(LONGEST_S)
        self.start_missing()
        self.world.advance(LONGEST_S)
        self.world.assert_drained()
        before = self.world.delivered
        self.world.request(9, 77)
        self.world.run()
        assert self.world.delivered - before == self.world.decode_tp, list(self.world.net.log)
        self.world.advance(LONGEST_S)
        self.world.assert_drained()


Faults.TestCase.settings = settings(
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
TestFaults = Faults.TestCase
