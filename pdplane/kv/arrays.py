"""The array type of offsets and lengths."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

U64: TypeAlias = npt.NDArray[np.uint64]
"""One-dimensional unsigned 64-bit array; arithmetic wraps, so callers validate before they add."""
