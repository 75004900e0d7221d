"""A request's body on its way to tokens: bounded by the model's context, and read beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeAlias, TypeVar

import attrs
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pdplane.errors import Cause, LocalProtocolError
from pdplane.serving.fields import BadField

T = TypeVar("T")
GoOn: TypeAlias = Callable[[], None]
"""Raises when nobody waits for the work any more; long work calls it between its pieces."""

LARGEST_BODY = 64 << 20
DEFAULT_BODY = 8 << 20
"""For daemons of which the longest body is not known yet."""
SMALL_BODY = 64 << 10
_SMALL_PLACES, _LARGE_PLACES = 4, 2
_MAX_WAITING = 256
_READ_S = 30.0
_UPLOAD_S = 60.0
_SILENCE_S = 15.0


async def take_body(request: web.Request, limit: int) -> bytes:
    """Return a request's body, decompressed. Raises BadField for one that is longer than `limit` or stops coming."""
    declared = request.content_length
    if declared is not None and declared > limit:
        raise _too_long(declared, limit)
    body = bytearray()
    loop = asyncio.get_running_loop()
    end = loop.time() + _UPLOAD_S
    try:
        async with asyncio.timeout(_SILENCE_S) as patience:
            while piece := await request.content.readany():
                body += piece
                if len(body) > limit:
                    raise _too_long(len(body), limit)
                patience.reschedule(min(end, loop.time() + _SILENCE_S))
    except TimeoutError:
        raise BadField(f"the body stopped after {len(body)} bytes", "body") from None
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise BadField("the body cannot be decoded", "body") from error
    return bytes(body)


def _too_long(nbytes: int, limit: int) -> BadField:
    return BadField(f"the body has {nbytes} bytes or more, and the model's context allows {limit}", "body")


@attrs.define(eq=False)
class _Lane:
    """A bounded number of threads at one time."""

    places: asyncio.Semaphore
    waiting: int = 0


@attrs.define(eq=False)
class _Work(Generic[T]):
    """One thread's work; it gives its place back at its end, whoever waits for it by then."""

    place: asyncio.Semaphore
    work: Callable[[GoOn], T]
    left: threading.Event = attrs.Factory(threading.Event)
    loop: asyncio.AbstractEventLoop = attrs.Factory(asyncio.get_running_loop)

    def begin(self) -> asyncio.Future[T]:
        """Start the thread. Raises LocalProtocolError when the system gives no more threads."""
        answer: asyncio.Future[T] = self.loop.create_future()
        try:
            threading.Thread(target=self._run, args=(answer,), name="pdplane-read", daemon=True).start()
        except RuntimeError as error:
            self.place.release()
            raise LocalProtocolError("no thread is left to read this request", Cause.FULL) from error
        return answer

    def _run(self, answer: asyncio.Future[T]) -> None:
        ended: Future[T] = Future()
        try:
            self._go_on()
            ended.set_result(self.work(self._go_on))
        except BaseException as error:  # noqa: BLE001  (whoever waits gets it)
            ended.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self.loop.call_soon_threadsafe(self._end, answer, ended)

    def _go_on(self) -> None:
        if self.left.is_set():
            raise LocalProtocolError("nobody waits for this request any more", Cause.CANCELLED)

    def _end(self, answer: asyncio.Future[T], ended: Future[T]) -> None:
        self.place.release()
        if answer.done():
            return
        if (error := ended.exception()) is None:
            answer.set_result(ended.result())
        else:
            answer.set_exception(error)


class Readers:
    """Runs what a client's bytes make long on threads of their own, of which each ends with its work.

    Small bodies do not stand in line behind large ones. A client that leaves frees its place as soon as its work asks
    whether to go on. No exit waits for these threads. Everything but the work runs on one event loop.
    """

    def __init__(self, deadline_s: float = _READ_S) -> None:
        self._deadline_s = deadline_s
        self._small, self._large = (_Lane(asyncio.Semaphore(count)) for count in (_SMALL_PLACES, _LARGE_PLACES))

    async def run(self, nbytes: int, work: Callable[[GoOn], T]) -> T:
        """Return what `work(go_on)` returns; raise what it raises.

        Raises LocalProtocolError when it is not done in time.
        """
        lane = self._small if nbytes <= SMALL_BODY else self._large
        if lane.waiting >= _MAX_WAITING:
            raise LocalProtocolError(f"{lane.waiting} requests wait to be read already", Cause.FULL)
        running = _Work(lane.places, work)
        lane.waiting += 1
        try:
            async with asyncio.timeout(self._deadline_s):
                await lane.places.acquire()
                return await running.begin()
        except TimeoutError:
            text = f"the request was not read within {self._deadline_s:g} s: it is long, or others are"
            raise LocalProtocolError(text, Cause.TIMED_OUT) from None
        finally:
            lane.waiting -= 1
            running.left.set()
