"""A cache worker together with the engine that it serves: one thing to start and to close."""

from __future__ import annotations

from pdplane.engine.prefix import PrefixEngine
from pdplane.ids import Endpoint
from pdplane.workers.cache_worker import CacheWorker, CacheWorkerStatistics


class ModelWorker:
    """Loads, then listens; closes the engine first, so that no connection waits for its model."""

    def __init__(self, engine: PrefixEngine, worker: CacheWorker) -> None:
        self._engine, self._worker = engine, worker

    def start(self) -> Endpoint:
        """Load the model and listen. Raises ConfigError."""
        self._engine.start()
        return self._worker.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until a client asked for shutdown; whether one did."""
        return self._worker.wait(timeout_s)

    def close(self) -> None:
        """End every job and connection and join every thread; idempotent."""
        self._engine.close()
        self._worker.close()

    def statistics(self) -> CacheWorkerStatistics:
        return self._worker.statistics()
