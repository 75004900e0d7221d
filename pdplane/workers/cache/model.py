"""What a cache worker needs of a model, and the MLX model that does it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Protocol, TypeAlias, TypeVar

import attrs

from pdplane.engine.thread import Job
from pdplane.errors import IncompatibleCache
from pdplane.messages import hash_prompt
from pdplane.workers.cache.codecs import LOSSY, expand, shrink
from pdplane.workers.cache.file import CacheFile, CacheManifest, decode_cache_file, encode_cache_file
from pdplane.workers.cache.prefix import Continuation, PrefixEngine

Buffer = bytes | bytearray | memoryview
Left: TypeAlias = Callable[[], bool]
"""Whether the client that waits has left; then its command ends."""

_LOOK_S = 0.2  # between two looks whether the client is still there
_T = TypeVar("_T")


@attrs.frozen
class TextRun:
    """A whole prompt, prefilled and continued; times in ms."""

    text: str
    prefill_ms: float
    ttft_ms: float
    decode_ms: float
    tokens: tuple[int, ...]
    peak_bytes: int


@attrs.frozen
class CacheRun:
    """A saved prefix, continued.

    `load_ms` is the time until the cache is in place, waiting for the model included and the codec's left out;
    `ttft_ms` is the time from then to the first token.
    """

    text: str
    load_ms: float
    ttft_ms: float
    decode_ms: float
    tokens: tuple[int, ...]
    tensor_bytes: int
    peak_bytes: int


@attrs.frozen(eq=False)
class PrefilledCache:
    """A saved prefix; `width` is the element width that a codec may use."""

    data: bytes
    prefix_hash: str
    prefill_ms: float
    width: int


class CacheModel(Protocol):
    """A model behind a cache worker; every method blocks and may be called by any thread.

    What runs the model raises ConnectionAbortedError once the client has `left`.
    """

    @property
    def model_revision(self) -> str: ...

    @property
    def config_hash(self) -> str: ...

    @property
    def longest_cache(self) -> int:
        """Bytes of the longest cache that the model's context needs: more is not unpacked."""

    def run_text(self, tokens: Sequence[int], max_tokens: int, left: Left) -> TextRun: ...

    def check_cache(self, data: Buffer, prefix_hash: str | None, lossy: str) -> CacheFile | None:
        """Read a cache before the query is looked at. Raises IncompatibleCache or WireError."""

    def run_cache(self, file: CacheFile | None, query: Sequence[int], max_tokens: int, left: Left) -> CacheRun: ...

    def prefill_cache(self, tokens: Sequence[int], document_id: str, lossy: str, left: Left) -> PrefilledCache: ...

    def prefill_time(self, tokens: Sequence[int], left: Left) -> float: ...


class MlxCacheModel:
    """A `CacheModel` over a started PrefixEngine."""

    def __init__(self, engine: PrefixEngine) -> None:
        self._engine = engine

    @property
    def model_revision(self) -> str:
        return self._engine.identity.model_revision

    @property
    def config_hash(self) -> str:
        return self._engine.identity.config_hash

    @property
    def longest_cache(self) -> int:
        return self._engine.longest_cache

    def run_text(self, tokens: Sequence[int], max_tokens: int, left: Left) -> TextRun:
        run = _result(self._engine.run(tokens, max_tokens), left)
        return TextRun(self._text(run), run.prefill_ms, run.ttft_ms, run.decode_ms, run.tokens, run.peak_bytes)

    def check_cache(self, data: Buffer, prefix_hash: str | None, lossy: str) -> CacheFile:
        file = decode_cache_file(data)
        theirs = file.manifest
        wanted = theirs.prefix_hash if prefix_hash is None else prefix_hash
        theirs.check(self._manifest(wanted, theirs.document_id, theirs.token_count, lossy))
        if lossy in LOSSY:
            return CacheFile(theirs, expand(file.caches, lossy))
        return file

    def run_cache(self, file: CacheFile | None, query: Sequence[int], max_tokens: int, left: Left) -> CacheRun:
        if file is None:
            raise IncompatibleCache("payload", "a cache", "nothing")
        began = time.perf_counter()
        run = _result(self._engine.resume(file.caches, file.manifest.token_count, query, max_tokens), left)
        first_ms = run.ttft_ms - run.load_ms
        load_ms = (time.perf_counter() - began) * 1000 - first_ms - run.decode_ms
        return CacheRun(
            self._text(run), max(load_ms, run.load_ms), first_ms, run.decode_ms, run.tokens, file.tensor_bytes,
            run.peak_bytes,
        )  # fmt: skip

    def prefill_cache(self, tokens: Sequence[int], document_id: str, lossy: str, left: Left) -> PrefilledCache:
        saved = _result(self._engine.save(tokens), left)
        caches = shrink(saved.caches, lossy) if lossy in LOSSY else saved.caches
        prefix_hash = hash_prompt(tokens)
        file = CacheFile(self._manifest(prefix_hash, document_id, len(tokens), lossy), caches)
        return PrefilledCache(encode_cache_file(file), prefix_hash, saved.prefill_ms, file.width)

    def prefill_time(self, tokens: Sequence[int], left: Left) -> float:
        return _result(self._engine.prefill(tokens), left)

    def _text(self, run: Continuation) -> str:
        return self._engine.tokenizer.decode(run.tokens)

    def _manifest(self, prefix_hash: str, document_id: str, token_count: int, lossy: str) -> CacheManifest:
        own = self._engine.identity
        return CacheManifest(
            own.model_revision, own.config_hash, own.weight_hash, prefix_hash, document_id, token_count, own.dtype,
            own.mlx, own.mlx_lm, lossy,
        )  # fmt: skip


def _result(job: Job[_T], left: Left) -> _T:
    """Wait for a job; cancel it and raise ConnectionAbortedError when its client leaves."""
    while not wait([job.future], _LOOK_S).done:
        if left():
            job.cancel()
            raise ConnectionAbortedError("the client left before its reply")
    return job.result()
