"""Experts whose numbers are easy: two layers of four, width 8, as behind the recorded TX1 replies."""

from __future__ import annotations

import threading

import numpy as np

from pdplane.workers.experts.store import ExpertLayer, Part, Tensors

_PARTS = {f"{name}.weight": Part((8, 8), "float32") for name in ("gate_proj", "up_proj", "down_proj")}


class ToyStore:
    """Counts what is read; `broken` experts cannot be."""

    model_type = "toy"
    num_layers = 2
    identity = "toy"

    def __init__(self) -> None:
        self.layers = {layer: ExpertLayer(layer, 4, 8, _PARTS, None) for layer in (0, 1)}
        self.reads: list[tuple[int, int]] = []
        self.broken: set[int] = set()
        self.reading: set[int] = set()

    def read(self, layer: int, expert: int) -> Tensors:
        if expert in self.broken:
            raise OSError(5, "Input/output error")
        self.reads.append((layer, expert))
        self.reading.add(threading.get_ident())
        weight = np.eye(8, dtype=np.float32) * (expert + 1)
        return {name: weight.view(np.uint32) for name in _PARTS}
