"""Two smaller protocols of the product: WP30 hands a prefix's cache over, TX1 runs a MoE model's experts elsewhere.

The names below are for embedders. Importing this package loads no MLX, which the client of a cache worker never needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdplane.workers.cache.model import EngineReceiver
    from pdplane.workers.cache.worker import CacheWorker, CacheWorkerOptions
    from pdplane.workers.cache.wp30 import Wp30Client, Wp30Reply
    from pdplane.workers.experts.remote import RemoteExperts, RemoteOptions
    from pdplane.workers.experts.tx1 import Token
    from pdplane.workers.experts.worker import ExpertWorker, ExpertWorkerOptions

_HOMES = {
    "CacheWorker": "cache_worker",
    "CacheWorkerOptions": "cache_worker",
    "EngineReceiver": "receiver",
    "ExpertWorker": "expert_worker",
    "ExpertWorkerOptions": "expert_worker",
    "RemoteExperts": "remote_experts",
    "RemoteOptions": "remote_experts",
    "Token": "tx1",
    "Wp30Client": "wp30_client",
    "Wp30Reply": "wp30_client",
}

__all__ = [
    "CacheWorker",
    "CacheWorkerOptions",
    "EngineReceiver",
    "ExpertWorker",
    "ExpertWorkerOptions",
    "RemoteExperts",
    "RemoteOptions",
    "Token",
    "Wp30Client",
    "Wp30Reply",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
