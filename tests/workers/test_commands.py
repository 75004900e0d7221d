"""The workers as processes, and the commands that use them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdplane.cli.main import main

_CACHE = ["cache-worker", "--model", "tiny:qwen3", "--port", "0"]
_TEXTS = ["--model", "tiny:qwen3", "--prefix", "the quick brown fox", "--max-tokens", "6"]


@contextlib.contextmanager
def running(*commands: list[str]) -> Iterator[list[tuple[subprocess.Popen[str], dict[str, Any]]]]:
    """Processes that have said ready, and what they said; they end with their standard input."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pdplane.cli.main", *command, "--exit-with-parent"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        yield [(process, json.loads(process.stdout.readline())) for process in processes if process.stdout]
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in processes:
            process.wait(30)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("a token of these tests\n")
    file.chmod(0o600)
    return file


def test_cache_workers_and_the_cache_command(capsys: pytest.CaptureFixture[str]) -> None:
    with running([*_CACHE, "--http-port", "0"], _CACHE) as workers:
        (first, near), (_, far) = workers
        assert list(near) == ["event", "role", "listen", "model", "pid", "http"]
        assert (near["event"], near["role"], near["pid"]) == ("ready", "cache-worker", first.pid)
        source, target = near["listen"], far["listen"]
        for codec in ("none", "zlib"):
            asked = [
                "cache",
                "send",
                "--to",
                target,
                "--from",
                source,
                *_TEXTS,
                "--codec",
                codec,
                "--query",
                " jumps",
                "--json",
            ]
            assert main(asked) == 0
        sent = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert sent["run_cache"]["status"] == "success"
        assert sent["run_cache"]["request_bytes"] > sent["run_cache"]["payload_bytes"] > 0
        assert main(["cache", "run", "--to", target, *_TEXTS, "--query", " jumps"]) == 0
        assert capsys.readouterr().out.strip() == sent["run_cache"]["text"].strip()
        ids = ["--prefix-ids", "1,2,3", "--query-ids", "4"]
        assert main(["cache", "send", "--to", target, *ids, "--codec", "zz"]) == 1
        assert "ValueError: codec zz" in capsys.readouterr().err
        assert main(["cache", "run", "--to", target, "--prefix", "a", "--query", "b"]) == 1
        assert "--model" in capsys.readouterr().err
        metrics = _get(near["http"], "/metrics")
        assert "pdplane_cache_worker_commands 2\n" in metrics
        assert json.loads(_get(near["http"], "/statistics"))["failed_commands"] == 0
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0


def test_expert_workers_and_generate(capsys: pytest.CaptureFixture[str], token: Path) -> None:
    expert = ["expert-worker", "--model", "tiny:qwen3_moe", "--listen", "127.0.0.1:0", "--token-file", str(token)]
    generate = ["generate", "--model", "tiny:qwen3_moe", "--max-tokens", "6", "--json", "the quick brown fox"]
    assert main(generate) == 0
    wanted = json.loads(capsys.readouterr().out)["output_ids"]
    with running([*expert, "--http-port", "0", "--allow", "127.0.0.0/8"], [*expert, "--capacity", "2"]) as workers:
        (_, near), (second, far) = workers
        remote = ["--experts", f"{near['listen']},{far['listen']}", "--expert-token-file", str(token)]
        assert main([*generate, *remote]) == 0
        assert json.loads(capsys.readouterr().out)["output_ids"] == wanted
        assert json.loads(_get(near["http"], "/statistics"))["execs"] > 0
        os.kill(second.pid, signal.SIGKILL)
        second.wait(30)
        assert main([*generate, *remote]) == 1
        assert f"session {far['listen']} lost" in capsys.readouterr().err


def test_usage_errors_are_one_line(capsys: pytest.CaptureFixture[str], token: Path, tmp_path: Path) -> None:
    experts = ["generate", "--model", "tiny:llama", "--experts", "127.0.0.1:1"]
    worker = ["expert-worker", "--model", "tiny:llama", "--listen", "127.0.0.1:0", "--token-file"]
    token.chmod(0o644)
    for command, text in (
        ([*experts, "hi"], "--expert-token-file"),
        ([*worker, str(token)], "chmod 600"),
        ([*worker, str(tmp_path / "absent")], "No such file"),
        (["generate", "hi"], "--prefill"),
        (["cache-worker", "--model", "tiny:nobody", "--port", "0"], "unknown tiny family"),
    ):
        assert main(command) == 1
        error = capsys.readouterr().err
        assert text in error
        assert len(error.splitlines()) == 1


def _get(host: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{host}{path}", timeout=10) as response:
        return str(response.read().decode())
