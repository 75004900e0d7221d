"""What carries a room's bytes: the shortest way that both planes know; a cut under a push costs nobody the room."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from pdplane.bench.slow_link import SlowLine, TokenBucket
from pdplane.errors import RoomFailed
from pdplane.kv.copies import Copies
from pdplane.transport.framing import Header
from pdplane.transport.pull import can_pull
from pdplane.transport.registry import TRANSPORTS, Transport
from pdplane.transport.reports import TransportOptions
from pdplane.transport.sender import Line
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.sides import PATIENCE_S, meet
from tests.waiting import until

BEST = "pull" if can_pull() else "unix"


@pytest.mark.parametrize(
    ("prefill_transport", "decode_transport", "way"),
    [(None, None, BEST), ("tcp", None, "tcp"), (None, "unix", "unix"), ("pull", "tcp", "tcp"), ("auto", "pull", BEST)],
)
def test_statistics_say_what_carries_the_bytes(
    start_prefill: StartPrefill,
    start_decode: StartDecode,
    prefill_transport: str | None,
    decode_transport: str | None,
    way: str,
) -> None:
    prefill = start_prefill(**{"transport": prefill_transport} if prefill_transport else {})
    decode = start_decode(**{"transport": decode_transport} if decode_transport else {})
    meet(prefill, decode).serve()
    assert prefill.plane.statistics()["data"]["ways"] == {way: 1}
    assert decode.plane.statistics()["receiver"]["ways"] == {way: 1}


@pytest.mark.parametrize("options", [{"streams": 3}, {"checksum": "xxh3"}, {"socket_buffer_bytes": 1 << 16}], ids=str)
def test_options_reach_both_sides(
    start_prefill: StartPrefill, start_decode: StartDecode, options: dict[str, Any]
) -> None:
    if "checksum" in options:
        pytest.importorskip("xxhash")
    settings = TransportOptions(**options)
    prefill, decode = start_prefill(transport_options=settings), start_decode(transport_options=settings)
    for seed in range(2):
        meet(prefill, decode).serve(seed)
    assert decode.plane.statistics()["receiver"]["ways"] == {BEST: settings.streams}


class Scissors:
    """Cuts the lines that go through it after so many segments, so many times."""

    def __init__(self, segments: int, cuts: int) -> None:
        self.segments, self.cuts = segments, cuts

    def transport(self) -> Transport:
        inner = TRANSPORTS["tcp"]
        assert isinstance(inner, Transport)
        line = inner.line
        return attrs.evolve(inner, line=lambda *args: CutLine(line(*args), self))


class CutLine(SlowLine):
    def __init__(self, inner: Line, scissors: Scissors) -> None:
        super().__init__(inner, TokenBucket())
        self._scissors, self._sent = scissors, 0

    def send_segment(self, header: Header, part: Copies) -> None:
        if self._sent == self._scissors.segments and self._scissors.cuts:
            self._scissors.cuts -= 1
            raise ConnectionResetError("cut by the test")
        self._sent += 1
        super().send_segment(header, part)


def test_a_cut_under_a_push_costs_nobody_the_room(
    monkeypatch: pytest.MonkeyPatch, start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    scissors = Scissors(segments=2, cuts=2)
    monkeypatch.setitem(TRANSPORTS, "cut", scissors.transport())  # the first fixture: known until the planes are closed
    prefill = start_prefill(transport="cut", transport_options=TransportOptions(segment_bytes=256, resume_pause_s=0.01))
    decode = start_decode(transport="tcp")
    meet(prefill, decode).serve()
    assert not scissors.cuts
    assert prefill.plane.statistics()["data"]["totals"]["resumed"] == 2
    assert decode.plane.statistics()["receiver"]["connections"] == 1


def test_a_link_that_always_breaks_fails_the_room_and_frees_its_blocks(
    monkeypatch: pytest.MonkeyPatch, start_prefill: StartPrefill, start_decode: StartDecode
) -> None:
    scissors = Scissors(segments=1, cuts=99)
    monkeypatch.setitem(TRANSPORTS, "cut", scissors.transport())  # the first fixture: known until the planes are closed
    prefill = start_prefill(transport="cut", transport_options=TransportOptions(segment_bytes=256, resume_pause_s=0.01))
    decode = start_decode(transport="tcp")
    meeting = meet(prefill, decode)
    meeting.work.wait_window(PATIENCE_S)
    meeting.work.push(prefill.fill(10))
    with pytest.raises(RoomFailed, match="cut by the test"):
        meeting.waiting.wait(PATIENCE_S)
    meeting.work.released.result(PATIENCE_S)
    until(lambda: decode.plane.statistics()["fence"]["open_rooms"] == 0)
    scissors.cuts = 0
    meet(prefill, decode).serve()
