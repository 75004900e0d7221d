"""A cause crosses the wire as a value; the words beside it decide nothing on the other side."""

from __future__ import annotations

import json

import pytest

from pdplane import wire
from pdplane.errors import Cause, RoomFailed
from pdplane.serving.errors import status_of
from tests.plane.conftest import StartDecode, StartPrefill
from tests.plane.raw_prefill import RawPrefill
from tests.plane.sides import meet
from tests.waiting import PATIENCE_S

FREE_TEXTS = (
    "prefill failed: the adapter did not finish within 3 s",
    "prefill failed: the adapter wanted 3 blocks, 0 are free",
    "the adapter fell silent for 6 s: room 7 is live",
)


@pytest.mark.parametrize("cause", Cause)
def test_each_side_fails_with_the_cause_of_the_other(
    start_prefill: StartPrefill, start_decode: StartDecode, cause: Cause
) -> None:
    prefill, decode = start_prefill(), start_decode()
    for number, text in enumerate(FREE_TEXTS):
        meeting = meet(prefill, decode)
        window = meeting.work.wait_window(PATIENCE_S)
        assert window.prompt_len == 10
        mine, theirs = (meeting.work, meeting.waiting) if number % 2 else (meeting.waiting, meeting.work)
        mine.cancel(text, cause)
        for room, expected in ((mine, cause), (theirs, cause.of_peer)):
            error = room.done.exception(PATIENCE_S)
            assert isinstance(error, RoomFailed)
            assert error.cause is expected
            assert text in error.text
        meeting.waiting.released.result(PATIENCE_S)


@pytest.mark.parametrize("text", FREE_TEXTS)
@pytest.mark.parametrize("more", [{}, {"what": "of tomorrow"}, {"what": 200}])
def test_a_peers_free_text_decides_no_status(start_decode: StartDecode, text: str, more: dict[str, object]) -> None:
    decode = start_decode()
    with RawPrefill(decode.plane.layout) as raw:
        room = decode.plane.open(7, prefill=raw.rendezvous, manifest=decode.lend(10)[1])
        raw.accept()
        said = {"room": 7, "generation": raw.hear_offer().generation, "cause": text} | more
        raw.say(wire.decode_notice([b"pdplane/1", b"failed", json.dumps(said).encode()]))
        error = room.done.exception(PATIENCE_S)
    assert isinstance(error, RoomFailed)
    assert (error.cause, status_of(error)) == (Cause.PEER_FAILED, 502)
