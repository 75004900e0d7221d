"""`pdplane bench control` measures what it says; how fast is nobody's assertion."""

from __future__ import annotations

import json

import pytest

from pdplane.cli.main import main
from tests.mooncake_engine import needs_engine


@pytest.mark.parametrize("channel", ["native", pytest.param("legacy", marks=needs_engine)])
def test_rooms_travel_on_each_channel(capsys: pytest.CaptureFixture[str], channel: str) -> None:
    words = ["--channel", channel, "--in-flight", "1", "4", "--open", "6", "--rooms", "20", "--rounds", "1"]
    assert main(["bench", "control", *words, "--sessions", "2", "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [(point["in_flight"], point["open_rooms"]) for point in points] == [(1, 0), (4, 0), (8, 6)]
    for point in points:
        assert point["channel"] == channel
        assert min(point[name] for name in ("rooms_s", "p50_ms", "decode_cpu_ms", "prefill_cpu_ms")) > 0
        assert point["p50_ms"] <= point["p99_ms"]
