"""Whatever bytes come over the legacy sockets: events or counts, never an exception."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pdplane import wire
from pdplane.control.legacy import LegacyPrefillChannel, LegacyPrefills
from pdplane.ids import SessionId
from pdplane.messages import Registration
from tests.samples import two_group_layout

GOOD = wire.encode_registration(
    Registration("10.0.0.1", 9, SessionId("10.0.0.1:9"), 4096, wire.encode_layout(two_group_layout()), 1, 0)
)
FRAME = st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"None", b"0", b"7", b"10.0.0.1:9", b"-1", *GOOD]))
MESSAGE = st.lists(FRAME, min_size=1, max_size=9)


@given(messages=st.lists(MESSAGE, max_size=4), registered=st.booleans())
def test_a_prefill_hears_anything(messages: list[list[bytes]], registered: bool) -> None:
    rejected: Counter[str] = Counter()
    channel = LegacyPrefillChannel(rejected)
    if registered:
        assert len(channel.read(GOOD)) == 1
    for message in messages:
        before = rejected.total()
        assert len(channel.read(message)) + rejected.total() - before == 1


@given(index=st.integers(0, 7), frame=FRAME)
def test_a_registration_with_one_bad_frame(index: int, frame: bytes) -> None:
    rejected: Counter[str] = Counter()
    message = [*GOOD[:index], frame, *GOOD[index + 1 :]]
    assert len(LegacyPrefillChannel(rejected).read(message)) + rejected.total() == 1


@given(message=MESSAGE)
def test_a_decode_hears_anything(message: list[bytes]) -> None:
    rejected: Counter[str] = Counter()
    channels = LegacyPrefills(rejected, lambda line: None)
    assert channels.read(message) == []
    assert rejected.total() == 1
