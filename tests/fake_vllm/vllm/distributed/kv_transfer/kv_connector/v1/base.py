"""As in vLLM 0.32: what a connector inherits, and what it returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class KVConnectorRole(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass


class KVConnectorWorkerMetadata:
    pass


@dataclass
class KVConnectorTransferResults:
    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        self._vllm_config = vllm_config
        self._metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:  # noqa: ANN401
        self._metadata = connector_metadata

    def _get_connector_metadata(self) -> Any:  # noqa: ANN401
        return self._metadata

    def clear_connector_metadata(self) -> None:
        self._metadata = None
