"""The contract on the command line: a tiny model's equals the legacy engine's, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdplane.cli.main import main
from pdplane.testing.legacy_rendezvous import LegacyRendezvous, put_rank

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


@pytest.fixture
def published() -> Iterator[Callable[[str], str]]:
    """A legacy rendezvous at which a rank with this layout has registered."""
    with LegacyRendezvous() as http:

        def put(layout: str) -> str:
            rank = {"role": "Prefill", "world_size": 1, "dp_size": 1, "rank_ip": "127.0.0.1", "rank_port": 4000}
            assert put_rank(http.endpoint, {**rank, "engine_rank": 0, "cache_layout": layout})[0] == 200
            return f"http://{http.endpoint}"

        yield put


@pytest.mark.parametrize(
    ("model", "flags", "says"),
    [
        ("tiny:qwen3", LEGACY, ["the layouts agree"]),
        ("tiny:qwen3", ["--page-layout", "hnd"], ["group_order", "ours:   ['kv']", "change: --page-layout nhd"]),
        (
            "tiny:qwen3",
            ["--page-layout", "nhd", "--block-tokens", "64"],
            ["prefix_granularity", "ours:   64", "theirs: 16", "change: --block-tokens 16", "and 3 more fields"],
        ),
        ("tiny:qwen3-bf16", LEGACY, ["field[layer.0.k].dtype and 3 more fields", "theirs: float32", "--model"]),
    ],
)
def test_what_differs_from_a_prefill_that_runs(
    published: Callable[[str], str], model: str, flags: list[str], says: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = next(case["expected"] for case in CASES if case["name"] == "tiny_llama_f32")
    url = published(json.dumps(wanted, separators=(",", ":")))
    assert main(["layout", "--model", model, *flags, "--compare", url]) == (0 if "agree" in says[0] else 1)
    printed = capsys.readouterr().out
    assert all(text in printed for text in says), printed
    assert "another --model" not in printed or model != "tiny:qwen3"


def test_no_layout_to_compare_with(capsys: pytest.CaptureFixture[str]) -> None:
    with LegacyRendezvous() as http:
        for url, says in ((f"{http.endpoint}", "no prefill rank has registered"), ("127.0.0.1:1", "no rendezvous")):
            assert main(["layout", "--model", "tiny:qwen3", "--compare", url]) == 1
            assert says in capsys.readouterr().err


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
