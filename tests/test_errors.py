"""The error tree: every error pickles, tells its fields, and stands where its blame belongs."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
from collections.abc import Iterator

import attrs
import pytest

from pdplane import errors
from pdplane.errors import (
    ConfigError,
    IncompatibleCache,
    InternalError,
    LayoutMismatch,
    LocalProtocolError,
    PdplaneError,
    PoolExhausted,
    RemoteProtocolError,
    RendezvousError,
    RoomFailed,
    SessionLost,
    TransferError,
    WaitTimeout,
    WireError,
)

SAMPLES: list[PdplaneError] = [
    LocalProtocolError("push before a window"),
    WireError("room", "room is negative"),
    LayoutMismatch("dtype", "float32", "bfloat16"),
    IncompatibleCache("weight_hash", "3a1f", "77c0"),
    RoomFailed(7, "prefill is gone", ("waiting", "failed")),
    RoomFailed(7, "prefill is gone"),
    WaitTimeout(7, "the cache", 2.5),
    SessionLost("10.0.0.1:5000", "three pings missed"),
    TransferError("10.0.0.1:5000", 3, 8, "reset"),
    RendezvousError("http://h:1/route", 404, "no such rank"),
    RendezvousError("http://h:1/route", 0, "refused"),
    PoolExhausted(9, 4),
    ConfigError("block_tokens must be positive"),
    InternalError("a block was lost"),
]
_ABSTRACT = {"PdplaneError", "ProtocolError", "RemoteProtocolError"}
_NOT_TOLD = {WireError: {"field"}}  # the reason is the whole text: legacy peers' texts are exact


def _public() -> set[str]:
    return {name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}


def test_every_error_has_a_sample_and_stands_in_the_docstring() -> None:
    assert {type(error).__name__ for error in SAMPLES} | _ABSTRACT == _public()
    assert errors.__doc__ is not None
    for name in _public():
        assert name in errors.__doc__


@pytest.mark.parametrize("error", SAMPLES, ids=repr)
def test_survives_pickling_and_copying(error: PdplaneError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert attrs.asdict(again) == attrs.asdict(error)
        assert str(again) == str(error)


@pytest.mark.parametrize("error", SAMPLES, ids=repr)
def test_the_text_tells_every_field(error: PdplaneError) -> None:
    for name, value in attrs.asdict(error).items():
        for part in value if isinstance(value, tuple) else (value,):
            assert str(part) in str(error) or name in _NOT_TOLD.get(type(error), ()) or part == 0


@pytest.mark.parametrize("error", SAMPLES, ids=repr)
def test_can_be_raised_through_frames_that_touch_it(error: PdplaneError) -> None:
    """Frozen errors must still take the traceback, cause and notes that Python hangs on them."""

    @contextlib.contextmanager
    def passing() -> Iterator[None]:
        yield

    with pytest.raises(type(error)) as caught, passing():
        raise error from ValueError("cause")
    assert isinstance(caught.value.__cause__, ValueError)
    caught.value.add_note("while testing")
    assert caught.value.__notes__ == ["while testing"]
    error.__traceback__ = None


def test_blame() -> None:
    assert issubclass(WireError, RemoteProtocolError)
    assert issubclass(LayoutMismatch, RemoteProtocolError)
    assert not issubclass(LocalProtocolError, RemoteProtocolError)
    assert issubclass(ConfigError, ValueError)
