"""Which bytes go where: numpy u64 arrays, one row a run of bytes."""

from __future__ import annotations

import attrs
import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]


@attrs.frozen(eq=False)
class Copies:
    """`length[i]` bytes from source offset `source[i]` to destination offset `destination[i]`, each in its arena."""

    source: U64
    destination: U64
    length: U64

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())
