"""A table in one test checks all its rows and names those that fail."""

from __future__ import annotations

import pytest

from tests.rows import rows


def test_every_row_is_checked_and_those_that_fail_are_named() -> None:
    seen: list[tuple[int, str]] = []

    @rows(("number", "word"), [(1, "a"), (2, "b"), (3, "c")], ids=lambda case: f"<{case[1]}>")
    def check(number: int, word: str) -> None:
        seen.append((number, word))
        assert number == 2
        if number == 2:
            pytest.fail("two")

    with pytest.raises(BaseExceptionGroup, match="3 of 3 cases") as failed:
        check()
    assert seen == [(1, "a"), (2, "b"), (3, "c")]
    assert [error.__notes__ for error in failed.value.exceptions] == [[f"in the case <{word}>"] for word in "abc"]


def test_rows_share_the_fixtures_of_their_test(pytestconfig: pytest.Config) -> None:
    del pytestconfig
    shared: list[object] = []

    @rows("number", range(2))
    def check(config: object, number: int) -> None:
        shared.append(config)

    check(config="one")
    assert shared == ["one", "one"]
