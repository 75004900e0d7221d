"""The command itself: help, version, usage, and how little it imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from pdplane.cli.main import COMMANDS, main
from tests.cli.daemons import PATIENCE_S


@pytest.mark.parametrize("words", [["--version"], ["prefill", "--version"], ["decode", "--version"]])
def test_version(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    assert re.fullmatch(r"pdplane \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_without_a_command_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", ["prefill", "decode", "generate"])
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert "usage: pdplane" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nonsense"], "invalid choice"),
        (["prefill"], "--model"),
        (["prefill", "--model", "toy", "--arena-bytes", "much"], "no size"),
        (["decode", "--model", "toy", "--kv-bits", "5"], "invalid choice"),
        (["generate", "--prefill", "h:1", "--decode", "h:2"], "prompt"),
    ],
)
def test_wrong_usage_is_explained(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


WRONG_SETTINGS = [
    (["--host", ""], "--host is empty"),
    (["--host", "0.0.0.0", "--insecure"], "every interface"),
    (["--tls-cert", "c.pem"], "--tls-cert and --tls-key together"),
    (["--tls-ca", "ca.pem"], "--tls-ca needs both"),
    (["--tls-cert", "c.pem", "--tls-key", "k.pem"], "cannot use c.pem with the key k.pem"),
    (["--host", "0.0.0.0"], "give --secret-file, or --insecure"),
    (["--host", "203.0.113.1"], "give --secret-file, or --insecure"),
    (["--bootstrap-timeout", "0.5"], "bootstrap_timeout_s"),
    (["--secret-file", "/nonexistent"], "/nonexistent"),
    (["--transport", "pigeon"], "pigeon"),
    (["--transport", "loopback"], "loopback"),
    (["--legacy-transport", "pigeon"], "--legacy-transport pigeon"),
    (["--legacy", "--legacy-transport", "mooncake", "--host", "::1"], "no legacy peers"),
    (["--legacy"], "--legacy needs --legacy-transport mooncake"),
    (["--legacy", "--legacy-transport", "tcp"], "--legacy needs --legacy-transport mooncake"),
]
RUN_EACH = """
import contextlib, io, json, sys
from pdplane.cli.main import main
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_settings_that_cannot_work_end_in_one_line(role: str) -> None:
    flags = [role, "--model", "toy", "--port", "0", "--bootstrap-port", "0"]
    lines = json.dumps([flags + words for words, _says in WRONG_SETTINGS])
    ran = subprocess.run(
        [sys.executable, "-c", RUN_EACH], input=lines, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ran.returncode == 0, ran.stderr
    for (words, says), line in zip(WRONG_SETTINGS, ran.stdout.splitlines(), strict=True):
        code, text = json.loads(line)
        assert (code, says in text, "Traceback" in text) == (1, True, False), (words, text)


def test_help_loads_neither_mlx_nor_sockets() -> None:
    code = "import sys; from pdplane.cli.main import main; main([]); print(sorted(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    assert not any(f"'{name}'" in out for name in ("mlx", "mlx_lm", "zmq", "aiohttp", "numpy"))


def test_a_missing_engine_says_what_to_install() -> None:
    block = "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = sys.modules['mlx_lm'] = None; "
    for role in ("prefill", "decode"):
        code = block + f"from pdplane.cli.main import main; sys.exit(main(['{role}', '--model', 'tiny:llama']))"
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert ended.returncode == 1
        assert ended.stderr.strip() == f"pdplane {role}: the MLX engine is not installed: pip install 'pdplane[mlx]'"


def test_mlx_leaves_the_limits_of_open_files_alone() -> None:
    """Also where mlx-lm cannot have what it asks for."""
    code = (
        "import resource; from pdplane.cli.main import main; main(['layout', '--model', 'tiny:llama']);"
        "print('limits', *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    few = ["sh", "-c", 'ulimit -Sn 256; ulimit -Hn 1024; exec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(few, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[-1] == "limits 256 1024", done.stderr
