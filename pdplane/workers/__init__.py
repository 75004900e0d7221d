"""Two smaller protocols of the product: WP30 hands a prefix's cache over, TX1 runs a MoE model's experts elsewhere.

The names below are for embedders. Importing this package loads no MLX, which the client of a cache worker never needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdplane.workers.cache.model import MlxCacheModel
    from pdplane.workers.cache.worker import CacheWorker, CacheWorkerOptions
    from pdplane.workers.cache.wp30 import Wp30Client, Wp30Reply
    from pdplane.workers.experts.remote import RemoteExperts, RemoteOptions
    from pdplane.workers.experts.tx1 import Tx1Token
    from pdplane.workers.experts.worker import ExpertWorker, ExpertWorkerOptions

_HOMES = {
    "CacheWorker": "cache.worker",
    "CacheWorkerOptions": "cache.worker",
    "MlxCacheModel": "cache.model",
    "ExpertWorker": "experts.worker",
    "ExpertWorkerOptions": "experts.worker",
    "RemoteExperts": "experts.remote",
    "RemoteOptions": "experts.remote",
    "Tx1Token": "experts.tx1",
    "Wp30Client": "cache.wp30",
    "Wp30Reply": "cache.wp30",
}

__all__ = [
    "CacheWorker",
    "CacheWorkerOptions",
    "ExpertWorker",
    "ExpertWorkerOptions",
    "MlxCacheModel",
    "RemoteExperts",
    "RemoteOptions",
    "Tx1Token",
    "Wp30Client",
    "Wp30Reply",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
