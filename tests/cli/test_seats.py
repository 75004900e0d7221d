"""What a launcher's environment makes of a process and of its settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdplane.cli.ranks import Seat, seat_here, seated
from pdplane.errors import ConfigError
from pdplane.plane.config import DecodeConfig, PrefillConfig

ON_TWO = [["10.0.0.1:4000"], ["10.0.0.2:4001", "10.0.1.2:4001"]]


def environ(folder: Path, rank: str, hosts: object) -> dict[str, str]:
    file = folder / "hosts"
    file.write_text(hosts if isinstance(hosts, str) else json.dumps(hosts))
    return {"MLX_RANK": rank, "MLX_HOSTFILE": str(file)}


def test_the_launcher_gives_each_process_its_seat(tmp_path: Path) -> None:
    assert seat_here(environ(tmp_path, "0", ON_TWO)) == Seat(0, 2, "10.0.0.1")
    assert seat_here(environ(tmp_path, "1", ON_TWO)) == Seat(1, 2, "10.0.0.2")
    on_one = [["127.0.0.1:4000"], ["127.0.0.1:4001"], ["10.0.0.2:4000"]]
    assert seat_here(environ(tmp_path, "1", on_one)) == Seat(1, 3, "127.0.0.1", here=2)


@pytest.mark.parametrize("hosts", ["", "[]", '[["127.0.0.1:4000"]]'])
def test_a_single_process_has_none(tmp_path: Path, hosts: str) -> None:
    assert seat_here(environ(tmp_path, "0", hosts)) is None
    assert seat_here({}) is None
    assert seat_here({"MLX_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("rank", "hosts"), [("2", ON_TWO), ("-1", ON_TWO), ("one", ON_TWO), ("0", "{"), ("0", "[[], []]"), ("0", "[1, 2]")]
)
def test_nonsense_is_refused(tmp_path: Path, rank: str, hosts: object) -> None:
    with pytest.raises(ConfigError, match="MLX_RANK"):
        seat_here(environ(tmp_path, rank, hosts))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MLX_HOSTFILE"):
        seat_here({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "none")})


def test_fixed_ports_count_up_and_free_ones_stay_free() -> None:
    decode = seated(DecodeConfig(data_port=9000), Seat(1, 2, "127.0.0.1"))
    assert (decode.tp_size, decode.tp_rank, decode.data_port, decode.status_port) == (2, 1, 9001, 0)
    prefill = seated(PrefillConfig(control_port=9000, legacy_port=9100, bootstrap_port=8998), Seat(1, 2, "127.0.0.1"))
    assert (prefill.control_port, prefill.legacy_port, prefill.bootstrap_port) == (9001, 9101, 8998)


def test_ranks_on_other_machines_tell_their_own_address() -> None:
    config = PrefillConfig(host="0.0.0.0", advertise_host="10.0.0.1")
    assert seated(config, Seat(0, 2, "10.0.0.1")).advertised == "10.0.0.1"
    assert seated(config, Seat(1, 2, "10.0.0.2")).advertised == "10.0.0.2"
    assert seated(config, Seat(1, 2, "127.0.0.1")).advertised == "10.0.0.1"  # all on one machine
    assert seated(PrefillConfig(), Seat(1, 2, "10.0.0.2")).advertised == "127.0.0.1"
