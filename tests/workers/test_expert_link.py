"""The coordinator's link to a worker of the old kind: float16 both ways, and no field that it does not know."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pdplane.errors import SessionLost
from pdplane.ids import Endpoint
from pdplane.workers.experts.remote import ExpertLink, LinkOptions, ModelFacts
from pdplane.workers.experts.requests import from_half, to_half
from pdplane.workers.experts.switch import ExpertCall
from pdplane.workers.experts.tx1 import Tx1Limits, Tx1Token
from tests.workers.raw_tx1 import TOKEN, RawWorker

FACTS = ModelFacts("toy", 2, 4, "whatever")


@pytest.fixture
def old() -> Iterator[RawWorker]:
    found = RawWorker()
    yield found
    found.close()


def test_an_old_worker_gets_and_gives_float16(old: RawWorker) -> None:
    link = ExpertLink(Endpoint("127.0.0.1", old.port), Tx1Token(TOKEN), FACTS, LinkOptions())
    link.open()
    try:
        link.send_load({0: [1, 2]})
        link.receive_load()
        rows = np.array([[1.0, -2.5], [0.1, 65504.0 / 4]], np.float32)
        part = ExpertCall(1, rows.view(np.uint32), "float32", np.array([1, 0, 1]), np.array([0, 1, 2]))
        link.send_exec(part)
        bits, dtype = link.receive_exec(part)
        assert dtype == "float32"
        assert np.array_equal(bits.view(np.float32), rows.astype(np.float16).astype(np.float32)[[1, 0, 1]] * 2)
        assert old.requests[2] == {"layer": 1, "rows": 2, "dim": 2, "pairs": [[1, 0], [0, 1], [1, 2]]}
        assert "id" not in old.requests[1]
        assert link.traffic.pairs == 3
    finally:
        link.close()


@pytest.mark.parametrize("facts", [ModelFacts("toy", 3, 4, ""), ModelFacts("toy", 2, 8, "")])
def test_an_old_worker_of_another_model_is_refused(old: RawWorker, facts: ModelFacts) -> None:
    link = ExpertLink(Endpoint("127.0.0.1", old.port), Tx1Token(TOKEN), facts, LinkOptions())
    with pytest.raises(SessionLost, match="another model"):
        link.open()
    with pytest.raises(SessionLost, match="not connected"):
        link.send_load({0: [1]})


def test_pairs_of_a_part_fit_in_its_frames() -> None:
    options = LinkOptions(limits=Tx1Limits(payload_bytes=1000))
    link = ExpertLink(Endpoint("127.0.0.1", 1), Tx1Token(TOKEN), FACTS, options)
    assert link.max_pairs(8) == 31
    assert link.max_pairs(100_000) == 1


def test_half_precision_rounds_to_nearest_even() -> None:
    wide = np.array([1.0, 1.00390625, 1.01171875, -3.0e38, np.inf], np.float32).view(np.uint32)
    half = np.array([1.0, 1.00390625, 1.01171875], np.float16).view(np.uint16)
    assert from_half(half, "bfloat16").tolist() == [0x3F80, 0x3F80, 0x3F82]
    assert from_half(half, "float32").tolist() == wide[:3].tolist()
    assert to_half(np.array([0x3F80, 0xC020], np.uint16), "bfloat16").view(np.float16).tolist() == [1.0, -2.5]
    assert to_half(half, "float16") is half
