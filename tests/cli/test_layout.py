"""The contract on the command line: a tiny model's equals the legacy engine's, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdplane.cli.main import main

CASES = json.loads((Path(__file__).parents[1] / "vectors/legacy/model_layouts.json").read_text())
LEGACY = ["--page-layout", "nhd", "--block-tokens", "16", "--arena-blocks", "31"]


def test_a_tiny_model_has_the_legacy_contract(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = next(case["expected"] for case in CASES if case["name"] == "tiny_llama_f32")
    assert main(["layout", "--model", "tiny:qwen3", *LEGACY]) == 0
    assert capsys.readouterr().out == json.dumps(wanted, separators=(",", ":")) + "\n"


@pytest.mark.parametrize("page_layout", ["hnd", "nhd"])
def test_one_rank_of_two_has_half_the_heads(page_layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--model", "tiny:qwen3", "--page-layout", page_layout, "--tp-size", "2", "--pretty"]
    assert main(words) == 0
    layout = json.loads(capsys.readouterr().out)
    axis = 0 if page_layout == "hnd" else 1
    assert {field["shape"][axis] for field in layout["plan"]["fields"]} == {1}
    assert {field["partition"]["global_extent"] for field in layout["transfer_schema"]["fields"]} == {2}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "toy"], "no model"),
        (["--model", "tiny:qwen3", "--tp-size", "3"], "2 KV heads cannot be split over 3 ranks"),
        (["--model", "tiny:mamba2", "--tp-size", "2"], "cannot split"),
        (["--model", "tiny:mamba2", "--page-layout", "nhd"], "recurrent state"),
        (["--model", "tiny:llama", "--page-layout", "nhd", "--kv-bits", "8"], "quantised"),
    ],
)
def test_what_has_no_layout(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layout", *words]) == 1
    assert says in capsys.readouterr().err
