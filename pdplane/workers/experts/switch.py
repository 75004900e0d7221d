"""The expert layers of mlx-lm's MoE networks: finding them, their arithmetic, and what can replace them.

mlx-lm calls such a layer `switch_mlp`; it takes rows and, for each row, the experts that the router chose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Protocol

import attrs
import mlx.core as mx
import mlx.nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.activations import swiglu as _swiglu
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwiGLU, SwitchGLU, SwitchLinear

from pdplane.engine.untyped import Network
from pdplane.engine.views import Numbers, bits_of
from pdplane.errors import ConfigError
from pdplane.workers.cache.saved import DTYPES

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")
_SWITCH = "switch_mlp"
_GROUP_FROM = 64  # pairs from which on mlx-lm sorts them by expert
_LINEAR = ("gate_proj", "up_proj", "down_proj")

Indices = npt.NDArray[np.int64]

_mx: Any = mx
_nn: Any = mlx.nn
_activation: Any = _swiglu


@attrs.frozen
class Quantization:
    """How weights are packed; texts and numbers as mlx-lm's config has them."""

    group_size: int
    bits: int
    mode: str = "affine"


@attrs.frozen(eq=False)
class PackedMatrix:
    """A stack of quantised matrices; some modes have no biases."""

    weight: mx.array
    scales: mx.array
    biases: mx.array | None


@attrs.frozen(eq=False)
class ExpertCall:
    """One layer's work: pair n is row `row_of[n]` with expert `expert_of[n]`.

    `rows` are bits of `dtype`, shape (count, width). `grouped` pairs stand in the order of their experts, and mlx-lm
    multiplies all rows of an expert at once: then an expert's pairs belong together, since another number of rows may
    give other last bits.
    """

    layer: int
    rows: Numbers
    dtype: str
    row_of: Indices
    expert_of: Indices
    grouped: bool = False


class ExpertRunner(Protocol):
    """Runs experts somewhere; called on the MLX thread."""

    def run(self, call: ExpertCall) -> tuple[Numbers, str]:
        """Return results in pair order, bits of shape (pairs, width), and their dtype.

        An exception fails the forward step.
        """


class RemoteSwitch(_nn.Module):  # type: ignore[misc]  # mlx's Module has no types
    """Replaces a `switch_mlp` and calls a runner."""

    def __init__(self, layer: int, runner: ExpertRunner) -> None:
        super().__init__()
        self._layer, self._runner = layer, runner

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        width, chosen = x.shape[-1], indices.shape[-1]
        flat = indices.reshape(-1)
        grouped = flat.size >= _GROUP_FROM
        # mlx's own sort: rows of one expert must stand in the order in which mlx-lm would multiply them.
        order = np.array(mx.argsort(flat)).astype(np.int64) if grouped else np.arange(flat.size)
        experts = np.array(flat, copy=True).astype(np.int64)[order]
        dtype = str(x.dtype).removeprefix("mlx.core.")
        rows = bits_of(mx.contiguous(x.reshape(-1, width)))
        found, kind = self._runner.run(ExpertCall(self._layer, rows, dtype, order // chosen, experts, grouped))
        results = np.empty_like(found)
        results[order] = found
        return mx.array(results).view(DTYPES[kind]).reshape(*indices.shape, width)


def switch_modules(network: Network) -> Iterator[tuple[int, Network, Network]]:
    """Yield (layer number, the block around it, its `switch_mlp`) of every expert layer, in order.

    Raises ConfigError for one whose arithmetic is not gate, up, down with SwiGLU and no bias.
    """
    found = []
    for path, module in network.named_modules():
        layer = _LAYER.match(f"{path}.")
        if layer is not None and _SWITCH in module:
            found.append((int(layer[1]), module, module[_SWITCH]))
    for number, block, switch in sorted(found, key=lambda item: item[0]):
        _refuse_others(number, switch)
        yield number, block, switch


def replace_switches(network: Network, runner: ExpertRunner) -> int:
    """Replace every expert layer by a RemoteSwitch; return their number."""
    blocks = [(layer, block) for layer, block, _ in switch_modules(network)]
    for layer, block in blocks:
        block[_SWITCH] = RemoteSwitch(layer, runner)
    return len(blocks)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, by mlx-lm's own compiled function."""
    found: mx.array = _activation(gate, up)
    return found


def gather_matmul(x: mx.array, weight: mx.array, which: mx.array, *, grouped: bool) -> mx.array:
    """Return each x times the matrix that `which` names; `grouped` promises that `which` ascends."""
    found: mx.array = _mx.gather_mm(x, weight, rhs_indices=which, sorted_indices=grouped)
    return found


def gather_quantised_matmul(
    x: mx.array, matrix: PackedMatrix, which: mx.array, form: Quantization, *, grouped: bool
) -> mx.array:
    """Return each x times the packed matrix that `which` names; `grouped` promises that `which` ascends."""
    found: mx.array = _mx.gather_qmm(
        x, matrix.weight, matrix.scales, matrix.biases, rhs_indices=which, transpose=True,
        group_size=form.group_size, bits=form.bits, mode=form.mode, sorted_indices=grouped,
    )  # fmt: skip
    return found


def _refuse_others(layer: int, switch: Network) -> None:
    if type(switch) is RemoteSwitch:
        raise ConfigError(f"layer {layer} runs its experts remotely already")
    if type(switch) is not SwitchGLU or type(switch.activation) is not SwiGLU:
        raise ConfigError(f"layer {layer} has experts of another kind than SwiGLU; they cannot run remotely")
    for name in _LINEAR:
        linear = switch[name]
        if type(linear) not in (SwitchLinear, QuantizedSwitchLinear) or "bias" in linear:
            raise ConfigError(f"layer {layer}: {name} has a bias or another form; its experts cannot run remotely")
        if linear.get("global_scale") is not None:
            raise ConfigError(f"layer {layer}: {name} has a global scale; its experts cannot run remotely")
