"""Messages for people: every golden frame is shown or refused as the codecs do, and the tap hears a PUSH."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pdplane import wire
from pdplane.cli.inspect import Describer, kind_of, read_hex
from pdplane.cli.main import main
from pdplane.errors import ConfigError
from pdplane.ids import Generation, Life, Rank, Room, SessionId
from pdplane.kv.manifest import Manifest, ManifestGroup
from pdplane.messages import Fingerprint, Hello, Preallocation, Registration, Status, StatusCode, Window
from pdplane.testing.bench_layouts import bench_layout

SESSION = SessionId("10.0.0.2:17000")
LAYOUT = bench_layout("state_hybrid", 2, 7)
REGISTRATION = wire.encode_registration(
    Registration("10.0.0.2", 4000, SESSION, 0x7F0000000000, wire.encode_layout(LAYOUT), 2, 1)
)
STATUS = wire.encode_status(Status(Room(9), StatusCode.SUCCESS, Rank(1), 42, (5, 6, 7, 9), 16, b"\0" * 8))


def _offer(blocks: tuple[int, ...]) -> list[bytes]:
    groups = tuple(
        ManifestGroup(spec.group_id, blocks if spec.group_id == "attn" else (3,)) for spec in LAYOUT.group_specs
    )
    return wire.encode_preallocation(Preallocation(Room(9), SESSION, wire.encode_manifest(Manifest(groups, 0, 22))))


def _hex(frames: list[bytes], between: str = " ") -> str:
    return between.join(frame.hex() or "-" for frame in frames)


def test_a_registration_a_room_and_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "frames"
    file.write_text("\n".join(["# a room", _hex(REGISTRATION), _hex(_offer((1, 2, 5))), _hex(STATUS, "\n"), ""]))
    assert main(["inspect", str(file)]) == 0
    out = capsys.readouterr().out
    for words in (
        "registration of session 10.0.0.2:17000",
        "10.0.0.2, port 4000",
        "1 of 2",
        "history, full_history, full_suffix; 8 tokens a block; 14 blocks, 2 a parent",
        "bfloat16[24, 3] in lin, plane unit.s.conv; axis 0 of 48 in parts [16, 16, 16]",
        "pre-allocation of room 9 by session 10.0.0.2:17000",
        "22 tokens, of which decode holds 0",
        "3 blocks for slots 0 to 2: 1-2 5",
        "1 blocks for slots 2 to 2: 3",
        "status of room 9: success, says prefill rank 1",
        "5-7 9",
    ):
        assert words in out


def test_a_wrong_message_has_its_reason_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [_hex(REGISTRATION), _hex(_offer((1, 2, 15))), _hex([*STATUS[:1], b"9", *STATUS[2:]]), _hex([b"None"])]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["inspect"]) == 1
    out = capsys.readouterr().out
    assert "no valid pre-allocation (3 frames)" in out
    assert "outside 1..14" in out
    assert "status: unknown status" in out
    assert "no valid registration (1 frame)" in out


def test_json_lines_are_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hello = wire.encode_notice(Hello("1", Life("a" * 32), Fingerprint((("dtype", "bfloat16"),))))
    window = wire.encode_notice(Window(Room(9), Generation(3), "ab"))
    lines = [json.dumps([frame.hex() for frame in m]) for m in (hello, window, REGISTRATION, _offer((1, 2, 3)), STATUS)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, "00"])))
    assert main(["inspect", "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [line["kind"] for line in found]
    assert kinds == ["notice", "notice", "registration", "pre-allocation", "status", "status"]
    assert found[1]["generation"] == 3
    assert found[2]["layout"]["plan"]["prefix_granularity"] == 8
    assert found[3]["manifest"]["groups"][0]["block_ids"] == [1, 2, 3]
    assert (found[4]["code"], found[4]["logprob"]) == ("SUCCESS", 0.0)
    assert found[5]["wrong"]["field"] == "frame_count"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (REGISTRATION, "registration"),
        ([b"9", SESSION.encode(), b""], "pre-allocation"),
        ([b"9", b"host", b'{"groups":[]}'], "pre-allocation"),
        ([b"9", b"5", b"0"], "status"),
        ([b"pdplane/2", b"hello", b"{}"], "notice"),
        ([], "status"),
    ],
)
def test_the_kind_is_guessed(frames: list[bytes], kind: str) -> None:
    assert kind_of(frames) == kind


def test_an_idle_ranks_offer_and_one_of_an_unknown_session() -> None:
    describer = Describer()
    assert "only joins the vote" in describer.describe([b"9", SESSION.encode(), b""]).text()
    assert "no registration" in describer.describe(_offer((1, 2, 3))).text()


@given(frames=st.lists(st.binary(max_size=40) | st.sampled_from([*REGISTRATION, *STATUS, b"pdplane/1"]), max_size=9))
def test_any_frames_are_described(frames: list[bytes]) -> None:
    found = Describer().describe(frames)
    assert found.heading
    json.loads(found.json())
    assert found.text().startswith(found.heading)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("4e 4f\n", [[b"N", b"O"]]),
        ("4e\n4f\n\n50", [[b"N", b"O"], [b"P"]]),
        ("4e,-\n# a comment\n0x4f - # an empty frame", [[b"N", b""], [b"O", b""]]),
        ('["4e", ""]\n["4f"]', [[b"N", b""], [b"O"]]),
        ("\n\n", []),
    ],
)
def test_hex_lines(text: str, messages: list[list[bytes]]) -> None:
    assert list(read_hex(text.splitlines())) == messages


@pytest.mark.parametrize("text", ["zz", "4e 4", "[1]", "[4e"])
def test_what_is_no_hex(text: str) -> None:
    with pytest.raises(ConfigError, match="line 1"):
        list(read_hex([text]))


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "/nonexistent"]) == 1
    assert "/nonexistent" in capsys.readouterr().err


def test_the_tap_hears_a_push() -> None:
    words = [sys.executable, "-m", "pdplane.cli.main", "inspect", "--tap", "tcp://127.0.0.1:*", "--count", "1"]
    context = zmq.Context()
    with (
        context,
        context.socket(zmq.PUSH) as push,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        assert process.stderr is not None
        push.linger = 0
        push.connect(process.stderr.readline().split()[-1])
        push.send_multipart(STATUS)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.startswith("status of room 9: success")
