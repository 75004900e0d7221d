"""Whatever bytes come to the open ports: counted, without effect, and good requests go on."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import attrs
import pytest

from pdplane.errors import RoomFailed
from pdplane.ids import Endpoint
from pdplane.plane.rooms import DecodeRoom
from tests.plane import hostile
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.raw_prefill import RawPrefill
from tests.plane.sides import DecodeSide, PrefillSide, meet
from tests.raw_peers import Frames, RawDealer
from tests.waiting import PATIENCE_S, until


def rejected(side: PrefillSide | DecodeSide) -> int:
    return int(sum(side.plane.statistics()["rejected"].values()))


def shout(endpoint: Endpoint, data: bytes) -> None:
    """Bytes of another protocol to a port; whatever comes back is read to its end."""
    with socket.create_connection((endpoint.host, endpoint.port), PATIENCE_S) as stranger:
        stranger.settimeout(PATIENCE_S)
        with contextlib.suppress(OSError):  # it may hang up at any point
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(4096):
                pass


@pytest.mark.parametrize("kind", ["registrations", "offers", "notices", "others", "fuzz"])
def test_prefill_counts_them_and_serves_on(start_prefill: StartPrefill, start_decode: StartDecode, kind: str) -> None:
    prefill, decode = start_prefill(), start_decode()
    meet(prefill, decode).serve()
    before = prefill.plane.statistics()
    sent: list[Frames] = {
        "registrations": lambda: hostile.bad_registrations(prefill.plane.layout),
        "offers": lambda: hostile.bad_offers(decode.plane.session.encode()),
        "notices": hostile.bad_notices,
        "others": hostile.no_messages,
        "fuzz": lambda: hostile.fuzz(1000, seed=1),
    }[kind]()
    assert prefill.plane.control is not None
    with RawDealer(prefill.plane.control) as raw:
        for frames in sent:
            raw.send(*frames)
        until(lambda: rejected(prefill) >= len(sent), "every rejection")
        meet(prefill, decode).serve()
        after = prefill.plane.statistics()
    assert sum(after["rejected"].values()) == len(sent)
    assert not any("[" in kind for kind in after["rejected"])  # no peer makes up names of counts
    assert after["rooms"] == before["rooms"] == {}
    assert after["sessions"]["sessions"] == 1
    assert after["sessions"]["checking"] == 0
    assert not Path("/tmp/canary").exists()


def test_a_bad_registration_is_answered_when_the_way_back_is_readable(start_prefill: StartPrefill) -> None:
    prefill = start_prefill()
    assert prefill.plane.control is not None
    with RawDealer(prefill.plane.control) as raw:
        raw.send(b"pdplane/1", b"ping", b'{"life":"x"}')
        raw.send(*hostile.registration(prefill.plane.layout, layout=b"null"))
        assert b"layout" in raw.receive_until(b"refused")[-1]


def test_other_protocols_at_every_port(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    meet(prefill, decode).serve()
    control = prefill.plane.control
    assert control is not None
    for data in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\0" * 100, b"\xff" * 9 + b"\x7f", hostile.PICKLE, b""):
        for endpoint in (control, decode.plane.data, prefill.rendezvous):
            shout(endpoint, data)
    until(lambda: decode.plane.statistics()["receiver"]["half_open"] == 0)
    assert decode.plane.statistics()["receiver"]["refused_greetings"] == 5
    meet(prefill, decode).serve()
    assert prefill.plane.statistics()["sessions"]["sessions"] == 1


@attrs.frozen
class Faced:
    """A decode plane with one room that waits for a raw prefill."""

    raw: RawPrefill
    decode: DecodeSide
    room: DecodeRoom


@pytest.mark.parametrize("kind", ["statuses", "notices", "others", "fuzz"])
def test_decode_counts_them_and_serves_on(start_prefill: StartPrefill, start_decode: StartDecode, kind: str) -> None:
    decode = start_decode()
    sent: list[Frames] = {
        "statuses": hostile.bad_statuses,
        "notices": hostile.bad_notices,
        "others": lambda: [frames for frames in hostile.no_messages() if frames != [b"7"] * 7],
        "fuzz": lambda: hostile.fuzz(1000, seed=2),
    }[kind]()
    with RawPrefill(decode.plane.layout) as raw:
        target, manifest = decode.lend(10)
        room = decode.plane.open(6, prefill=raw.rendezvous, manifest=manifest)
        raw.accept()
        raw.hear_offer()
        for frames in sent:
            raw.router.answer(frames)
        until(lambda: rejected(decode) >= len(sent), "every rejection")
        assert rejected(decode) == len(sent)
        assert decode.plane.statistics()["rooms"] == {"waiting": 1}
        assert not room.done.done()
        meet(start_prefill(), decode).serve()
        room.cancel()
        with pytest.raises(RoomFailed, match="cancelled"):
            room.wait(PATIENCE_S)
        decode.pool.release(target)


@pytest.mark.parametrize("host", ["exa mple", "a/b", "", "tcp://x"])
def test_a_rendezvous_may_name_any_host(start_prefill: StartPrefill, start_decode: StartDecode, host: str) -> None:
    decode = start_decode(bootstrap_timeout_s=1)
    target, manifest = decode.lend(10)
    with RawPrefill(decode.plane.layout, host=host) as raw:
        room = decode.plane.open(1, prefill=raw.rendezvous, manifest=manifest)
        with pytest.raises(RoomFailed, match=r"cannot connect|rank_ip|did not register|no known host name"):
            room.wait(PATIENCE_S)
    decode.pool.release(target)
    prefill = start_prefill()

    def served() -> bool:
        with contextlib.suppress(RoomFailed):  # the second that the first room has is short for a busy machine
            meet(prefill, decode).serve()
            return True
        return False

    until(served, "a room that is served")
