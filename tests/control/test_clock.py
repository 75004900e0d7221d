"""Time that stands still while the thread that reads it is held up."""

from __future__ import annotations

import pytest

from pdplane.control.reactor import AwakeClock


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_pause_is_no_time_and_a_wait_is() -> None:
    hand = Hand()
    clock = AwakeClock(hand)
    clock.lap(5.0)
    hand.at += 5.1  # a poll that waited for as long as it may
    clock.lap()
    assert clock.now() == pytest.approx(105.1)
    hand.at += 2.0  # held up while it worked
    clock.lap(1.0)
    assert clock.now() == pytest.approx(105.1)
    hand.at += 61.0  # stopped for a minute while it waited
    clock.lap()
    assert clock.now() == pytest.approx(106.1)


def test_time_never_goes_back() -> None:
    hand = Hand()
    clock = AwakeClock(hand)
    seen = []
    for pause in (0.1, 0.3, 0.24, 7.0, 0.0, 0.26):
        clock.lap()
        hand.at += pause
        clock.lap()
        seen.append(clock.now())
    assert seen == sorted(seen)
    assert seen[-1] - 100.0 == pytest.approx(0.1 + 0.24)


def test_the_first_lap_has_nothing_before_it() -> None:
    hand = Hand()
    clock = AwakeClock(hand)
    hand.at += 50.0
    clock.lap()
    assert clock.now() == 150.0
