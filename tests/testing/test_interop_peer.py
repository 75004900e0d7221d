"""The interop peer against itself over the native wire: its events and exit codes are a contract with other benches."""

from __future__ import annotations

import pytest

from pdplane.testing.bench_layouts import LAYOUTS
from pdplane.testing.interop_peer import main
from tests.free_ports import free_ports
from tests.testing.bench import NATIVE, Peer, Said, ThreadedPeer, pair

PREFILL_EVENTS = [
    "registered", "BootstrappedEvent", "preallocated", "manifests", "forward_done", "SucceededEvent"
]  # fmt: skip
DECODE_EVENTS = ["registered", "BootstrappedEvent", "preallocated", "RemotePrefillDoneEvent"]


def _all_good(prefills: list[Said], decodes: list[Said], rooms: tuple[int, ...] = (1,)) -> None:
    outcomes = {str(room): "success" for room in rooms}
    for said in [*prefills, *decodes]:
        assert said.exit_code == 0, said
        assert said.done["rooms"] == outcomes
    for said in decodes:
        assert said.done["stray_bytes"] == 0
        for event in said.of("RemotePrefillDoneEvent"):
            assert (event["token"], event["bad_bytes"]) == (1234, 0)
            assert event["verified_bytes"] > 0


def test_every_event_of_one_room_in_order() -> None:
    (prefill,), (decode,) = pair(1, 1, "--rooms", "7", prefill=["--token", "55", "--spec", "5,6"], kind=Peer)
    assert prefill.names == ["bootstrap", "ready", *PREFILL_EVENTS, "done"]
    assert decode.names == ["ready", *DECODE_EVENTS, "done"]
    assert (prefill.exit_code, decode.exit_code) == (0, 0)
    for said in (prefill, decode):
        times = [event["t"] for event in said.events]
        assert times == sorted(times)
        assert all(event["room"] == 7 for event in said.events if "room" in event)
    ready = decode.of("ready")[0]
    assert set(ready) == {"event", "t", "role", "session", "zmq", "arena_ptr", "arena_bytes", "tp_rank", "dp_rank"}
    assert set(ready) == set(prefill.of("ready")[0])
    assert prefill.of("manifests")[0]["sessions"] == [ready["session"]]
    assert prefill.of("preallocated")[0]["tables"] == {"full": [1, 2, 3, 4, 5, 6]}
    assert decode.of("registered")[0]["status"] == "Bootstrapped"
    done = decode.of("RemotePrefillDoneEvent")[0]
    assert (done["token"], done["spec"], done["bad_bytes"]) == (55, [5, 6], 0)
    assert done["verified_bytes"] == 6 * 4 * 256  # six slots of two layers' keys and values
    assert prefill.done == {"event": "done", "t": prefill.done["t"], "role": "prefill", "rooms": {"7": "success"}}
    assert decode.done["stray_bytes"] == 0


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"full_attention", "big"}))
def test_every_layout(layout: str) -> None:
    rooms = (1, 2, 3)
    words = ["--layout", layout, "--rooms", "1,2,3", "--prompt-len", "43"]
    _all_good(*pair(2, 1, *words), rooms)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 2), (1, 2), (4, 2)])
def test_ranks_agree_on_each_poll(prefill_tp: int, decode_tp: int) -> None:
    first, second = free_ports(2)
    kind = Peer if prefill_tp == 2 else ThreadedPeer
    _all_good(*pair(prefill_tp, decode_tp, "--rooms", "1,2", reduce_ports=(first, second), kind=kind), (1, 2))


def test_idle_ranks_take_part_without_bytes() -> None:
    """Four prefill ranks share two heads: two of them have nothing to send."""
    prefills, decodes = pair(4, 1, "--layout", "gqa_small")
    _all_good(prefills, decodes)
    assert [len(said.of("manifests")[0]["sessions"]) for said in prefills] == [1, 0, 1, 0]


def test_a_prefix_that_decode_holds_is_not_sent() -> None:
    prefills, decodes = pair(1, 1, "--prompt-len", "30", decode=["--prefix-len", "12"])
    _all_good(prefills, decodes)
    assert decodes[0].of("preallocated")[0]["tables"]["full"][:3] == [-1, -1, -1]
    assert decodes[0].of("RemotePrefillDoneEvent")[0]["verified_bytes"] == 5 * 4 * 256


