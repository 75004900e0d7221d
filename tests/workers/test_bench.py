"""Both benchmarks with real worker processes, on small inputs; the figures themselves are not judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdplane.bench.tables import print_table
from pdplane.cli.main import main

pytestmark = pytest.mark.slow  # three worker processes


def test_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, plot = tmp_path / "figures.json", tmp_path / "figure.png"
    asked = ["bench", "cache", "--lengths", "16,32", "--prefill-step-size", "16", "--rounds", "1", "--max-tokens", "4"]
    pytest.importorskip("matplotlib", reason="the plot needs the `plot` extra")
    assert main([*asked, "--json", str(file), "--plot", str(plot)]) == 0
    figures = json.loads(file.read_text())
    assert [case["prefix_tokens"] for case in figures["cases"]] == [16, 32]
    assert figures["cases"][1]["cache_bytes"] > figures["cases"][0]["cache_bytes"] > figures["cases"][0]["text_bytes"]
    assert figures["codecs"][0]["codec"] == "none"
    assert plot.stat().st_size > 0
    assert "all ids equal to one mlx-lm process" in capsys.readouterr().out


def test_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    asked = ["bench", "experts", "--prompt-tokens", "20", "--max-tokens", "6", "--rounds", "1", "--capacity", "2"]
    assert main([*asked, "--json", str(file)]) == 0
    local, one, two = json.loads(file.read_text())["cases"]
    assert [local["name"], one["name"], two["name"]] == ["local", "1 worker", "2 workers"]
    assert local["bytes_out"] == 0 < one["bytes_out"]
    assert local["tokens"] == one["tokens"] == two["tokens"]
    assert "the same tokens each way" in capsys.readouterr().out


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("a", "b"), [("x", 1234), ("long", 0.5), ("y", None), ("z", 123456.7)])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "title", "a           b", "----  -------", "x       1,234", "long      0.5", "y           -", "z     123,457",
    ]  # fmt: skip
