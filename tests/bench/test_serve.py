"""`pdplane bench serve` asks real servers and says what it measured; how fast is nobody's assertion."""

from __future__ import annotations

import json

import pytest

from pdplane.bench.serve_client import Heard
from pdplane.cli.main import main

SMALL = [
    "--model", "tiny:llama", "--rounds", "1", "--prompt-tokens", "24", "--short-tokens", "6", "--tokens", "8",
    "--streams", "2", "--loud-streams", "1", "--apart", "10ms", "--requests", "4", "--rate", "50",
]  # fmt: skip


def test_every_measurement_of_both_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *SMALL, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["measurements"]) == ["idle", "queued", "second turn", "2 quiet", "1 loud", "goodput"]
    for found in report["measurements"].values():
        assert list(found) == ["mlx_lm.server", "pdplane"]
        assert found["pdplane"].keys() == found["mlx_lm.server"].keys()
    assert report["measurements"]["2 quiet"]["pdplane"]["tokens_a_s"] > 0
    assert report["measurements"]["2 quiet"]["pdplane"]["gap_p99_ms"] > 0
    assert 0 <= report["measurements"]["goodput"]["pdplane"]["share_good"] <= 1
    idle = report["measurements"]["idle"]
    assert idle["pdplane"]["prompt_tokens"] == idle["mlx_lm.server"]["prompt_tokens"] > 6
    assert report["yardstick_blas"]


def test_gaps_that_overlap_the_window() -> None:
    heard = Heard(0.0, [1.0, 2.0, 4.0, 7.0, 11.0])
    assert heard.first_s == 1.0
    assert heard.gaps() == [1.0, 2.0, 3.0, 4.0]
    assert heard.gaps(3.0, 6.0) == [2.0, 3.0]


def test_a_rate_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--rate", "0"]) == 1
    assert "--rate" in capsys.readouterr().err
