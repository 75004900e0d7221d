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
    Cause,
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
    Why,
    WireError,
)

SAMPLES: list[PdplaneError] = [
    LocalProtocolError("push before a window"),
    LocalProtocolError("room 7 is live", Cause.LIVE),
    WireError("room", "room is negative"),
    LayoutMismatch("dtype", "float32", "bfloat16"),
    IncompatibleCache("weight_hash", "3a1f", "77c0"),
    RoomFailed(7, Cause.PEER_LOST, "prefill is gone", ("waiting", "failed")),
    RoomFailed(7, Cause.PEER_LOST, "prefill is gone"),
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
            is_told = part == 0 or str(part) in str(error)
            assert is_told or name in _NOT_TOLD.get(type(error), ()) or isinstance(part, Cause)


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


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (LocalProtocolError("push before a window"), Cause.INTERNAL),
        (WireError("room", "room is negative"), Cause.REFUSED),
        (WaitTimeout(7, "the cache", 0.5), Cause.TIMED_OUT),
        (SessionLost("h:1", "silent"), Cause.PEER_LOST),
        (TransferError("h:1", 3, 8, "reset"), Cause.TRANSFER),
        (RendezvousError("http://h:1/route", 404, "no such rank"), Cause.UNREACHABLE),
        (PoolExhausted(9, 4), Cause.FULL),
        (ConfigError("block_tokens must be positive"), Cause.BAD_REQUEST),
        (InternalError("a block was lost"), Cause.INTERNAL),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_a_cause(error: PdplaneError, cause: Cause) -> None:
    assert error.cause is cause
    assert error.why == Why(cause, str(error))


def test_what_is_passed_on_of_a_room_is_not_its_story() -> None:
    assert RoomFailed(7, Cause.FULL, "busy", ("opened", "failed")).why == Why(Cause.FULL, "busy")


def test_a_peers_own_fault_is_not_ours() -> None:
    assert {cause for cause in Cause if cause.of_peer is not cause} == {Cause.INTERNAL}
    assert Cause.INTERNAL.of_peer is Cause.PEER_FAILED


def test_blame() -> None:
    assert issubclass(WireError, RemoteProtocolError)
    assert issubclass(LayoutMismatch, RemoteProtocolError)
    assert not issubclass(LocalProtocolError, RemoteProtocolError)
    assert issubclass(ConfigError, ValueError)
