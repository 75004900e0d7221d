"""`pdplane bench transport` measures what it says, and the bytes arrive; how fast is nobody's assertion."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pdplane.bench.far_end import pattern
from pdplane.cli.main import main
from tests.certificates import member

SMALL = [
    "bench",
    "transport",
    "--bytes",
    "512KiB",
    "--rounds",
    "2",
    "--latency-pushes",
    "1",
    "--block",
    "4KiB",
    "64KiB",
]


def test_every_way_and_every_peer_without_extras(capsys: pytest.CaptureFixture[str]) -> None:
    arrangements, tls = ["permuted", "sparse", "adjacent"], member()
    files = ["--tls", str(tls.cert), str(tls.key), str(tls.ca)]
    ways = ["--transport", "tcp", "unix", "pull", "tls", *files]
    assert (
        main([*SMALL, *ways, "--peer", "raw", "tuned", "zmq", "memcpy", "--arrangement", *arrangements, "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    quiet = found["conditions"]["quiet"]
    assert quiet["ways"] == {"tcp": "tcp", "unix": "unix", "pull": "pull", "tls": "tls"}
    keys = {(point["name"], point["block"], point["arrangement"]) for point in quiet["points"]}
    names = ["tcp", "unix", "pull", "tls", "raw", "tuned", "zmq", "memcpy"]
    assert keys == {(name, block, each) for name in names for block in (4096, 65536) for each in arrangements}
    assert all(point["gib_s"] > 0 and len(point["all_gib_s"]) == 2 for point in quiet["points"])
    assert set(quiet["latency"]) == set(names)


def test_tables_a_picture_and_the_receiver_under_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    words = [*SMALL, "--transport", "tcp", "pull", "--peer", "raw", "--spin", "--streams", "2", "--plot", str(picture)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for text in ("tcp / raw", "pull / raw", "kept under spin", "CPU seconds a GiB", "load average"):
        assert text in printed
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_receiver_that_decodes_into_mlx_memory(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx")
    assert main([*SMALL, "--peer", "raw", "--arena", "mlx", "--decode", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["conditions"]) == {"quiet", "decode"}


def test_a_push_that_is_no_whole_number_of_blocks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "transport", "--bytes", "10KiB", "--block", "4KiB"]) == 1
    assert "no multiple" in capsys.readouterr().err


def test_the_pattern_tells_blocks_apart() -> None:
    found = pattern(1 << 16, 4096).reshape(-1, 4096)
    assert (found == found[:, :1]).all()
    assert len(np.unique(found[:, 0])) == 16
    assert found.all()
