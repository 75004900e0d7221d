"""Text that comes in pieces, up to a stop."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdplane.serving.answer import StopText


@given(st.lists(st.text("ab", max_size=4), max_size=6), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_stop_text_is_the_text_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    stop_text = StopText(stops)
    shown = [stop_text.feed(piece) for piece in pieces]
    if stop_text.matched is None:
        shown.append(stop_text.flush())
        assert "".join(shown) == "".join(pieces)
        assert not any(stop in "".join(pieces) for stop in stops)
    else:
        whole, text = "".join(pieces), "".join(shown)
        assert whole.startswith(text + stop_text.matched)
        assert not any(stop in text for stop in stops)
