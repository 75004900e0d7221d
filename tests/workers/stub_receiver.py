"""A receiver model that gives the recorded answers: 36 of them were taken over one like it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pdplane.errors import IncompatibleCache
from pdplane.workers.cache.file import CacheFile
from pdplane.workers.cache.model import Buffer, CacheRun, Left, PrefilledCache, TextRun


class StubReceiver:
    """Knows one prefix, `ph`; its cache is the word CACHE and the prompt's bytes."""

    model_revision = "rev0"
    config_hash = "cfg0"
    longest_cache = 1 << 31

    def __init__(self) -> None:
        self._held = 0

    def run_text(self, tokens: Sequence[int], max_tokens: int, left: Left) -> TextRun:
        return TextRun(f"T{len(tokens)}/{max_tokens}", 1.0, 2.0, 3.0, (1, 2), 123456)

    def check_cache(self, data: Buffer, prefix_hash: str | None, lossy: str) -> CacheFile | None:
        if prefix_hash not in (None, "ph"):
            raise IncompatibleCache("prefix_hash", "ph", prefix_hash)
        self._held = len(data)
        return None

    def run_cache(self, file: CacheFile | None, query: Sequence[int], max_tokens: int, left: Left) -> CacheRun:
        return CacheRun(f"C{len(query)}/{max_tokens}", 0.0, 2.0, 3.0, (3,), self._held, 123456)

    def prefill_cache(self, tokens: Sequence[int], document_id: str, lossy: str, left: Left) -> PrefilledCache:
        return PrefilledCache(b"CACHE" + bytes(tokens), "ph", 1.5, 1)

    def prefill_time(self, tokens: Sequence[int], left: Left) -> float:
        return 1.5


class FailingReceiver(StubReceiver):
    """Whose model fails with a cause that names a file."""

    def run_text(self, tokens: Sequence[int], max_tokens: int, left: Left) -> TextRun:
        raise RuntimeError("out of memory") from OSError(str(Path(__file__).name))
