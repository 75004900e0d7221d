"""Either side of a legacy pair ends and comes back, as processes with the real Mooncake engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.testing.bench import Peer, Said, needs_mooncake

LEGACY = ("--channel", "legacy", "--transport", "mooncake", "--linger", "0.1")


pytestmark = needs_mooncake


def _prefill(port: str, rooms: str, *words: str) -> Peer:
    return Peer("prefill", *LEGACY, "--bootstrap-port", port, "--rooms", rooms, *words)


def _decode(port: str, rooms: str) -> Peer:
    return Peer("decode", *LEGACY, "--bootstrap", f"127.0.0.1:{port}", "--rooms", rooms)


def _port(peer: Peer) -> str:
    return str(peer.hear("bootstrap")["url"].rpartition(":")[2])


def _good(said: Said) -> bool:
    return said.exit_code == 0 and set(said.done["rooms"].values()) == {"success"}


@contextlib.contextmanager
def _rendezvous() -> Iterator[str]:
    with Peer("bootstrap", "--bootstrap-port", "0") as peer:
        yield _port(peer)


def test_a_new_decode_takes_the_next_room() -> None:
    with _prefill("0", "1,2", "--serve-bootstrap") as prefill:
        port = _port(prefill)
        for room in ("1", "2"):
            with _decode(port, room) as decode:
                assert _good(decode.end())
        assert _good(prefill.end())


def test_a_killed_decode_leaves_the_others_alone() -> None:
    with _prefill("0", "2", "--serve-bootstrap") as prefill:
        port = _port(prefill)
        with _decode(port, "1") as killed:  # of a room that prefill is never asked for
            killed.hear("preallocated")
        with _decode(port, "2") as decode:
            assert _good(decode.end())
        assert _good(prefill.end())


def test_an_instance_comes_back_at_its_address() -> None:
    port = "0"
    for _ in range(2):
        with _prefill(port, "1", "--serve-bootstrap") as prefill:
            port = _port(prefill)
            with _decode(port, "1") as decode:
                assert _good(decode.end())
            assert _good(prefill.end())


def test_a_new_rank_behind_a_standing_rendezvous() -> None:
    with _rendezvous() as port:
        for room in ("1", "2"):
            with _prefill(port, room) as prefill:
                prefill.hear("ready")
                with _decode(port, room) as decode:
                    assert _good(decode.end())
                assert _good(prefill.end())


def test_a_room_offered_to_the_rank_that_was_fails_when_the_new_one_comes() -> None:
    with _rendezvous() as port:
        with _prefill(port, "1") as before:
            before.hear("ready")
            with _decode(port, "1") as decode:
                assert _good(decode.end())
            assert _good(before.end())
        with _decode(port, "2") as decode:  # the rendezvous still names the rank that has gone
            decode.hear("preallocated")
            with _prefill(port, "2", "--expect", "timeout", "--timeout", "5") as after:
                reason = decode.hear("FailedEvent")["reason"]
                assert "restarted" in reason or "gone" in reason, reason
                assert decode.end().done["rooms"] == {"2": "failed"}
                assert after.end().exit_code == 0
