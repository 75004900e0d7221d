"""The bench's layouts and page contents stay what other implementations compute: digests of both."""

from __future__ import annotations

import hashlib

import pytest

from pdplane import wire
from pdplane.errors import ConfigError
from pdplane.testing.bench_layouts import LAYOUTS, bench_layout, bench_page

# Over tp 1, 2, 4 and 8: the contract with 7 and with 63 parents, then every field's page of room 5, slot 3, by rank.
DIGESTS = {
    "big": "b770262f6c92a8db",
    "compressed": "473fbb2567838992",
    "full_attention": "2cb5ddad14e1b9b5",
    "gqa_small": "662119bc8b1ae205",
    "mla": "3ee571d15c72c927",
    "state_hybrid": "a2df8a2efb6105ae",
    "swa_hybrid": "71763ca8bdc018f9",
}


def test_every_layout_has_a_digest() -> None:
    assert set(DIGESTS) == set(LAYOUTS)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_nothing_drifts(name: str) -> None:
    digest = hashlib.sha256()
    for tp_size in (1, 2, 4, 8):
        for parents in (7, 63):
            digest.update(wire.encode_layout(bench_layout(name, tp_size, parents)))
        layout = bench_layout(name, tp_size, 7)
        for field in layout.fields:
            for rank in range(tp_size):
                digest.update(bench_page(layout, field.field_id, 5, 3, tp_size, rank).tobytes())
    assert digest.hexdigest()[:16] == DIGESTS[name]


def test_an_unknown_layout() -> None:
    with pytest.raises(ConfigError, match="swa_hybrid"):
        bench_layout("none", 1, 1)
