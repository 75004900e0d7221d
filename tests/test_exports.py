"""The library's public names."""

from __future__ import annotations

import inspect

import pytest

import pdplane
from pdplane import errors
from tests.rows import rows


def test_sorted_and_unique() -> None:
    assert list(pdplane.__all__) == sorted(set(pdplane.__all__))


@rows("name", pdplane.__all__)
def test_each_name_is_there_and_documented(name: str) -> None:
    found = getattr(pdplane, name)
    if inspect.isclass(found) or inspect.isfunction(found):  # else an alias of a type
        assert inspect.getdoc(found)
        assert found.__module__.startswith("pdplane.")


# Errors that planes turn into a RoomFailed or answer themselves, and those of the workers.
NEVER_MET = {"IncompatibleCache", "LayoutMismatch", "RendezvousError", "SessionLost", "TransferError"}


def test_every_error_that_an_embedder_meets_is_public() -> None:
    kinds = {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
    assert kinds - NEVER_MET == kinds & set(pdplane.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        pdplane.no_such_name  # noqa: B018  (the access is the test)
