"""Tables of cases in one test: each row is checked, and those that fail are named."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Check = Callable[..., None]


def rows(names: str | Sequence[str], cases: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] = str) -> Any:  # noqa: ANN401  (a decorator)
    """As `pytest.mark.parametrize`, for quick cases that leave nothing behind: one test, whose fixtures they share.

    `ids` names the cases; as a function it gets the whole case.
    """
    listed, keys = list(cases), [names] if isinstance(names, str) else list(names)
    assert listed, "no case"
    labels = [ids(case) for case in listed] if callable(ids) else list(ids)

    def decorate(check: Check) -> Check:
        signature = inspect.signature(check)
        fixtures = [value for name, value in signature.parameters.items() if name not in keys]

        @functools.wraps(check)
        def run(**given: Any) -> None:  # noqa: ANN401  (fixtures)
            wrong: list[BaseException] = []
            for label, case in zip(labels, listed, strict=True):
                values = [case] if isinstance(names, str) else case
                try:
                    check(**given, **dict(zip(keys, values, strict=True)))
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:  # noqa: BLE001  (it is raised below)
                    error.add_note(f"in the case {label}")
                    wrong.append(error)
            if wrong:
                raise BaseExceptionGroup(f"{len(wrong)} of {len(listed)} cases", wrong)

        run.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return run

    return decorate
