"""The interop peer over the legacy channel, its bytes moved by the real Mooncake engine: every byte, no other byte."""

from __future__ import annotations

import socket
from functools import partial

import pytest

from tests.testing.bench import Peer, Said, needs_mooncake, pair

# Each rank in a process of its own: the end of an engine stops its whole process.
legacy_pair = partial(pair, link=("--channel", "legacy", "--transport", "mooncake"), kind=Peer)

pytestmark = needs_mooncake


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _all_good(prefills: list[Said], decodes: list[Said], rooms: tuple[int, ...] = (1,)) -> None:
    for said in [*prefills, *decodes]:
        assert said.exit_code == 0, said
        assert said.done["rooms"] == {str(room): "success" for room in rooms}
    for said in decodes:
        assert said.done["stray_bytes"] == 0
        assert {event["bad_bytes"] for event in said.of("RemotePrefillDoneEvent")} == {0}


def test_one_room_tells_what_the_contract_says() -> None:
    (prefill,), (decode,) = legacy_pair(1, 1, prefill=["--token", "55", "--spec", "5,6"])
    assert (prefill.exit_code, decode.exit_code) == (0, 0)
    ready = decode.of("ready")[0]
    assert ready["zmq"].startswith("tcp://127.0.0.1:")
    assert prefill.of("manifests")[0]["sessions"] == [ready["session"]]
    done = decode.of("RemotePrefillDoneEvent")[0]
    assert (done["token"], done["spec"], done["verified_bytes"], done["bad_bytes"]) == (55, [5, 6], 6 * 4 * 256, 0)
    assert decode.done["stray_bytes"] == 0


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "layout"),
    [(2, 1, "state_hybrid"), (1, 2, "swa_hybrid"), (4, 2, "full_attention"), (4, 1, "gqa_small"), (2, 2, "compressed")],
)
def test_ranks_and_layouts(prefill_tp: int, decode_tp: int, layout: str) -> None:
    both = ["--rooms", "1,2", "--layout", layout, "--prompt-len", "43"]
    ports = (_free_port(), _free_port())
    _all_good(*legacy_pair(prefill_tp, decode_tp, *both, reduce_ports=ports), (1, 2))


def test_chunks_and_layers_into_a_suffix() -> None:
    chunks = ["--layerwise-interval", "1", "--chunk", "8", "--chunk-start", "4"]
    both = ["--prompt-len", "43"]
    _all_good(*legacy_pair(2, 1, *both, prefill=chunks, decode=["--prefix-len", "12"]))


def test_an_aborted_room_fails_on_both_sides() -> None:
    (prefill,), (decode,) = legacy_pair(1, 1, "--expect", "failed", prefill=["--abort", "1"])
    assert (prefill.exit_code, decode.exit_code) == (0, 0)
    assert "aborted" in prefill.of("FailedEvent")[0]["reason"]
    assert decode.done == {**decode.done, "rooms": {"1": "failed"}, "stray_bytes": 0}
