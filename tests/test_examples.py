"""Each example as a reader runs it: a process of its own, and what it prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdplane import Arena, FieldSpec, GroupSpec, PrefillConfig, PrefillPlane, plan_layout

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *words: str) -> list[str]:
    """The lines that an example prints; it has to end well and to complain of nothing."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *words]
    told = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert (told.returncode, told.stderr) == (0, ""), told.stderr
    return told.stdout.splitlines()


FAILED = [
    "room          b'7'",
    "status        b'0'  (0 is Failed)",
    "prefill rank  b'0'",
    "first token   b'-1'",
    "candidates    b''",
    "cached tokens b'0'",
    "logprob       b''",
]


def test_embed_moves_an_arena() -> None:
    assert run("embed.py") == [
        "decode wants tokens 0 to 100",
        "first token 42, logprob -0.12, bytes equal: True",
    ]


def test_raw_frames_are_answered_with_failed() -> None:
    assert run("raw_frames.py") == FAILED


def test_raw_frames_find_a_running_prefill() -> None:
    layout = plan_layout(
        [GroupSpec("kv", "full_history", 16, 1, transfer_policy="full_suffix")],
        [FieldSpec("kv", "layer.0.k", "arena", (2, 16, 4), "float32")],
        num_lcm_blocks=4,
        prefix_granularity=16,
    )
    arena = Arena.zeros(layout.arena_bytes)
    with PrefillPlane(PrefillConfig(bootstrap_port=0), layout=layout, arena=arena) as prefill:
        while not prefill.ready:
            pass  # its own PUT is on the way to its rendezvous
        assert run("raw_frames.py", str(prefill.rendezvous)) == FAILED
        counts = prefill.statistics()
        assert counts["rejected"]["preallocation"] == 1
        assert counts["rooms"] == {}


def test_two_daemons_answer_a_pair_of_requests() -> None:
    pytest.importorskip("mlx")
    addresses, prefill, decode, first = run("two_daemons.py")
    assert addresses.startswith("prefill at 127.0.0.1:")
    assert prefill.startswith("prefill computed 4 tokens and said [")
    assert decode.endswith("length")
    assert first == "the first token is prefill's: True"


def test_transformers_continues_in_another_process() -> None:
    pytest.importorskip("torch", reason="`make vllm-check` runs it, where torch is")
    assert run("transformers_pair.py")[-1] == "equal to one:  True"


def test_every_example_is_run_here() -> None:
    known = {"embed.py", "raw_frames.py", "transformers_pair.py", "two_daemons.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == known
