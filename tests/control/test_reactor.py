"""The reactor with a machine of a few lines and real sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import attrs
import pytest
import zmq

from pdplane.control.reactor import AwakeClock, Reactor
from pdplane.errors import InternalError
from pdplane.machine.actions import WakeAt
from pdplane.machine.events import Tick
from tests.waiting import until


@attrs.frozen
class Said:
    """An event and, at once, an action."""

    word: str


@attrs.define
class Echo:
    """Gives each event back as an action, and wakes when it is told to."""

    ticks: int = 0
    alarm: float | None = None
    heard: list[Said] = attrs.field(factory=list)
    times: list[float] = attrs.field(factory=list)

    def handle(self, event: Said | Tick, now: float) -> Sequence[Said | WakeAt]:
        self.times.append(now)
        if isinstance(event, Tick):
            self.ticks += 1
            if self.alarm is not None and now >= self.alarm:
                self.alarm = None
                return [Said("alarm")]
        elif event.word.startswith("wake"):
            self.alarm = now + 0.2
        elif event.word == "bug":
            raise ZeroDivisionError
        else:
            self.heard.append(event)
        actions: list[Said | WakeAt] = [event] if isinstance(event, Said) else []
        return [*actions, WakeAt(self.alarm)] if self.alarm is not None else actions


@attrs.define(eq=False)
class Ears:
    """A source of the reactor."""

    socket: zmq.Socket[bytes]

    def receive(self) -> list[Said]:
        return [Said(self.socket.recv(zmq.NOBLOCK).decode())]


Performing = Callable[[Said], Sequence[Said]]


@attrs.define
class Stage:
    """A reactor and what came out of it."""

    machine: Echo = attrs.field(factory=Echo)
    performed: list[str] = attrs.field(factory=list)
    broken: list[Exception] = attrs.field(factory=list)
    causes: dict[str, Sequence[Said]] = attrs.field(factory=dict)
    reactor: Reactor[Said, Said] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reactor = Reactor("reactor of a test", self.machine, self.perform, self.broken.append)

    def perform(self, action: Said) -> Sequence[Said]:
        self.performed.append(action.word)
        return self.causes.get(action.word, ())


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    stage.reactor.start()
    yield stage
    stage.reactor.close()


def test_events_are_handled_in_the_order_of_their_posts(stage: Stage) -> None:
    for number in range(1000):
        stage.reactor.post(Said(str(number)))
    assert stage.reactor.ask(lambda: list(stage.performed)) == [str(number) for number in range(1000)]


def test_an_event_without_a_wake_up_comes_with_the_next_turn(stage: Stage) -> None:
    stage.causes["loud"] = [Said("caused")]
    stage.reactor.post(Said("quiet"), wake=False)
    stage.reactor.post(Said("loud"))
    assert stage.reactor.ask(lambda: list(stage.performed)) == ["quiet", "loud", "caused"]
    stage.reactor.post(Said("alone"), wake=False)
    until(lambda: "alone" in stage.performed, "an idle turn")


def test_many_threads_post_and_nothing_is_lost(stage: Stage) -> None:
    def post(name: int) -> None:
        for number in range(500):
            stage.reactor.post(Said(f"{name} {number}"))

    threads = [threading.Thread(target=post, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = stage.reactor.ask(lambda: list(stage.performed))
    assert len(heard) == 16 * 500
    for name in range(16):
        mine = [int(word.split()[1]) for word in heard if word.split()[0] == str(name)]
        assert mine == list(range(500))


def test_what_an_action_causes_comes_before_the_next_post(stage: Stage) -> None:
    stage.causes["a"] = [Said("b"), Said("c")]
    stage.causes["b"] = [Said("d")]
    stage.reactor.post(Said("a"))
    stage.reactor.post(Said("e"))
    assert stage.reactor.ask(lambda: list(stage.performed)) == ["a", "b", "c", "d", "e"]


def test_time_comes_without_other_traffic_and_without_a_storm(stage: Stage) -> None:
    stage.reactor.post(Said("wake"))
    until(lambda: "alarm" in stage.performed, "the alarm")
    assert stage.machine.ticks <= 2  # one for the alarm, and no polling on the way to it


def test_no_time_passes_while_the_thread_is_held_up(stage: Stage) -> None:
    """Else every peer would have been silent for as long."""
    stage.reactor.post(Said("before"))
    stage.reactor.ask(lambda: time.sleep(2.0))
    stage.reactor.post(Said("after"))
    until(lambda: len(stage.machine.times) == 2)
    before, after = stage.machine.times
    assert after - before < 2.0


def test_of_a_pause_that_hits_a_wait_little_counts(stage: Stage) -> None:
    """Both sides may have been stopped: then none of them has said anything meanwhile."""
    stopped_s = 0.0
    stage.reactor.ask(lambda: setattr(stage.reactor, "_clock", AwakeClock(lambda: time.monotonic() + stopped_s)))
    stage.reactor.post(Said("before"))
    until(lambda: len(stage.machine.times) == 1)
    stopped_s = 25.0
    stage.reactor.post(Said("after"))
    until(lambda: len(stage.machine.times) == 2)
    before, after = stage.machine.times
    assert after - before < 25.0


def test_the_last_wake_up_time_counts(stage: Stage) -> None:
    stage.reactor.post(Said("wake"))
    stage.reactor.post(Said("other"))
    until(lambda: "alarm" in stage.performed, "the alarm")
    assert stage.performed == ["wake", "other", "alarm"]


def test_messages_of_a_socket_become_events_also_when_many_wait(stage: Stage) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    there.bind("inproc://words")
    here.connect("inproc://words")
    other = Stage()
    ears = Ears(there)
    other.reactor.watch(ears)
    for number in range(900):  # more than one socket's turn
        here.send(str(number).encode())
    other.reactor.start()
    until(lambda: len(other.performed) == 900)
    assert other.performed == [str(number) for number in range(900)]
    other.reactor.ask(lambda: other.reactor.unwatch(ears))
    here.send(b"unheard")
    assert other.reactor.ask(lambda: len(other.performed)) == 900
    other.reactor.close()
    for end in (here, there):
        end.close(0)
    context.term()


class Endless(Ears):
    """A socket that has the next message before the last one is handled."""

    def receive(self) -> list[Said]:
        return [Said("again")]


def test_a_socket_that_never_rests_starves_nobody(stage: Stage) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.PAIR) as here, context.socket(zmq.PAIR) as there:
        there.bind("inproc://words")
        here.connect("inproc://words")
        here.send(b"")  # never received: the socket stays ready
        endless = Endless(there)
        stage.reactor.ask(lambda: stage.reactor.watch(endless))
        stage.reactor.post(Said("wake"))
        until(lambda: "alarm" in stage.performed, "the alarm")
        stage.reactor.ask(lambda: stage.reactor.unwatch(endless))


def test_a_bug_ends_the_loop_once_and_is_told(stage: Stage) -> None:
    stage.reactor.post(Said("bug"))
    stage.reactor.post(Said("later"))
    until(lambda: not stage.reactor.alive)
    assert [type(error) for error in stage.broken] == [ZeroDivisionError]
    assert "later" not in stage.performed
    with pytest.raises(InternalError, match="does not answer"):
        stage.reactor.ask(lambda: 1)
    stage.reactor.post(Said("dropped"))


def test_the_reactor_may_ask_itself(stage: Stage) -> None:
    assert stage.reactor.ask(lambda: stage.reactor.ask(lambda: 7)) == 7


def test_closing_ends_after_what_was_posted_before_and_is_idempotent(stage: Stage) -> None:
    for number in range(100):
        stage.reactor.post(Said(str(number)))
    stage.reactor.close()
    assert len(stage.performed) == 100
    stage.reactor.close()
    assert not stage.reactor.alive
    stage.reactor.post(Said("dropped"))
    assert len(stage.performed) == 100


def test_a_reactor_that_never_started_closes() -> None:
    Stage().reactor.close()


def test_a_hung_reactor_is_told_until_it_goes_on() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def perform(_action: Said) -> list[Said]:
        entered.set()
        go_on.wait()
        return []

    reactor = Reactor[Said, Said]("pdplane-slow", Echo(), perform, lambda _error: None, stalled_s=1.5)
    reactor.start()
    assert reactor.trouble() is None
    reactor.post(Said("stop here"))
    assert entered.wait(15)
    until(lambda: "pdplane-slow hangs" in str(reactor.trouble()))
    go_on.set()
    until(lambda: reactor.trouble() is None)
    reactor.close()
    assert "pdplane-slow has ended" in str(reactor.trouble())
