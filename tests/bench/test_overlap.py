"""`pdplane bench overlap`: its arithmetic and its answers; never its times."""

from __future__ import annotations

import json

import pytest

from pdplane.bench.overlap import summarise
from pdplane.bench.overlap_pair import Once, random_prompt
from pdplane.cli.main import main
from pdplane.transport.registry import TRANSPORTS

SMALL = ["--model", "tiny:llama@4", "--prompt-tokens", "40", "--rounds", "2", "--arena-mib", "4"]


def test_what_is_hidden_and_what_it_costs() -> None:
    found = {
        False: [Once(1000.0, 900.0, 5.0, 10_000_000), Once(2000.0, 1100.0, 7.0, 10_000_000)],
        True: [Once(1020.0, 50.0, 1.0, 10_000_000), Once(2040.0, 30.0, 3.0, 10_000_000)],
    }
    report = summarise(found, rate=10e6)
    assert report["transfer_ms"] == 1000.0
    assert report["whole"] == {"prefill_ms": 1500.0, "exposed_ms": 1000.0, "assembly_ms": 6.0}
    assert report["layerwise"] == {"prefill_ms": 1530.0, "exposed_ms": 40.0, "assembly_ms": 2.0}
    assert report["hidden"] == pytest.approx((0.95 + 0.97) / 2)
    assert report["tap_cost"] == pytest.approx(0.02)


def test_a_prefill_shorter_than_the_transfer_can_hide_no_more_than_itself() -> None:
    once = Once(500.0, 500.0, 1.0, 1000)
    assert summarise({False: [once], True: [once]}, rate=1000.0)["hidden"] == 1.0


def test_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["prompt_tokens"], report["rounds"]) == ("tiny:llama@4", 40, 2)
    assert report["nbytes"] == 3 * 4 * 2 * 2 * 16 * 64 * 4  # blocks, layers, keys and values, heads, rows, width, bytes
    assert report["transfer_ms"] == pytest.approx(report["nbytes"] / report["rate_bytes_per_s"] * 1e3)
    assert "slow" not in TRANSPORTS


def test_prints_a_table_of_both_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", *SMALL, "--rate", "20"]) == 0
    printed = capsys.readouterr().out
    assert "20.0 MB/s" in printed
    assert "all layers at the end" in printed
    assert "layer by layer" in printed


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--layerwise-interval", "0"], ["--rate", "0"]])
def test_nothing_is_not_measured(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", *flags]) == 1
    assert "must be above zero" in capsys.readouterr().err


def test_prompts_differ_by_seed_and_stay_inside_the_vocabulary() -> None:
    first, second = (random_prompt(200, 40, seed) for seed in (1, 2))
    assert first != second
    assert first == random_prompt(200, 40, 1)
    assert {token for token in first + second if not 16 <= token < 40} == set()
