"""CURVE on the native sockets: the right key, another key, a stranger who knows the public key, and none."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import attrs
import pytest
import zmq

from pdplane import wire
from pdplane.control.channels import Curve, Gatekeeper, RouterChannel, open_context
from pdplane.control.reactor import Reactor
from pdplane.ids import Endpoint, new_life
from pdplane.machine import actions, events
from pdplane.messages import Ping
from pdplane.security import Secret
from tests.raw_peers import RawDealer
from tests.waiting import until

SECRET, ANOTHER = Secret(b"a secret of some length"), Secret(b"another secret, as long")


@attrs.define
class Heard:
    """A machine that remembers."""

    events: list[events.PrefillEvent] = attrs.field(factory=list)

    def handle(self, event: events.PrefillEvent, now: float) -> list[actions.PrefillAction]:
        self.events.append(event)
        return []


@attrs.frozen
class Guarded:
    endpoint: Endpoint
    heard: Heard


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    curve, machine = Curve(SECRET), Heard()
    gate, router, context = Gatekeeper(curve), RouterChannel(Counter(), curve=curve), open_context()
    reactor: Reactor[events.PrefillEvent, actions.PrefillAction] = Reactor(
        "router of a test",
        machine,
        router.send,
        lambda _error: None,  # type: ignore[arg-type]
    )
    gate.bind(context)
    reactor.watch(gate)
    endpoint = router.bind(context, Endpoint("127.0.0.1", 0))
    reactor.watch(router)
    reactor.start()
    yield Guarded(endpoint, machine)
    reactor.close()
    router.close()
    gate.close()
    context.term()


def ping() -> list[bytes]:
    return wire.encode_notice(Ping(new_life()))


def test_the_right_key_comes_in(guarded: Guarded) -> None:
    with RawDealer(guarded.endpoint, secret=SECRET) as raw:
        raw.send(*ping())
        until(lambda: len(guarded.heard.events) == 1)


@pytest.mark.parametrize(
    ("secret", "server_key"),
    [(None, None), (ANOTHER, None), (ANOTHER, Curve(SECRET).public)],
    ids=["no key", "another key", "another key, but the server's is known"],
)
def test_nobody_else_is_heard(guarded: Guarded, secret: Secret | None, server_key: bytes | None) -> None:
    with (
        RawDealer(guarded.endpoint, secret=secret, server_key=server_key) as stranger,
        RawDealer(guarded.endpoint, secret=SECRET) as friend,
    ):
        for _ in range(20):
            with contextlib.suppress(zmq.Again):  # a connection that was refused takes nothing
                stranger.socket.send_multipart(ping(), zmq.NOBLOCK)
            friend.send(*ping())
        until(lambda: len(guarded.heard.events) >= 20)
        assert not stranger.hears(0.05)
    identities = {event.identity for event in guarded.heard.events if isinstance(event, events.NoticeReceived)}
    assert len(guarded.heard.events) == 20
    assert len(identities) == 1


def test_a_key_holder_does_not_talk_to_an_open_server() -> None:
    context, router = open_context(), RouterChannel(Counter())
    endpoint = router.bind(context, Endpoint("127.0.0.1", 0))
    with RawDealer(endpoint, secret=SECRET) as raw:
        raw.send(*ping())
        assert not router.socket.poll(100)
    router.close()
    context.term()
