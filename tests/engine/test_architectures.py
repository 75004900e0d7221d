"""Every architecture of the installed mlx-lm, shrunk: what docs/models.md says of it is what happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from pdplane.engine.tiny import FAMILIES
from pdplane.engine.untyped import uncompiled
from tests.engine.architectures import WINDOW, architectures, judge, small_pair
from tests.engine.pair import prompt_of

PAGE = Path(__file__).parents[2] / "docs/models.md"

NEWEST = (
    "gemma4", "minimax_m3_vl", "deepseek_v32", "kimi_linear", "nemotron_h", "gpt_oss", "llama4", "qwen3_5",
    "glm_moe_dsa", "mimo_v2_flash", "gemma3n", "step3p5",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Take no C++ compiler, and leave no family behind."""
    before = set(FAMILIES)
    with uncompiled():
        yield
    for family in set(FAMILIES) - before:
        del FAMILIES[family]  # type: ignore[attr-defined]


def _lines() -> dict[str, str]:
    """Return the page's lines by architecture."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {line.split("`")[1]: line for line in lines}


def test_the_page_lists_what_the_installed_mlx_lm_has() -> None:
    assert list(_lines()) == architectures()


@pytest.mark.parametrize("name", NEWEST)
def test_the_newest_equal_one_process(name: str) -> None:
    pair = small_pair(name)
    try:
        pair.check(prompt_of(WINDOW + 1), max_tokens=6)
    finally:
        pair.close()
    assert _lines()[name].startswith(f"| `{name}` | yes |")


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures())
def test_the_page_tells_what_happens(name: str) -> None:
    line = _lines()[name]
    if "not checked" in line:
        pytest.skip("its weights cannot be drawn")
    if "Metal" in line and mx.metal.is_available():
        pytest.skip("the page tells what happens without a GPU")
    assert judge(name).line(name) == line
