"""Experts in memory, a fixed number of slots a layer, and the arithmetic of one (row, expert) pair after the other.

The sequence of operations is that of mlx-lm's own `switch_mlp`, so the numbers are its numbers, bit for bit, however
the pairs are split over banks, calls and slots. Everything here runs on the MLX thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import attrs
import mlx.core as mx
import numpy as np

from pdplane.engine.views import Numbers, bits_of, carrier
from pdplane.errors import ConfigError
from pdplane.workers.cache.saved import DTYPES
from pdplane.workers.experts.store import ExpertLayer, ExpertStore
from pdplane.workers.experts.switch import (
    ExpertCall,
    Indices,
    PackedMatrix,
    gather_matmul,
    gather_quantised_matmul,
    swiglu,
)


@attrs.frozen(eq=False)
class Executed:
    """Results in pair order, shape (pairs, width), as bits of `dtype`; and the experts that were evicted."""

    bits: Numbers
    dtype: str
    evicted: tuple[int, ...]


class ExpertBank:
    """At most `capacity` experts a layer; the least recently used one is evicted first."""

    def __init__(self, store: ExpertStore, capacity: int | None = None) -> None:
        if capacity is not None and capacity < 1:
            raise ConfigError(f"a capacity of {capacity} experts a layer; at least one is needed")
        self.store = store
        most = max(layer.num_experts for layer in store.layers.values())
        self.capacity = most if capacity is None else min(capacity, most)
        self._slots: dict[int, _Slots] = {}

    @property
    def resident(self) -> dict[int, list[int]]:
        """The experts in memory by layer, in ascending order."""
        return {layer: sorted(slots.experts) for layer, slots in sorted(self._slots.items())}

    def load(self, layer: int, experts: Sequence[int]) -> tuple[int, ...]:
        """Read experts, up to the capacity, into slots; return those that were evicted. Raises OSError."""
        return self._layer(layer).ensure(list(dict.fromkeys(experts)), self.store)

    def run(self, call: ExpertCall, *, convert: bool = False) -> Executed:
        """Run a call's pairs.

        With `convert` rows are computed in the weights' dtype and the results are the rows' dtype again; without it
        mlx's own rule of mixed dtypes holds, as in a local model. More distinct experts than slots are run one set
        after the other. Raises OSError when a weight cannot be read.
        """
        slots = self._layer(call.layer)
        inputs = mx.array(call.rows).view(DTYPES[call.dtype])
        if convert:
            inputs = inputs.astype(slots.dtype)
        places: list[Indices] = []
        parts: list[mx.array] = []
        evicted: list[int] = []
        for experts in _sets(call.expert_of, slots.capacity):
            evicted += slots.ensure(experts, self.store)
            chosen = np.flatnonzero(np.isin(call.expert_of, experts))
            slot_of = np.array([slots.experts[int(expert)] for expert in call.expert_of[chosen]], np.int64)
            if call.grouped:
                ascending = np.argsort(slot_of, kind="stable")
                chosen, slot_of = chosen[ascending], slot_of[ascending]
            result = slots.compute(inputs, call.row_of[chosen], slot_of, grouped=call.grouped)
            mx.eval(result)  # before the next experts take the slots
            places.append(chosen)
            parts.append(result)
        if not parts:
            return Executed(np.empty((0, slots.layer.width), carrier(DTYPES[call.dtype])), call.dtype, ())
        kind = DTYPES[call.dtype] if convert else parts[0].dtype
        out = np.empty((len(call.expert_of), slots.layer.width), carrier(kind))
        for chosen, result in zip(places, parts, strict=True):
            out[chosen] = bits_of(mx.contiguous(result.astype(kind)))
        return Executed(out, str(kind).removeprefix("mlx.core."), tuple(evicted))

    def _layer(self, layer: int) -> _Slots:
        if layer not in self._slots:
            self._slots[layer] = _Slots(self.store.layers[layer], self.capacity)
        return self._slots[layer]


class _Slots:
    """The slots of one layer: an array a part, with one place an expert, written through numpy views."""

    def __init__(self, layer: ExpertLayer, capacity: int) -> None:
        self.layer = layer
        self.capacity = min(capacity, layer.num_experts)
        self.experts: OrderedDict[int, int] = OrderedDict()
        self.dtype = self._input_dtype()
        self._bits: dict[str, mx.array] = {}
        self._views: dict[str, Numbers] = {}
        for name, part in layer.parts.items():
            zeros = mx.zeros((self.capacity, *part.shape), dtype=_carrier(part.dtype))
            mx.eval(zeros)
            self._bits[name], self._views[name] = zeros, np.array(zeros, copy=False)

    def ensure(self, wanted: Sequence[int], store: ExpertStore) -> tuple[int, ...]:
        """Read all of `wanted`, at most `capacity` experts, into slots; return the experts that were evicted."""
        if len(wanted) > self.capacity:
            raise ConfigError(f"{len(wanted)} experts do not fit in the {self.capacity} slots of a layer")
        for expert in wanted:
            if expert in self.experts:
                self.experts.move_to_end(expert)
        evicted = []
        for expert in wanted:
            if expert in self.experts:
                continue
            tensors = store.read(self.layer.layer, expert)  # before an expert is evicted, since it may fail
            slot = len(self.experts)
            if slot == self.capacity:
                left, slot = self.experts.popitem(last=False)
                evicted.append(left)
            for name, bits in tensors.items():
                self._views[name][slot] = bits
            self.experts[expert] = slot
        return tuple(evicted)

    def compute(self, inputs: mx.array, row_of: Indices, slot_of: Indices, *, grouped: bool) -> mx.array:
        """Return gate, up, down for each pair: shape (pairs, width).

        Axes are added where mlx-lm adds them in each of its two ways, before or after rows are gathered, since strides
        too decide which BLAS kernel runs, and with it the last bits.
        """
        rows, slots = mx.array(row_of.astype(np.uint32)), mx.array(slot_of.astype(np.uint32))
        if grouped:
            x = mx.expand_dims(inputs, -2)[rows]
        else:
            x, slots = mx.expand_dims(inputs[rows], (-2, -3)), slots.reshape(-1, 1)
        gate = self._project("gate_proj", x, slots, grouped=grouped)
        hidden = swiglu(gate, self._project("up_proj", x, slots, grouped=grouped))
        return self._project("down_proj", hidden, slots, grouped=grouped).reshape(len(row_of), -1)

    def _project(self, name: str, x: mx.array, slots: mx.array, *, grouped: bool) -> mx.array:
        weight = self._part(f"{name}.weight")
        packed = self.layer.quantization
        if packed is None:
            return gather_matmul(x, weight.swapaxes(-1, -2), slots, grouped=grouped)
        biases = self._part(f"{name}.biases") if f"{name}.biases" in self._bits else None
        matrix = PackedMatrix(weight, self._part(f"{name}.scales"), biases)
        return gather_quantised_matmul(x, matrix, slots, packed, grouped=grouped)

    def _part(self, name: str) -> mx.array:
        return self._bits[name].view(DTYPES[self.layer.parts[name].dtype])

    def _input_dtype(self) -> mx.Dtype:
        """Return the dtype that a local model's rows have: that of the weights, or of the scales of packed ones."""
        name = "gate_proj.weight" if self.layer.quantization is None else "gate_proj.scales"
        dtype = DTYPES[self.layer.parts[name].dtype]
        return dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16


def _carrier(dtype: str) -> mx.Dtype:
    return {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[DTYPES[dtype].size]


def _sets(expert_of: Indices, capacity: int) -> Iterator[list[int]]:
    experts = list(dict.fromkeys(expert_of.tolist()))
    for start in range(0, len(experts), capacity):
        yield experts[start : start + capacity]
