"""The ROUTER and the DEALERs with raw peers at the other end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator

import attrs
import pytest
import zmq

from pdplane import wire
from pdplane.control import channels
from pdplane.control.channels import Curve, Dealers, Reading, RouterChannel, open_context
from pdplane.control.reactor import Reactor
from pdplane.errors import Cause, ConfigError, Why
from pdplane.ids import Endpoint, Generation, Life, Rank, Room, SessionId, new_life
from pdplane.kv.manifest import Manifest
from pdplane.machine import actions, events
from pdplane.messages import Drain, Failed, Ping, Status, StatusCode
from pdplane.security import Secret
from tests.raw_peers import RawDealer, RawRouter
from tests.waiting import until

LOOPBACK = Endpoint("127.0.0.1", 0)


@attrs.define
class Router:
    """A bound channel and what it has counted."""

    channel: RouterChannel
    endpoint: Endpoint
    rejected: Counter[str]

    def hear(self) -> list[events.PrefillEvent]:
        assert self.channel.socket.poll(10_000), "no message came"
        return self.channel.receive()


@pytest.fixture
def router() -> Iterator[Router]:
    rejected: Counter[str] = Counter()
    context, channel = open_context(), RouterChannel(rejected)
    yield Router(channel, channel.bind(context, LOOPBACK), rejected)
    channel.close()
    context.term()


def status(room: int, token: int = 1) -> Status:
    return Status(Room(room), StatusCode.SUCCESS, Rank(0), token)


def test_it_hears_and_answers_each_peer_by_its_connection(router: Router) -> None:
    with RawDealer(router.endpoint) as one, RawDealer(router.endpoint) as two:
        identities = []
        for peer, life in ((one, "1" * 32), (two, "2" * 32)):
            peer.send(*wire.encode_notice(Ping(Life(life))))
            (event,) = router.hear()
            assert isinstance(event, events.NoticeReceived)
            assert event.notice == Ping(Life(life))
            identities.append(event.identity)
        assert router.channel.send(actions.Send(identities[1], status(2))) == []
        assert router.channel.send(actions.Send(identities[0], Drain("bye"))) == []
        assert wire.decode_status(two.receive()) == status(2)
        assert wire.decode_notice(one.receive()) == Drain("bye")


def test_it_reads_the_three_messages(router: Router) -> None:
    with RawDealer(router.endpoint) as raw:
        raw.send(b"1", b"127.0.0.1:1", b'{"groups":[],"prefix_len":0,"prompt_len":1}')
        (offered,) = router.hear()
        assert isinstance(offered, events.PreallocationReceived)
        assert (offered.room, offered.session, offered.manifest) == (1, "127.0.0.1:1", Manifest((), 0, 1))
        raw.send(b"1", b"127.0.0.1:1", b"")
        (idle,) = router.hear()
        assert isinstance(idle, events.PreallocationReceived)
        assert idle.manifest is None
        raw.send(b"1", b"127.0.0.1:1", b"[]")
        (unusable,) = router.hear()
        assert isinstance(unusable, events.PreallocationRejected)
        raw.send(b"None", b"h", b"1", b"s:1", b"\1" * 8, b"{}", b"1", b"0")
        (rejected,) = router.hear()
        assert isinstance(rejected, events.RegistrationRejected)
        assert rejected.route is not None
    assert not router.rejected


def test_only_the_owner_of_a_session_has_its_manifests_read() -> None:
    owned: list[bytes] = []
    reading = Reading(lambda identity, _session: identity in owned, b"x" * 100)
    frames = [b"1", b"127.0.0.1:1", b"no manifest"]
    stranger = reading.preallocation(b"one", frames)
    assert stranger == events.PreallocationReceived(b"one", Room(1), SessionId("127.0.0.1:1"), None)
    owned.append(b"one")
    assert isinstance(reading.preallocation(b"one", frames), events.PreallocationRejected)
    long = reading.registration(b"one", [b"None", b"h", b"1", b"s:1", b"\1" * 8, b"{" * 4600, b"1", b"0"])
    assert isinstance(long, events.RegistrationRejected)
    assert "another model's" in long.reason


def test_what_is_no_message_is_counted_by_its_field(router: Router) -> None:
    with RawDealer(router.endpoint) as raw:
        for frames in ([b""], [b"-1", b"s", b""], [b"pdplane/1", b"x", b""], [b"None"] * 8):
            raw.send(*frames)
            router.hear()
    assert sum(router.rejected.values()) == 3  # the last one is a registration, and answered as such
    assert all(name.startswith("wire_") for name in router.rejected)


def test_a_vanished_peer_is_an_event_and_not_silence(router: Router) -> None:
    identity = new_life().encode()
    with RawDealer(router.endpoint, identity=identity) as raw:
        raw.send(*wire.encode_notice(Ping(new_life())))
        router.hear()
    unknown = actions.Send(new_life().encode(), status(1))
    assert router.channel.send(unknown) == [events.Undeliverable(unknown.identity)]
    until(lambda: router.channel.send(actions.Send(identity, status(1))) == [events.Undeliverable(identity)])


def test_each_message_to_a_slow_reader_is_delivered_or_an_event(router: Router) -> None:
    with RawDealer(router.endpoint) as raw:
        raw.socket.setsockopt(zmq.RCVHWM, 100)
        raw.send(*wire.encode_notice(Ping(new_life())))
        (event,) = router.hear()
        assert isinstance(event, events.NoticeReceived)
        sent = 20_000
        refused = sum(len(router.channel.send(actions.Send(event.identity, status(n)))) for n in range(sent))
        heard = [wire.decode_status(raw.receive()).room for _ in range(sent - refused)]
        assert heard == sorted(set(heard))
        assert not raw.hears(0.1)


def test_a_restarted_peer_is_served_while_the_router_is_busy(router: Router) -> None:
    """Each life has an identity of its own: that of the last one may not have been given up yet."""
    for _life in range(3):
        identity = new_life().encode()
        with RawDealer(router.endpoint, identity=identity) as raw, RawDealer(router.endpoint) as busy:
            for _ in range(100):
                busy.send(*wire.encode_notice(Ping(new_life())))
            raw.send(*wire.encode_notice(Ping(new_life())))
            heard = [event.identity for _ in range(101) for event in router.hear()]  # type: ignore[union-attr]
            assert heard.count(identity) == 1
            assert router.channel.send(actions.Send(identity, status(1))) == []
            assert wire.decode_status(raw.receive()).room == 1


def test_a_second_owner_of_an_identity_steals_nothing(router: Router) -> None:
    identity = new_life().encode()
    with RawDealer(router.endpoint, identity=identity) as owner:
        owner.send(*wire.encode_notice(Ping(new_life())))
        router.hear()
        with RawDealer(router.endpoint, identity=identity) as thief:
            thief.send(*wire.encode_notice(Ping(new_life())))
            assert not router.channel.socket.poll(100)
            router.channel.send(actions.Send(identity, status(1)))
            assert wire.decode_status(owner.receive()).room == 1
            assert not thief.hears(0.05)


def test_a_port_that_is_taken_is_named(router: Router) -> None:
    assert router.endpoint.host == "127.0.0.1"
    context, second = open_context(), RouterChannel(Counter())
    try:
        with pytest.raises(ConfigError, match=f"cannot bind {router.endpoint}: Address already in use"):
            second.bind(context, router.endpoint)
    finally:
        second.close()
        context.term()


# ---- decode's end


@attrs.define
class Heard:
    """A machine that remembers."""

    events: list[events.DecodeEvent] = attrs.field(factory=list)

    def handle(self, event: events.DecodeEvent, now: float) -> list[actions.DecodeAction]:
        self.events.append(event)
        return []


@attrs.define
class Dealing:
    dealers: Dealers
    machine: Heard
    reactor: Reactor[events.DecodeEvent, actions.DecodeAction]
    rejected: Counter[str]

    def connect(self, channel: events.Channel, endpoint: Endpoint) -> list[events.DecodeEvent]:
        return self.reactor.ask(lambda: self.dealers.connect(channel, endpoint, SessionId("127.0.0.1:9")))

    def say(self, channel: events.Channel, what: actions.Tell | actions.Offer) -> None:
        self.reactor.ask(lambda: self.dealers.send(what))


@pytest.fixture
def dealing() -> Iterator[Dealing]:
    rejected: Counter[str] = Counter()
    machine, dealers = Heard(), Dealers(rejected, None)
    reactor: Reactor[events.DecodeEvent, actions.DecodeAction] = Reactor(
        "dealers of a test", machine, lambda _action: (), lambda _error: None
    )
    dealers.open(reactor)
    reactor.start()
    yield Dealing(dealers, machine, reactor, rejected)
    reactor.close()
    dealers.close()


def channel_to(rank: int) -> events.Channel:
    return events.Channel(Endpoint("127.0.0.1", 1), Rank(rank), new_life())


def test_one_connection_a_prefill_rank(dealing: Dealing) -> None:
    with RawRouter() as one, RawRouter() as two:
        channels = [channel_to(0), channel_to(1)]
        for raw, channel in zip((one, two), channels, strict=True):
            assert dealing.connect(channel, raw.endpoint) == []
            dealing.say(channel, actions.Tell(channel, Ping(channel.life)))
            dealing.say(channel, actions.Offer(channel, Room(5), None))
            assert wire.decode_notice(raw.receive()) == Ping(channel.life)
            assert raw.receive() == [b"5", b"127.0.0.1:9", b""]
        assert one.identity != two.identity
        two.answer(wire.encode_status(status(5)))
        one.answer([b"nothing"])
        one.answer(wire.encode_notice(Failed(Room(5), Generation(1), Why(Cause.PEER_FAILED, "no"))))
        until(lambda: len(dealing.machine.events) == 2)
        assert {event.channel for event in dealing.machine.events} == set(channels)  # type: ignore[union-attr]
        assert dealing.rejected == {"wire_frame_count": 1}


def test_a_reconnected_channel_has_another_identity(dealing: Dealing) -> None:
    with RawRouter() as raw:
        channel, identities = channel_to(0), set()
        for _ in range(3):
            dealing.connect(channel, raw.endpoint)
            dealing.say(channel, actions.Tell(channel, Ping(channel.life)))
            raw.receive()
            identities.add(raw.identity)
            dealing.reactor.ask(lambda: dealing.dealers.disconnect(channel))
        assert len(identities) == 3


def test_what_a_full_queue_drops_is_counted(dealing: Dealing) -> None:
    channel = channel_to(0)
    dealing.connect(channel, Endpoint("127.0.0.1", 1))  # nobody listens there
    ping = actions.Tell(channel, Ping(channel.life))
    dealing.reactor.ask(lambda: [dealing.dealers.send(ping) for _ in range(5000)])
    assert 0 < dealing.rejected["undeliverable"] < 5000


def test_an_address_that_is_none_is_an_event(dealing: Dealing) -> None:
    channel = channel_to(0)
    (broken,) = dealing.connect(channel, Endpoint("not a host", 1))
    assert isinstance(broken, events.ChannelBroken)
    assert "not a host" in broken.why.text
    dealing.say(channel, actions.Tell(channel, Ping(channel.life)))
    assert dealing.rejected == {"undeliverable": 1}


@pytest.mark.parametrize(
    ("there", "cause", "says"),
    [
        ("nobody", Cause.UNREACHABLE, "nobody accepts connections there"),
        ("silence", Cause.UNREACHABLE, "nothing there answers"),
        ("a secret", Cause.REFUSED, "one side has a secret that the other has not"),
        ("another protocol", Cause.UNREACHABLE, "it ends each handshake"),
    ],
)
def test_a_connection_that_does_not_come_to_stand_says_why(
    dealing: Dealing, monkeypatch: pytest.MonkeyPatch, there: str, cause: Cause, says: str
) -> None:
    monkeypatch.setattr(channels, "_SILENT_S", 0.3)
    dealing.dealers._unreachable_s = 60.0 if cause is Cause.REFUSED else 0.1
    context, bound = open_context(), RouterChannel(Counter(), curve=Curve(Secret(b"a secret of some length")))
    channel, over = channel_to(0), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        end_each = threading.Thread(target=_end_each, args=(listener, over))
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        if there == "nobody":
            listener.close()
        elif there == "a secret":
            endpoint = bound.bind(context, LOOPBACK)
        elif there == "another protocol":
            end_each.start()
        dealing.connect(channel, endpoint)

        def told() -> bool:
            dealing.reactor.ask(lambda: dealing.dealers.tend(time.monotonic()))
            return bool(dealing.machine.events)

        until(told, "the obstacle")
        over.set()
        if end_each.ident:
            end_each.join()
    bound.close()
    context.term()
    (broken,) = dealing.machine.events
    assert isinstance(broken, events.ChannelBroken)
    assert broken.why.cause is cause
    assert f"{endpoint}: {says}" in broken.why.text
    assert f"rendezvous at {channel.bootstrap}" in broken.why.text


def _end_each(listener: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(TimeoutError), listener.accept()[0] as connected:
            connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_many_threads_send_through_one_reactor_and_frames_never_mix(dealing: Dealing) -> None:
    """The room stands in each message twice; another thread drops and opens channels meanwhile."""
    with RawRouter() as raw:
        channel = channel_to(0)
        dealing.connect(channel, raw.endpoint)
        over, other = threading.Event(), channel_to(1)

        def send(name: int) -> None:
            for number in range(200):
                room = name * 1000 + number
                dealing.say(
                    channel, actions.Tell(channel, Failed(Room(room), Generation(1), Why(Cause.PEER_FAILED, str(room))))
                )

        def churn() -> None:
            while not over.is_set():
                dealing.connect(other, raw.endpoint)
                dealing.reactor.ask(lambda: dealing.dealers.disconnect(other))

        threads = [threading.Thread(target=send, args=(name,)) for name in range(8)]
        churning = threading.Thread(target=churn)
        for thread in (*threads, churning):
            thread.start()
        heard = [wire.decode_notice(raw.receive()) for _ in range(1600)]
        for thread in threads:
            thread.join()
        over.set()
        churning.join()
        assert {notice.room for notice in heard if isinstance(notice, Failed)} == {
            name * 1000 + number for name in range(8) for number in range(200)
        }
        assert all(isinstance(notice, Failed) and notice.why.text == str(notice.room) for notice in heard)
