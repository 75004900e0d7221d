"""How long the engines of an arena's senders live. They are played: the end of a real one stops the process."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from pdplane.ids import Endpoint, Rank, SessionId
from pdplane.kv.arena import Arena
from pdplane.kv.copies import Copies
from pdplane.transport import mooncake
from pdplane.transport.line import Dial
from pdplane.transport.registry import Sender, close_shared, open_sender
from pdplane.transport.reports import Connected, Disconnected, Pushed, TransportOptions
from tests.transport.ends import PATIENCE_S, PREFILL_LIFE, Reports, push, random_arena, whole
from tests.waiting import until

BROKEN, STUCK = SessionId("127.0.0.1:1"), SessionId("127.0.0.1:2")


class Engines:
    """Those that are open, the oldest first, and the arena of their senders."""

    def __init__(self) -> None:
        self.arena = random_arena(16)
        self.open: list[Played] = []
        self.stuck, self.freed = threading.Event(), threading.Event()
        self._senders: list[Sender] = []
        self._port = 100

    def session(self) -> SessionId:
        """A new one."""
        self._port += 1
        return SessionId(f"127.0.0.1:{self._port}")

    def sender(self, session: SessionId, arena: Arena | None = None) -> tuple[Sender, Reports]:
        """One that is connected."""
        reports = Reports()
        sender = open_sender(
            "mooncake",
            peer=Endpoint.parse(session),
            session=session,
            prefill_rank=Rank(0),
            prefill_life=PREFILL_LIFE,
            arena=arena or self.arena,
            report=reports,
            options=TransportOptions(close_timeout_s=0.1 if session == STUCK else PATIENCE_S),
            target_base=0,
        )
        self._senders.append(sender)
        sender.start()
        reports.wait(Connected)
        return sender, reports

    def used_by(self, session: SessionId) -> Played:
        """What served the session of a sender that came and went."""
        sender, _ = self.sender(session)
        sender.close()
        (found,) = (engine for engine in self.open if session in engine.sessions)
        return found

    def fail(self) -> Played:
        """What a write failed in."""
        sender, reports = self.sender(BROKEN)
        sender.submit(push(1, whole(16)))
        reports.wait(Disconnected)
        sender.close()
        return [engine for engine in self.open if BROKEN in engine.sessions][-1]

    def close(self) -> None:
        self.freed.set()
        for sender in self._senders:
            sender.close()
        close_shared("mooncake", self.arena)


class Played:
    """An engine without Mooncake."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.sessions: set[SessionId] = set()
        engines.open.append(self)

    def reaches(self, session: SessionId) -> bool:
        self.sessions.add(session)
        return True

    def write(self, session: SessionId, parts: Sequence[Copies], target_base: int) -> bool:
        if session == STUCK:
            self._engines.stuck.set()
            self._engines.freed.wait(PATIENCE_S)
        return session != BROKEN

    def close(self) -> None:
        self._engines.open.remove(self)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    made = Engines()
    monkeypatch.setattr(mooncake, "MooncakeEngine", lambda *_: Played(made))
    monkeypatch.setattr(Dial, "probe", lambda _self, peer, _within: ("127.0.0.1", peer))
    yield made
    made.close()
    assert made.open == []


def test_one_engine_serves_every_session_in_turn(engines: Engines) -> None:
    first = engines.used_by(engines.session())
    assert engines.open == [first]
    assert engines.used_by(engines.session()) is first


def test_a_session_that_begins_anew_is_not_taken_for_what_it_was(engines: Engines) -> None:
    session = engines.session()
    before = engines.used_by(session)
    engines.sender(session)
    assert [session in engine.sessions for engine in engines.open] == [True, True]
    assert engines.open[0] is before


def test_after_a_failed_write_the_next_line_has_another_engine(engines: Engines) -> None:
    sender, reports = engines.sender(engines.session())
    failed = engines.fail()
    assert engines.open == [failed], "the other session's still"
    assert engines.used_by(engines.session()) is not failed
    sender.submit(push(1, whole(16)))
    reports.wait(Pushed)


def test_few_engines_are_kept_for_nothing(engines: Engines) -> None:
    failed = [engines.fail() for _ in range(mooncake.MAX_RETIRED + 2)]
    assert engines.open == failed[-mooncake.MAX_RETIRED :]


def test_an_engine_outlives_so_many_sessions(engines: Engines) -> None:
    kept = engines.session()
    engines.sender(kept)
    for _ in range(mooncake.MAX_ENDED):
        first = engines.used_by(engines.session())
    assert engines.open == [first]
    assert kept in first.sessions
    assert engines.used_by(engines.session()) is not first


def test_letting_go_closes_the_engines_of_one_arena(engines: Engines) -> None:
    other = random_arena(16)
    engines.fail()
    engines.used_by(engines.session())
    sender, _ = engines.sender(engines.session(), other)
    sender.close()
    theirs = engines.open[-1]
    close_shared("mooncake", engines.arena)
    assert engines.open == [theirs]
    close_shared("mooncake", other)
    assert engines.open == []


def test_an_engine_that_is_held_when_its_owner_lets_go_ends_with_its_line(engines: Engines) -> None:
    sender, _ = engines.sender(STUCK)
    sender.submit(push(1, whole(16)))
    assert engines.stuck.wait(PATIENCE_S)
    sender.close()
    close_shared("mooncake", engines.arena)
    assert not sender.ended
    assert len(engines.open) == 1
    engines.freed.set()
    until(lambda: sender.ended, "the end of the sender's thread")
    assert engines.open == []
