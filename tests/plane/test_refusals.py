"""Sides that do not fit: refused before a byte travels, with the reason where the caller sees it."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pdplane.errors import ConfigError, LocalProtocolError, RoomFailed
from pdplane.ids import Endpoint, FieldId, GroupId
from pdplane.kv.arena import Arena
from pdplane.kv.layout import FULL_HISTORY, FULL_SUFFIX, HISTORY, GroupSpec, Layout
from pdplane.kv.planning import FieldSpec, plan_layout
from pdplane.messages import Fingerprint
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.plane.decode import DecodePlane
from pdplane.plane.prefill import PrefillPlane
from pdplane.security import Secret
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import DecodeSide, Meeting, PrefillSide, meet
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S

SECRET = Secret(b"a secret of some length")


def layout(*, dtype: str = "float16", width: int = 2, layers: int = 2, block_tokens: int = 4) -> Layout:
    spec = GroupSpec(GroupId("kv"), FULL_HISTORY, block_tokens, 1, None, HISTORY, FULL_SUFFIX)
    fields = [
        FieldSpec(GroupId("kv"), FieldId(f"layer.{layer}.{part}"), "kv", (block_tokens, 4, width), dtype)
        for layer in range(layers)
        for part in "kv"
    ]
    return plan_layout([spec], fields, num_lcm_blocks=16, prefix_granularity=block_tokens)


def fails(meeting: Meeting) -> str:
    """The cause that decode's caller sees; prefill's never gets to work."""
    with pytest.raises(RoomFailed) as caught:
        meeting.waiting.wait(PATIENCE_S)
    meeting.work.cancel("the test is over")
    with pytest.raises(RoomFailed):
        meeting.work.wait_window(PATIENCE_S)
    return caught.value.text


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"width": 3}, "shape"),
        ({"layers": 3}, "layer.2"),
        ({"block_tokens": 8}, "granularity"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_layout_is_refused_with_the_field_named(
    start_prefill: StartPrefill, start_decode: StartDecode, changes: dict[str, Any], field: str
) -> None:
    prefill, decode = start_prefill(layout()), start_decode(layout(**changes))
    assert field in fails(meet(prefill, decode))
    assert prefill.plane.statistics()["sessions"]["sessions"] == 0
    meet(prefill, start_decode(layout())).serve()


def test_arenas_of_different_sizes_fit(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill = start_prefill(two_group_layout(num_lcm_blocks=16))
    meet(prefill, start_decode(two_group_layout(num_lcm_blocks=9))).serve()


def fingerprint(model: str = "a", backend: str = "cpu") -> Fingerprint:
    return Fingerprint((("model", model),), (("backend", backend),))


def test_another_model_is_refused_with_both_values(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill = start_prefill(fingerprint=fingerprint())
    cause = fails(meet(prefill, start_decode(fingerprint=fingerprint("b"))))
    assert all(word in cause for word in ("model", "prefill has a", "this decode has b"))
    meet(prefill, start_decode(fingerprint=fingerprint(backend="gpu"))).serve()


def test_exact_refuses_what_only_costs_equal_bits(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill = start_prefill(fingerprint=fingerprint(), exact=True)
    assert "backend" in fails(meet(prefill, start_decode(fingerprint=fingerprint(backend="gpu"))))


@pytest.mark.parametrize(
    ("told", "reason"),
    [({"prompt_len": 11}, "prompt_len differs"), ({"prompt_hash": "0" * 32}, "tokens differ")],
    ids=["length", "tokens"],
)
def test_two_prompts_of_one_room_never_mix(
    start_prefill: StartPrefill, start_decode: StartDecode, told: dict[str, Any], reason: str
) -> None:
    prefill, decode = start_prefill(), start_decode()
    meeting = meet(prefill, decode, told=told)
    assert reason in fails(meeting)
    with pytest.raises(RoomFailed, match=reason):
        meeting.work.done.result(PATIENCE_S)
    meet(prefill, decode).serve()


@pytest.mark.parametrize("secret", [None, Secret(b"another secret, as long")], ids=["none", "another"])
def test_without_the_secret_nobody_gets_in(
    start_prefill: StartPrefill, start_decode: StartDecode, secret: Secret | None
) -> None:
    prefill, stranger = start_prefill(secret=SECRET), start_decode(secret=secret)
    cause = fails(meet(prefill, stranger))
    assert "401" in cause
    meet(prefill, start_decode(secret=SECRET)).serve()


def test_a_port_where_nobody_answers_fails_the_room_soon(start_decode: StartDecode) -> None:
    decode = start_decode()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target, manifest = decode.lend(10)
        waiting = decode.plane.open(1, prefill=Endpoint("127.0.0.1", unused.getsockname()[1]), manifest=manifest)
        with pytest.raises(RoomFailed, match="rendezvous"):
            waiting.wait(PATIENCE_S)
    decode.pool.release(target)


def test_a_request_cancelled_during_its_look_up_ends_at_once(start_decode: StartDecode) -> None:
    decode = start_decode(bootstrap_timeout_s=60)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        _, manifest = decode.lend(10)
        waiting = decode.plane.open(1, prefill=Endpoint(*silent.getsockname()), manifest=manifest)
        waiting.cancel("the client left")
        with pytest.raises(RoomFailed, match="the client left"):
            waiting.wait(PATIENCE_S)


def test_settings_that_cannot_work(start_prefill: StartPrefill) -> None:
    small = layout()
    with pytest.raises(ConfigError, match="the arena has"):
        PrefillPlane(PrefillConfig(), layout=small, arena=Arena.zeros(8))
    with pytest.raises(ConfigError, match="the arena has"):
        DecodePlane(DecodeConfig(), layout=small, arena=Arena.zeros(8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"host": ""},
        {"host": "0.0.0.0"},
        {"advertise_host": "::"},
        {"tp_rank": 1},
        {"dp_rank": 1},
        {"bootstrap_timeout_s": 0.5},
        {"ping_interval_s": 0},
        {"tombstone_s": 0},
        {"bootstrap_port": 70_000},
        {"control_port": -1},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_settings_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PrefillConfig(**wrong)


@pytest.mark.parametrize(
    "config",
    [{"advertise_host": "b\u00fccher.example"}, {"advertise_host": "x" * 300}],
    ids=["not ASCII", "too long"],
)
def test_an_address_that_no_frame_can_carry_is_refused_at_the_start(config: dict[str, Any]) -> None:
    plane = DecodePlane(DecodeConfig(**config), layout=layout(), arena=Arena.zeros(layout().arena_bytes))
    with pytest.raises(ConfigError, match="says of itself"):
        plane.start()
    assert not plane.alive


def test_facts_that_no_notice_can_carry_are_refused_at_the_start() -> None:
    facts = Fingerprint((("model", "x" * 600),))
    plane = DecodePlane(DecodeConfig(), layout=layout(), arena=Arena.zeros(layout().arena_bytes), fingerprint=facts)
    with pytest.raises(ConfigError, match="says of itself"):
        plane.start()


def test_a_busy_port_is_named_and_nothing_stays_open(start_prefill: StartPrefill, start_decode: StartDecode) -> None:
    prefill, decode = start_prefill(), start_decode()
    control, data = prefill.plane.control, decode.plane.data
    assert control is not None
    arena = Arena.zeros(layout().arena_bytes)
    for busy in (
        PrefillPlane(PrefillConfig(bootstrap_port=prefill.rendezvous.port), layout=layout(), arena=arena),
        PrefillPlane(PrefillConfig(bootstrap_port=0, control_port=control.port), layout=layout(), arena=arena),
        DecodePlane(DecodeConfig(data_port=data.port), layout=layout(), arena=arena),
    ):
        with pytest.raises(ConfigError, match=str(busy.config.host)):
            busy.start()
        busy.close()


def test_a_plane_that_does_not_run_takes_no_rooms(opened_and_closed: tuple[PrefillSide, DecodeSide]) -> None:
    prefill, decode = opened_and_closed
    _, manifest = decode.lend(10)
    with pytest.raises(LocalProtocolError, match="closed"):
        prefill.plane.open(1)
    with pytest.raises(LocalProtocolError, match="closed"):
        decode.plane.open(1, prefill=prefill.rendezvous, manifest=manifest)
    prefill.plane.close()
    decode.plane.close()


@pytest.fixture
def opened_and_closed(start_prefill: StartPrefill, start_decode: StartDecode) -> tuple[PrefillSide, DecodeSide]:
    prefill, decode = start_prefill(), start_decode()
    prefill.plane.close()
    decode.plane.close()
    return prefill, decode