@pytest.mark.parametrize("words", [["1"], ["2", "--target-layers", "5"], ["100"]], ids=" ".join)
def test_layers_travel_in_steps(words: list[str]) -> None:
    both = ["--layout", "big", "--arena-blocks", "3", "--prompt-len", "100"]
    _all_good(*pair(1, 1, *both, prefill=["--layerwise-interval", *words]))


@pytest.mark.parametrize("layout", ["full_attention", "state_hybrid", "swa_hybrid", "compressed"])
@pytest.mark.parametrize("words", [["7"], ["16", "--chunk-start", "8"]], ids=" ".join)
def test_chunks_travel_as_they_are_complete(layout: str, words: list[str]) -> None:
    both = ["--layout", layout, "--prompt-len", "43", "--rooms", "1,2"]
    decode = ["--prefix-len", "16"]
    chunks = ["--layerwise-interval", "1", "--chunk", *words]
    _all_good(*pair(2, 1, *both, prefill=chunks, decode=decode), (1, 2))
    _all_good(*pair(1, 1, *both, prefill=chunks), (1, 2))


def test_an_aborted_room_fails_on_both_sides() -> None:
    (prefill,), (decode,) = pair(1, 1, "--expect", "failed", prefill=["--abort", "1"])
    assert (prefill.exit_code, decode.exit_code) == (0, 0)
    assert "aborted" in prefill.of("FailedEvent")[0]["reason"]
    assert "aborted" in decode.of("FailedEvent")[0]["reason"]
    assert decode.done["rooms"] == {"1": "failed"}


def test_two_data_parallel_groups_share_the_rooms() -> None:
    """Each group has its own ranks, which leave the others' rooms alone; decode finds a room's group by its number."""
    rooms = ["--rooms", "2,3,4"]
    group = [*NATIVE, *rooms, "--dp-size", "2", "--dp-rank"]
    even = ThreadedPeer("prefill", *group, "0", "--serve-bootstrap", "--bootstrap-port", "0")
    port = even.hear("bootstrap")["url"].rpartition(":")[2]
    odd = ThreadedPeer("prefill", *group, "1", "--bootstrap-port", port)
    decode = ThreadedPeer("decode", *NATIVE, "--bootstrap", f"127.0.0.1:{port}", *rooms)
    _all_good([], [decode.end()], (2, 3, 4))
    _all_good([odd.end()], [], (3,))
    _all_good([even.end()], [], (2, 4))


def test_the_rendezvous_alone_serves_until_it_is_told_to_stop() -> None:
    with Peer("bootstrap", "--bootstrap-port", "0") as bootstrap:
        port = bootstrap.hear("bootstrap")["url"].rpartition(":")[2]
        prefill = ThreadedPeer("prefill", *NATIVE, "--bootstrap-port", port)
        decode = ThreadedPeer("decode", *NATIVE, "--bootstrap", f"127.0.0.1:{port}")
        _all_good([prefill.end()], [decode.end()])
        bootstrap.terminate()
        said = bootstrap.end()
    assert said.exit_code == 0
    assert said.names == ["bootstrap", "done"]


def test_other_outcomes_than_expected_exit_with_one() -> None:
    nobody = f"127.0.0.1:{free_ports(1)[0]}"
    words = ["decode", *NATIVE, "--linger", "0.1", "--bootstrap", nobody, "--wait-bootstrap", "1"]
    late = ThreadedPeer(*words, "--timeout", "0.5", "--expect", "timeout")
    expected = ThreadedPeer(*words, "--expect", "failed")
    with Peer(*words) as unexpected:
        said = unexpected.end()
    assert said.exit_code == 1
    assert said.names == ["ready", "registered", "FailedEvent", "done"]
    assert said.of("registered")[0]["status"] == "Failed"
    assert late.end().done["rooms"] == {"1": "timeout"}
    assert [late.end().exit_code, expected.end().exit_code] == [0, 0]


@pytest.mark.parametrize(
    "words",
    [
        ["prefill", "--tp-size", "2", "--tp-rank", "2"],
        ["prefill", "--dp-rank", "1"],
        ["prefill", "--prefix-len", "22"],
        ["prefill", "--log-level", "LOUD"],
        ["prefill", "--channel", "legacy", "--transport", "tcp"],
    ],
    ids=" ".join,
)
def test_options_that_do_not_fit_exit_with_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("interop_peer: ")
