"""When the legacy channel is open, and what is said when it is not."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from pdplane.errors import ConfigError
from pdplane.kv.arena import Pool
from pdplane.kv.manifest import blocks_needed
from pdplane.plane.config import DecodeConfig, PrefillConfig
from pdplane.security import Secret
from pdplane.testing.legacy_peer import LegacyDecode
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import meet
from tests.samples import two_group_layout
from tests.waiting import PATIENCE_S


@pytest.fixture
def secret(tmp_path: Path) -> Secret:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    file.chmod(0o600)
    return Secret.from_file(file)


@pytest.mark.parametrize("config", [PrefillConfig, DecodeConfig])
@pytest.mark.parametrize(
    ("settings", "open_"),
    [
        ({}, True),
        ({"legacy": False}, False),
        ({"host": "::1"}, False),
        ({"host": "::", "advertise_host": "::1"}, False),
        ({"host": "::", "advertise_host": "node7"}, True),
        ({"host": "::1", "advertise_host": "node7"}, False),
    ],
)
def test_open_unless_those_peers_could_not_use_it(config: Any, settings: dict[str, Any], open_: bool) -> None:  # noqa: ANN401
    assert config(**settings).speaks_legacy is open_


@pytest.mark.parametrize("config", [PrefillConfig, DecodeConfig])
def test_asked_for_and_impossible_is_a_config_error(config: Any) -> None:  # noqa: ANN401 (a class)
    with pytest.raises(ConfigError, match="IPv6 address ::1"):
        config(host="::1", legacy=True)


def test_a_secret_closes_it_unless_it_is_asked_for(secret: Secret) -> None:
    assert not PrefillConfig(secret=secret).speaks_legacy
    assert PrefillConfig(secret=secret, legacy=True).speaks_legacy


def test_native_peers_meet_on_ipv6_and_the_log_says_why_no_others_do(
    start_prefill: StartPrefill, start_decode: StartDecode, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "pdplane.plane.config"):
        prefill, decode = start_prefill(host="::1"), start_decode(host="::1")
    assert sum("IPv6 address ::1" in record.message for record in caplog.records) == 2
    assert prefill.plane.legacy_control is None
    assert meet(prefill, decode).serve().first_token == 42


def test_every_interface_of_both_families_serves_them(
    start_prefill: StartPrefill, opened: contextlib.ExitStack
) -> None:
    prefill = start_prefill(host="::", advertise_host="127.0.0.1")
    decode = opened.enter_context(LegacyDecode(two_group_layout(num_lcm_blocks=16)))
    blocks = Pool(decode.layout).allocate(blocks_needed(decode.layout, 10))
    contact = decode.offer(prefill.rendezvous, 7, blocks, prompt_len=10)
    work = prefill.plane.open(7)
    work.wait_window(PATIENCE_S)
    work.finish(first_token=42).result(PATIENCE_S)
    assert decode.wait(7, contact).token == 42


def test_beside_a_secret_it_warns_and_serves_only_what_it_must(
    secret: Secret,
    start_prefill: StartPrefill,
    start_decode: StartDecode,
    opened: contextlib.ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, native = (
        start_prefill(secret=secret, legacy=True, legacy_transport="loopback"),
        start_decode(secret=secret),
    )
    assert any("without any proof" in record.message for record in caplog.records)
    assert meet(prefill, native, room=1).serve().first_token == 42
    decode = opened.enter_context(LegacyDecode(two_group_layout(num_lcm_blocks=16)))
    blocks = Pool(decode.layout).allocate(blocks_needed(decode.layout, 10))
    contact = decode.offer(prefill.rendezvous, 7, blocks, prompt_len=10)
    work = prefill.plane.open(7)
    work.wait_window(PATIENCE_S)
    work.finish(first_token=42).result(PATIENCE_S)
    assert decode.wait(7, contact).token == 42
