"""Split models as processes: every pair of sizes gives one process's ids, and nobody outlives the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from pdplane.api import GREEDY, Sampling
from pdplane.engine.model import load_model
from pdplane.engine.options import EngineOptions
from pdplane.engine.reference import single_process
from pdplane.engine.thread import EngineThread
from tests.cli.daemons import PATIENCE_S, command
from tests.cli.processes import wait_gone
from tests.cli.rank_daemons import STEP, RankedDaemon, generate, needs_launcher, ranked
from tests.free_ports import free_ports
from tests.http_client import ask
from tests.waiting import until

pytestmark = needs_launcher
COUNT = 12
# Below a block, of one block, of several chunks; the last ones share the arena.
PROMPTS = [[(7 * place + 3 * length) % 320 for place in range(length)] for length in (5, 16, 33, 97)]

ASKED = list(zip(PROMPTS, (GREEDY, Sampling(temperature=0.8, top_p=0.9, seed=7)) * 2, strict=True))


@pytest.mark.parametrize("model", ["tiny:llama", pytest.param("tiny:qwen3", marks=pytest.mark.slow)])
def test_every_pair_of_sizes_gives_the_ids_of_one_process(model: str) -> None:
    expected = single(model)
    sides = ("prefill", 2), ("decode", 2), ("prefill", 1), ("decode", 1)
    with ranked(*sides, model=model, launcher=False) as daemons:
        split_prefill, split_decode, prefill, decode = daemons
        pairs = [(split_prefill, decode), (prefill, split_decode), (split_prefill, split_decode)]
        for one, other in pairs:
            with ThreadPoolExecutor(len(PROMPTS)) as many:
                found = list(many.map(lambda asked, a=one, b=other: generate(a, b, asked[0], COUNT, asked[1]), ASKED))
            assert found == expected
        for daemon in daemons:
            until(lambda daemon=daemon: left(daemon) == (0, 0), "every leg's end")


def left(daemon: RankedDaemon) -> tuple[int, int]:
    counts = ask(daemon.http, "GET", "/statistics").json
    return counts["blocks"]["used_blocks"], counts.get("shared_legs", 0)


def single(model: str) -> list[list[int]]:
    options = EngineOptions(model, prefill_step_size=STEP)

    def run() -> list[list[int]]:
        loaded = load_model(model)
        return [
            [token.id for token in single_process(loaded, tokens, COUNT, options, sampling=sampling)]
            for tokens, sampling in ASKED
        ]

    thread = EngineThread()
    thread.start()
    try:
        return thread.call(run)
    finally:
        thread.close()


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("launcher", signal.SIGTERM),
        ("rank 1", signal.SIGKILL),
        pytest.param("launcher", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("rank 0", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("rank 0", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("rank 1", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_nobody_outlives_the_launcher_or_a_rank(victim: str, number: signal.Signals) -> None:
    with ranked(("prefill", 2), model="tiny:llama") as (daemon,):
        assert len(daemon.others) >= 1
        pids = {"launcher": {daemon.process.pid}, "rank 0": {daemon.first}, "rank 1": daemon.others}[victim]
        for pid in pids:
            os.kill(pid, number)
        daemon.process.wait(PATIENCE_S)
        wait_gone(daemon.everybody)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_dies_in_the_middle_of_its_work_takes_the_others_with_it(killed: int) -> None:
    with ranked(("prefill", 1), ("decode", 2), model="tiny:llama") as (prefill, decode):
        with ThreadPoolExecutor(1) as one:
            work = one.submit(generate, prefill, decode, PROMPTS[0], 4000)
            until(lambda: left(decode)[1] == 1, "the request")
            for pid in [{decode.first}, decode.others][killed]:
                os.kill(pid, signal.SIGKILL)
            decode.process.wait(PATIENCE_S)
            wait_gone(decode.everybody)
            assert work.exception(PATIENCE_S) is not None
        until(lambda: left(prefill) == (0, 0), "the end of prefill's leg")


def test_a_model_that_mlx_lm_cannot_split_is_refused_with_a_sentence() -> None:
    with closing(RankedDaemon("prefill", 2, "tiny:gemma3", launcher=False)) as daemon:
        daemon.process.wait(PATIENCE_S)
        said = daemon.log
    assert "pdplane prefill: model 'tiny:gemma3' cannot be split over 2 ranks: mlx-lm has no shard() for" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_others_never_come_still_ends_at_a_signal(rank: int, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    process = subprocess.Popen(
        command("prefill", "--model", "tiny:llama", "--port", "0", "--bootstrap-port", "0"),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
    )
    with process:
        assert process.stderr is not None
        waits = f"rank {rank} of 2 waits for the others"
        assert any(waits in line for line in iter(process.stderr.readline, ""))
        process.terminate()
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM)
