"""Other work of the receiving process: decoding with a tiny MLX model, or spinning in Python."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

from pdplane.api import EngineDecodeRequest, Token
from pdplane.engine.blas import use_blas
from pdplane.kv.arena import Arena, Pool

_PROMPT = tuple(range(1, 33))
_TOKENS = 64


class Decoding:
    """An MLX engine: its arena, and an endless generation on its thread once begun. Needs the extra `mlx`."""

    def __init__(self, nbytes: int) -> None:
        use_blas()
        from pdplane.engine.decode import MlxDecodeEngine
        from pdplane.engine.options import EngineOptions

        # One block more than asked, since the layout rounds down.
        self._engine = MlxDecodeEngine(
            EngineOptions(model="tiny:llama", arena_bytes=nbytes + (nbytes >> 3) + (1 << 22))
        )
        self._ending = threading.Event()
        self._idle = threading.Event()
        self._idle.set()

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._idle.wait()
        self._engine.close()

    @property
    def arena(self) -> Arena:
        """MLX-owned memory."""
        return self._engine.arena

    def begin(self) -> None:
        """Generate until the end, sequence after sequence."""
        self._idle.clear()
        self._blocks = Pool(self._engine.layout).allocate(self._engine.blocks_needed(len(_PROMPT)))
        self._again(None)

    def _again(self, _done: Future[Any] | None) -> None:
        if self._ending.is_set():
            self._idle.set()
            return
        request = EngineDecodeRequest(_PROMPT, self._blocks, Token(1, 0.0), _TOKENS)
        job = self._engine.decode(request, lambda _token: None, lambda: None)
        job.future.add_done_callback(self._again)


@contextmanager
def spinning() -> Iterator[None]:
    """Run a pure Python thread without a pause inside the block."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin, name="spin", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
