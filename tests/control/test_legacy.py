"""The prefill side's legacy channel by itself: what it remembers, and what it cannot deliver."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import pytest
import zmq

from pdplane import wire
from pdplane.control.channels import open_context
from pdplane.control.legacy import Latest, LegacyPrefillChannel
from pdplane.errors import ConfigError
from pdplane.ids import Endpoint, Rank, Room, SessionId
from pdplane.machine import events
from pdplane.machine.actions import Send
from pdplane.messages import Refused, Registration, Status, StatusCode
from tests.samples import two_group_layout
from tests.sockets import silent_name_server
from tests.waiting import PATIENCE_S

LAYOUT = wire.encode_layout(two_group_layout())
STATUS = Status(Room(7), StatusCode.FAILED, Rank(0))
OTHER = Status(Room(8), StatusCode.FAILED, Rank(0))
Work = Callable[[], Iterable[events.PrefillEvent]]


@pytest.fixture
def work() -> queue.Queue[Work]:
    """What the channel asks its owner to do."""
    return queue.Queue()


@pytest.fixture
def channel(work: queue.Queue[Work]) -> Iterator[LegacyPrefillChannel]:
    context = open_context()
    made = LegacyPrefillChannel(Counter(), do=work.put)
    made.bind(context, Endpoint("127.0.0.1", 0))
    yield made
    made.close()
    context.term()


def registered(channel: LegacyPrefillChannel, host: str, port: int) -> bytes:
    """The identity that the channel gives to a decode rank with this way back."""
    message = wire.encode_registration(Registration(host, port, SessionId("10.0.0.1:9"), 4096, LAYOUT, 1, 0))
    (event,) = channel.read(message)
    assert isinstance(event, events.RegistrationReceived)
    return event.identity


def test_a_status_goes_to_the_way_back(channel: LegacyPrefillChannel) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        identity = registered(channel, "127.0.0.1:99", port)  # what stands behind a colon is cut
        assert channel.send(Send(identity, STATUS)) == []
        assert pull.poll(PATIENCE_S * 1000)
        assert pull.recv_multipart() == [b"7", b"0", b"0", b"-1", b"", b"0", b""]


def test_a_way_back_that_is_none_loses_the_peer(channel: LegacyPrefillChannel, work: queue.Queue[Work]) -> None:
    identity = registered(channel, "no host", 9)
    assert channel.send(Send(identity, STATUS)) == []
    assert list(work.get(timeout=PATIENCE_S)()) == [events.Undeliverable(identity)]


def test_a_silent_name_server_holds_up_its_names_only(
    channel: LegacyPrefillChannel, work: queue.Queue[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = silent_name_server(monkeypatch)
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        port = pull.bind_to_random_port("tcp://127.0.0.1")
        named, numbered = registered(channel, "slow.test", port), registered(channel, "127.0.0.1", port)
        assert channel.send(Send(named, STATUS)) == channel.send(Send(numbered, OTHER)) == []
        assert pull.poll(PATIENCE_S * 1000)
        assert pull.recv_multipart()[0] == b"8"
        for number in range(100):  # as many names that are never answered
            channel.send(Send(registered(channel, f"slow{number}.test", port), STATUS))
        answers.set()
        while not pull.poll(0):
            list(work.get(timeout=PATIENCE_S)())
        assert pull.recv_multipart()[0] == b"7"


def test_a_peer_that_was_never_heard_cannot_be_told(channel: LegacyPrefillChannel) -> None:
    stranger = b"legacy 10.0.0.1 9 10.0.0.1:9"
    assert channel.send(Send(stranger, STATUS)) == [events.Undeliverable(stranger)]


def test_a_refusal_is_logged_for_the_operator(channel: LegacyPrefillChannel, caplog: pytest.LogCaptureFixture) -> None:
    identity = registered(channel, "10.0.0.1", 9)
    assert channel.send(Send(identity, Refused(SessionId("10.0.0.1:9"), "dtype", "float16", "int8"))) == []
    assert "dtype differs: ours float16, theirs int8" in caplog.text


def test_a_taken_port_is_named() -> None:
    context = open_context()
    first, second = LegacyPrefillChannel(Counter()), LegacyPrefillChannel(Counter())
    taken = first.bind(context, Endpoint("127.0.0.1", 0))
    with pytest.raises(ConfigError, match="legacy control port"):
        second.bind(context, taken)
    first.close()
    second.close()
    context.term()


def test_what_was_used_least_lately_makes_place() -> None:
    latest: Latest[str, int] = Latest(2)
    assert latest.put("a", 1) == latest.put("b", 2) == []
    assert latest.get("a") == 1
    assert latest.put("c", 3) == [2]
    assert (latest.get("b"), len(latest)) == (None, 2)
    assert latest.pop("a") == 1
    assert latest.clear() == [3]


def test_a_table_makes_place_in_the_share_with_the_most() -> None:
    latest: Latest[str, int] = Latest(4)
    latest.put("good", 0, "one")
    for number in range(20):
        latest.put(f"junk{number}", number, "two")
    assert latest.put("late", 21, "three") == [17]
    assert [latest.get(key) for key in ("good", "late", "junk17", "junk18", "junk19")] == [0, 21, None, 18, 19]
    assert len(latest) == 4
