"""The prefill side's legacy channel by itself: what it remembers, and what it cannot deliver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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
from tests.waiting import PATIENCE_S

LAYOUT = wire.encode_layout(two_group_layout())
STATUS = Status(Room(7), StatusCode.FAILED, Rank(0))


@pytest.fixture
def channel() -> Iterator[LegacyPrefillChannel]:
    context = open_context()
    made = LegacyPrefillChannel(Counter())
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


def test_a_way_back_that_is_none_loses_the_peer(channel: LegacyPrefillChannel) -> None:
    identity = registered(channel, "no host", 9)
    assert channel.send(Send(identity, STATUS)) == [events.Undeliverable(identity)]


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
